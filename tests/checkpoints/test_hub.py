"""Model names: folders, bundled names and hub ids; the hub's client is a stub, or the real one kept offline."""

import json
import shutil
import socket
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from fastdiff.checkpoints import hub
from fastdiff.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STEM = "diffusion_pytorch_model"
INDEX = {
    "_class_name": "DDIMPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "unet": ["diffusers", "UNet2DModel"],
}

DIT_INDEX = {
    "_class_name": "DiTPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "transformer": ["diffusers", "DiTTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write(folder: Path, *names: str, index: dict | None = INDEX) -> Path:
    """A folder with those files, as far as the name resolver looks into them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"_class_name": "UNet2DModel"} if name.endswith("config.json") else {}))
    if index is not None:
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_cache(cache: Path, repo_id: str, *names: str, index: dict | None = INDEX) -> Path:
    """One repository in the layout of huggingface_hub's cache; its snapshot folder."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return write(repo / "snapshots" / COMMIT, *names, index=index)


def assert_one_line(error, *named: str) -> None:
    message = str(error.value)
    assert all(name in message for name in named), message
    assert len(message.splitlines()) == 1


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A stub of the hub: what stands in `remote.folder` can be downloaded; `remote.calls` are the requests."""
    remote = SimpleNamespace(folder=tmp_path / "remote", cache=tmp_path / "cache" / COMMIT, calls=[])

    def snapshot_download(repo_id, *, allow_patterns, **options):
        remote.calls.append({"repo_id": repo_id, **options})
        for path in remote.folder.rglob("*"):
            name = path.relative_to(remote.folder).as_posix()
            if path.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                (remote.cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, remote.cache / name)
        return str(remote.cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    remote.files = lambda: {p.relative_to(remote.cache).as_posix() for p in remote.cache.rglob("*") if p.is_file()}
    return remote


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """The real client with HF_HUB_OFFLINE=1 and an empty cache, whose folder is given."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


# Folders and bundled names


def test_bundled_name():
    assert hub.resolve("emoji64") == hub.bundled_models()["emoji64"]


@pytest.mark.parametrize(
    ("names", "index"), [pytest.param(["config.json"], None, id="model"), pytest.param([], INDEX, id="pipeline")]
)
def test_folder(tmp_path, names, index):
    folder = write(tmp_path / "mine", *names, index=index)
    assert hub.resolve(folder) == hub.resolve(str(folder)) == folder


def test_a_model_folder_of_that_name_comes_before_a_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "emoji64", "config.json", index=None)
    assert hub.resolve("emoji64") == Path("emoji64")


def test_another_folder_of_that_name_does_not_hide_a_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emoji64").mkdir()
    assert hub.resolve("emoji64") == hub.bundled_models()["emoji64"]


def test_a_folder_that_reads_like_a_hub_id_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org" / "model")
    assert hub.resolve("org/model") == Path("org/model")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        pytest.param("emoji46", ["'emoji46'", "did you mean emoji64", "hub id org/name"], id="misspelt"),
        pytest.param("zebra", ["'zebra'", "bundled: emoji64", "hub id org/name"], id="unknown"),
        pytest.param("", ["''", "emoji64"], id="empty"),
        pytest.param("../no/such/folder", ["'../no/such/folder'"], id="no-such-path"),
        pytest.param("x" * 5000, ["bundled"], id="longer-than-a-path"),
        pytest.param("a\0b", ["bundled"], id="nul"),
        pytest.param("https://huggingface.co/org/name", ["hub id org/name"], id="url"),
        pytest.param(__file__, [__file__, "is a file"], id="file"),
        pytest.param(str(Path(__file__).parent), ["model_index.json", "config.json"], id="folder-without-config"),
    ],
)
def test_no_model_of_that_name(name, named, tmp_path, monkeypatch):
    write(tmp_path, "config.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        hub.resolve(name)
    assert_one_line(error, *named)


def test_a_revision_of_a_folder_is_refused():
    with pytest.raises(InputError) as error:
        hub.resolve("emoji64", revision="v2")
    assert_one_line(error, "'v2'", "hub id")


def test_component_folder_falls_back_to_the_flat_layout(tmp_path):
    (tmp_path / "unet").mkdir()
    assert hub.component_folder(tmp_path, "unet") == tmp_path / "unet"
    assert hub.component_folder(tmp_path, "scheduler") == tmp_path


# The hub, stubbed


@pytest.mark.parametrize(
    ("variant", "there", "fetched"),
    [
        pytest.param(None, ["{}.safetensors", "{}.bin", "{}.fp16.safetensors"], ["{}.safetensors"], id="safetensors"),
        pytest.param(None, ["{}.bin", "{}.fp16.safetensors"], ["{}.bin"], id="bin-when-alone"),
        pytest.param("fp16", ["{}.safetensors", "{}.fp16.safetensors"], ["{}.fp16.safetensors"], id="variant"),
        pytest.param(
            None,
            ["{}-00001-of-00001.safetensors", "{}.safetensors.index.json", "{}-00001-of-00001.fp16.safetensors"],
            ["{}-00001-of-00001.safetensors", "{}.safetensors.index.json"],
            id="shards",
        ),
        pytest.param(
            "fp16",
            ["{}.fp16-00001-of-00001.safetensors", "{}.safetensors.index.fp16.json", "{}.safetensors"],
            ["{}.fp16-00001-of-00001.safetensors", "{}.safetensors.index.fp16.json"],
            id="variant-shards",
        ),
        pytest.param(
            "fp16",
            ["{}-00001-of-00001.fp16.safetensors", "{}.safetensors.fp16.index.json", "{}.safetensors"],
            ["{}-00001-of-00001.fp16.safetensors", "{}.safetensors.fp16.index.json"],
            id="older-names-of-variant-shards",
        ),
    ],
)
@pytest.mark.parametrize("prefix", [pytest.param("unet/", id="folders"), pytest.param("", id="flat")])
def test_hub_downloads_configs_and_the_weights_needed(remote, prefix, variant, there, fetched):
    scheduler = "scheduler/scheduler_config.json" if prefix else "scheduler_config.json"
    configs = {f"{prefix}config.json", scheduler, "fastdiff.json"}
    others = [f"checkpoint-500/unet/{STEM}.safetensors", "README.md", "vae/config.json", "run.py"]
    write(remote.folder, *configs, *others, *(prefix + name.format(STEM) for name in there))
    assert hub.resolve("org/name", variant=variant) == remote.cache
    assert remote.files() == {"model_index.json", *configs, *(prefix + name.format(STEM) for name in fetched)}


@pytest.mark.parametrize(
    "weights",
    [("safetensors", "safetensors"), ("bin", "safetensors"), ("safetensors", "bin")],
    ids=["safetensors", "old-transformer", "old-vae"],
)
def test_hub_downloads_the_vae_of_a_transformer(remote, weights):
    transformer, vae = weights
    wanted = {f"transformer/{STEM}.{transformer}", "transformer/config.json", f"vae/{STEM}.{vae}", "vae/config.json"}
    others = ["unet/config.json", f"unet/{STEM}.safetensors", f"vae/{STEM}.fp16.safetensors"]
    write(remote.folder, *wanted, *others, "scheduler/scheduler_config.json", index=DIT_INDEX)
    assert hub.resolve("org/name") == remote.cache
    assert wanted <= remote.files()
    assert not {name for name in remote.files() - wanted if name.endswith((".safetensors", ".bin"))}


def test_hub_transformer_without_its_vaes_weights(remote):
    write(remote.folder, f"transformer/{STEM}.safetensors", "vae/config.json", index=DIT_INDEX)
    with pytest.raises(InputError, match="org/name has no weights"):
        hub.resolve("org/name")


def test_hub_passes_revision_and_token_on_and_stays_on_one_commit(remote):
    write(remote.folder, "unet/config.json", f"unet/{STEM}.safetensors")
    hub.resolve("org/name", revision="v2", token="hf_secret", local_files_only=True)
    same = {"repo_id": "org/name", "token": "hf_secret", "local_files_only": True}
    assert remote.calls == [{**same, "revision": "v2"}, {**same, "revision": COMMIT}]


def test_hub_fetches_a_plain_model(remote):
    write(remote.folder, "config.json", f"{STEM}.safetensors", index=None)
    assert hub.resolve("org/name") == remote.cache


@pytest.mark.parametrize(
    ("names", "index", "named"),
    [
        pytest.param([], INDEX | {"_class_name": "LDMPipeline"}, "'LDMPipeline'", id="pipeline"),
        pytest.param(["model.gguf"], None, "neither model_index.json nor config.json", id="no-config"),
    ],
)
def test_hub_model_that_fastdiff_cannot_run_is_refused_before_its_weights_come(remote, names, index, named):
    write(remote.folder, f"unet/{STEM}.safetensors", *names, index=index)
    with pytest.raises(InputError) as error:
        hub.resolve("org/name")
    assert_one_line(error, named)
    assert len(remote.calls) == 1


def test_hub_model_of_another_class_is_refused_before_its_weights_come(remote):
    write(remote.folder, f"{STEM}.safetensors", index=None)
    (remote.folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(InputError) as error:
        hub.resolve("org/name")
    assert_one_line(error, "'AutoencoderKL'")
    assert len(remote.calls) == 1


@pytest.mark.parametrize("variant", [pytest.param(None, id="no-weights"), pytest.param("fp8", id="no-such-variant")])
def test_hub_model_without_the_weights_asked_for(remote, variant):
    write(remote.folder, "unet/config.json", *([f"unet/{STEM}.safetensors"] if variant else []))
    with pytest.raises(InputError) as error:
        hub.resolve("org/name", variant=variant)
    assert_one_line(error, "org/name", "https://huggingface.co/org/name/tree/main", variant or "weights")


def http_error(kind: type[Exception]) -> Exception:
    return kind("404 Client Error\nmore\nlines", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        pytest.param(
            http_error(errors.GatedRepoError), ["https://huggingface.co/org/name", "hf auth login"], id="gated"
        ),
        pytest.param(http_error(errors.RepositoryNotFoundError), ["private", "hf auth login"], id="not-found"),
        pytest.param(http_error(errors.RevisionNotFoundError), ["'v9'", "commits"], id="no-such-revision"),
        pytest.param(http_error(errors.DisabledRepoError), ["disabled"], id="disabled"),
        pytest.param(http_error(errors.HfHubHTTPError), ["HfHubHTTPError", "404", "try again"], id="server-error"),
        pytest.param(errors.LocalEntryNotFoundError("no\nfile"), ["cache", "HF_HUB_OFFLINE"], id="not-cached"),
        pytest.param(errors.LocalTokenNotFoundError("none"), ["hf auth login"], id="no-token"),
        pytest.param(errors.HFValidationError("bad"), ["org/name"], id="bad-id"),
        pytest.param(errors.HTTPError("proxy\nsays no"), ["proxy", "try again"], id="transport"),
        pytest.param(OSError(28, "No space left on device"), ["No space left"], id="disk-full"),
    ],
)
def test_hub_refusals_are_one_line_with_the_remedy(monkeypatch, raised, named):
    def snapshot_download(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(InputError) as error:
        hub.resolve("org/name", revision="v9")
    assert_one_line(error, "hub model org/name", *named)


# The hub's own client, offline


def test_offline_a_cached_model_resolves(offline):
    snapshot = write_cache(offline, "org/name", "unet/config.json", f"unet/{STEM}.bin")
    assert hub.resolve("org/name") == snapshot


def test_offline_a_model_that_is_not_cached_is_one_line(offline):
    with pytest.raises(InputError) as error:
        hub.resolve("org/name")
    assert_one_line(error, "org/name", "not in the local cache", "HF_HUB_OFFLINE")


def test_the_clients_own_check_of_an_id_is_one_line(offline):
    with pytest.raises(InputError) as error:
        hub.resolve("org/name--with..dots")
    assert_one_line(error, "not a valid hub id", "org/name")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cached_models_are_those_that_fastdiff_can_draw_with(cache):
    pipeline = write_cache(cache, "org/pipeline")
    model = write_cache(cache, "org/model", "config.json", index=None)
    write_cache(cache, "org/unsupported", index=INDEX | {"_class_name": "LDMPipeline"})
    write_cache(cache, "org/empty", index=None)
    bert = write_cache(cache, "org/bert", index=None)
    (bert / "config.json").write_text("{}")
    assert hub.cached_models() == {"org/model": model, "org/pipeline": pipeline}


def test_cached_models_take_the_main_revision(cache):
    main = write_cache(cache, "org/name")
    write(main.parent / ("f" * 40))
    assert hub.cached_models() == {"org/name": main}


def test_cached_models_that_cannot_be_read_are_listed_and_stop_no_other(cache):
    good = write_cache(cache, "org/good")
    dangling, half = (write_cache(cache, f"org/{name}", index=None) for name in ("dangling", "half"))
    (dangling / "model_index.json").symlink_to("../../blobs/gone")
    (half / "model_index.json").write_text("{")
    damaged = cache / "models--org--damaged"
    (damaged / "snapshots").mkdir(parents=True)
    (damaged / "refs" / "main").mkdir(parents=True)
    (cache / "models--org--file").touch()
    assert hub.cached_models() == {"org/dangling": dangling, "org/good": good, "org/half": half}


def test_a_cached_model_without_permission_is_listed(cache, monkeypatch):
    good, locked = write_cache(cache, "org/good"), write_cache(cache, "org/locked").parent
    listing = Path.iterdir

    def iterdir(folder):
        if folder == locked:
            raise PermissionError(13, "Permission denied", str(folder))
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert hub.cached_models() == {"org/good": good, "org/locked": locked.parent}


def test_no_cache_means_no_cached_models(cache):
    assert hub.cached_models() == {}
    cache.write_text("a file in its place")
    assert hub.cached_models() == {}


def test_bundled_models_are_listed_without_torch_or_the_hub_client():
    code = """if True:
        import sys
        from fastdiff.checkpoints import hub
        from fastdiff.checkpoints import model_info
        model_info.ModelInfo.from_folder(hub.resolve("emoji64")).label_index("noto animals")
        print([name for name in ("torch", "numpy", "huggingface_hub", "diffusers") if name in sys.modules])
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
