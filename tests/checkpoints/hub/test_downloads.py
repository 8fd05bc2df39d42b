"""Downloads from the hub, with a stub of its client: the requested files, and errors."""

import json
import os
import shutil
from fnmatch import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from fastdiff import DDIMScheduler
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.registry import CONTROLNET, VAE
from fastdiff.errors import InputError
from fastdiff.pipelines import Pipeline
from fastdiff.text.tokenizer import CLIPTokenizer
from tests.checkpoints.hub.folders import COMMIT, DIT_INDEX, INDEX, SD_INDEX, STEM, assert_one_line, write


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A stub of the hub: files in `remote.folder` can be downloaded; `remote.calls` are the requests."""
    remote = SimpleNamespace(folder=tmp_path / "remote", cache=tmp_path / "cache" / COMMIT, calls=[])

    def snapshot_download(repo_id, *, allow_patterns, **options):
        remote.calls.append({"repo_id": repo_id, **options})
        for path in remote.folder.rglob("*"):
            name = path.relative_to(remote.folder).as_posix()
            if path.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                (remote.cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, remote.cache / name)
        return str(remote.cache)

    def list_repo_files(repo_id, *, revision, token):
        if os.environ.get("OFFLINE"):
            raise errors.OfflineModeIsEnabled("offline")
        remote.calls.append({"revision": revision, "token": token})
        return [path.relative_to(remote.folder).as_posix() for path in remote.folder.rglob("*") if path.is_file()]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_repo_files)
    remote.files = lambda: {p.relative_to(remote.cache).as_posix() for p in remote.cache.rglob("*") if p.is_file()}
    return remote


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


SD_FILES = {
    "scheduler/scheduler_config.json",
    *(f"{part}/config.json" for part in ("unet", "vae", "text_encoder")),
    *(f"tokenizer/{name}" for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")),
}
SD_OTHERS = {  # other files in the same repository
    *(f"safety_checker/{name}" for name in ("config.json", "model.safetensors", "pytorch_model.bin")),
    "feature_extractor/preprocessor_config.json",
    "v1-5-pruned.safetensors",
    "text_encoder/flax_model.msgpack",
    f"unet/{STEM}.non_ema.safetensors",
}
SHARDS = "{}-00001-of-00002", "{}-00002-of-00002"


@pytest.mark.parametrize(
    ("variant", "fetched", "others"),
    [
        pytest.param(
            None,
            {"unet/{}.safetensors", "vae/{}.safetensors", "text_encoder/model.safetensors"},
            {"unet/{}.bin", "vae/{}.fp16.safetensors", "text_encoder/pytorch_model.bin"},
            id="safetensors",
        ),
        pytest.param(
            None, {"unet/{}.bin", "vae/{}.bin", "text_encoder/pytorch_model.bin"}, {"unet/{}.fp16.bin"}, id="bin"
        ),
        pytest.param(
            "fp16",
            {"unet/{}.fp16.safetensors", "vae/{}.fp16.safetensors", "text_encoder/model.fp16.safetensors"},
            {"unet/{}.safetensors", "vae/{}.safetensors", "text_encoder/model.safetensors", "unet/{}.fp16.bin"},
            id="variant",
        ),
        pytest.param(
            None,
            {
                *("unet/{}.safetensors", "vae/{}.safetensors", "text_encoder/model.safetensors.index.json"),
                *(f"text_encoder/{shard}.safetensors".replace("{}", "model") for shard in SHARDS),
            },
            {"text_encoder/pytorch_model.bin", "text_encoder/model.fp16.safetensors"},
            id="shards-of-the-encoder",
        ),
        pytest.param(
            "fp16",
            {
                *("unet/{}.fp16.safetensors", "vae/{}.fp16.safetensors"),
                *(
                    "text_encoder/model.safetensors.index.fp16.json",
                    "text_encoder/model.fp16-00001-of-00001.safetensors",
                ),
            },
            {"text_encoder/model-00001-of-00001.safetensors"},
            id="variant-shards-of-the-encoder",
        ),
    ],
)
def test_hub_downloads_all_parts_of_a_text_pipeline_and_nothing_else(remote, variant, fetched, others):
    fetched, others = ({name.format(STEM) for name in names} for names in (fetched, others))
    write(remote.folder, *SD_FILES, *SD_OTHERS, *fetched, *others, index=SD_INDEX)
    (remote.folder / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    assert hub.resolve("org/name", variant=variant) == remote.cache
    assert remote.files() == {"model_index.json", *SD_FILES, *fetched}


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_hub_a_downloaded_text_pipeline_is_whole(remote, text_folder, kind):
    remote.folder = text_folder(kind)
    pipe = Pipeline.from_pretrained("org/name", device="cpu")
    assert pipe("a cat", num_inference_steps=1, output_type="np").images.shape == (1, 16, 16, 3)


@pytest.mark.parametrize("layout", ["one-file", "two-files", "old", "both"])
def test_hub_a_downloaded_tokenizer_is_whole(remote, text_folder, save_tokenizer, tmp_path, layout):
    remote.folder = shutil.copytree(text_folder("sd1"), tmp_path / "sd1", ignore=shutil.ignore_patterns("tokenizer"))
    theirs = CLIPTokenizer(save_tokenizer(remote.folder / "tokenizer", layout=layout, pad="!"))
    ours = CLIPTokenizer(hub.resolve("org/name") / "tokenizer")
    assert ours("the cat, and more").ids == theirs("the cat, and more").ids


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("tokenizer", "has no tokenizer in diffusers' layout"),
        ("text_encoder", "has no weights of its text_encoder in diffusers' layout"),
        ("vae", "has no weights of its vae in"),
    ],
)
def test_hub_a_text_pipeline_without_a_part_is_refused(remote, text_folder, tmp_path, missing, named):
    without = shutil.ignore_patterns("*.safetensors", "vocab.json", "tokenizer*.json", "merges.txt")
    remote.folder = shutil.copytree(text_folder("sd1"), tmp_path / "sd1")
    shutil.rmtree(remote.folder / missing)
    shutil.copytree(text_folder("sd1") / missing, remote.folder / missing, ignore=without)
    with pytest.raises(InputError) as error:
        hub.resolve("org/name")
    assert_one_line(error, named, "https://huggingface.co/org/name/tree/main")
    assert missing != "tokenizer" or not any(remote.cache.rglob("*.safetensors"))  # before the weights come


def test_hub_passes_revision_and_token_on_and_stays_on_one_commit(remote):
    write(remote.folder, "unet/config.json", f"unet/{STEM}.safetensors")
    options = {"token": "hf_secret", "local_files_only": True, "cache_dir": "there", "force_download": True}
    hub.resolve("org/name", revision="v2", **options)
    same = {"repo_id": "org/name", **options}
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


def test_a_model_alone_is_downloaded_alone(remote):
    """A repository may hold a VAE alone, or a pipeline of which a call wants the VAE."""
    config = json.dumps({"_class_name": "AutoencoderKL"})
    alone = {"config.json": config, f"{STEM}.safetensors": ""}
    inside = {f"vae/{name}": content for name, content in alone.items()}
    for files, folder, options in (
        (alone, "", {}),
        (inside, "vae", {}),
        (inside, "vae", {"subfolder": "vae"}),
    ):
        shutil.rmtree(remote.folder, ignore_errors=True)
        shutil.rmtree(remote.cache, ignore_errors=True)
        write(remote.folder, f"unet/{STEM}.safetensors", "unet/config.json", *files)
        assert hub.resolve_part("org/name", VAE, **options) == remote.cache / folder
        assert remote.files() == files.keys()


def test_a_repository_of_several_controlnets_is_one_line(remote):
    """Its weights do not come. A subfolder chooses one."""
    config = json.dumps({"_class_name": "ControlNetModel"})
    for names in (("controlnet", "controlnet_1"), ("canny", "depth")):
        shutil.rmtree(remote.folder, ignore_errors=True)
        shutil.rmtree(remote.cache, ignore_errors=True)
        write(remote.folder, *(f"{name}/{file}" for name in names for file in ("config.json", f"{STEM}.safetensors")))
        for name in names:
            (remote.folder / name / "config.json").write_text(config)
        with pytest.raises(InputError) as error:
            hub.resolve_part("org/name", CONTROLNET)
        assert_one_line(error, f"org/name holds 2 ControlNets: {', '.join(names)}; give", f"subfolder={names[0]!r})")
        assert remote.files() <= {f"{name}/config.json" for name in names}
        for i, place in ((1, {"subfolder": names[1]}), (0, {})):
            named = "org/name" if place else f"org/name:{names[0]}"
            assert hub.resolve_part(named, CONTROLNET, **place) == remote.cache / names[i]
            weights = {f"{name}/{STEM}.safetensors" for name in names[i:]}
            assert {name for name in remote.files() if name.endswith(".safetensors")} == weights
    (remote.folder / "config.json").write_text(config)
    (remote.folder / f"{STEM}.safetensors").write_text("")
    shutil.rmtree(remote.cache)
    assert hub.resolve_part("org/name", CONTROLNET) == remote.cache, "it is one itself"


def test_the_config_of_a_scheduler_is_downloaded_alone(remote):
    write(remote.folder, "scheduler/scheduler_config.json", f"unet/{STEM}.safetensors")
    (remote.folder / "scheduler" / "scheduler_config.json").write_text("{}")
    DDIMScheduler.from_pretrained("org/name", subfolder="scheduler", revision="v1", cache_dir="here")
    assert remote.files() == {"scheduler/scheduler_config.json"}
    (call,) = remote.calls
    assert (call["revision"], call["cache_dir"]) == ("v1", "here")


def test_an_embedding_is_one_file_of_the_hub(remote, text_folder):
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    (remote.folder / "more").mkdir(parents=True)
    save_file({"<cat>": torch.ones(2, 32)}, remote.folder / "learned_embeds.safetensors")
    save_file({"emb_params": torch.ones(1, 32)}, remote.folder / "more" / "blurb.safetensors")
    (remote.folder / "learned_embeds.bin").write_bytes(b"")
    pipe.load_textual_inversion("org/name", revision="v2", hf_token="secret")
    assert remote.files() == {"learned_embeds.safetensors"}
    assert (remote.calls[0]["revision"], remote.calls[0]["token"]) == ("v2", "secret")
    pipe.load_textual_inversion("org/name", subfolder="more", weight_name="blurb.safetensors")
    assert dict(pipe.tokenizer.embeddings) == {"<cat>": 2, "blurb": 1}
    with pytest.raises(InputError, match=r"org/name has no no\.safetensors; name the file") as error:
        pipe.load_textual_inversion("org/name", weight_name="no.safetensors")
    assert_one_line(error)


class TestTheFileOfALora:
    def test_the_usual_name_or_else_the_only_file(self, remote):
        write(remote.folder, "README.md", "ink.bin", "deep/style.SAFETENSORS")
        assert hub.lora_file("org/name") == remote.cache / "deep/style.SAFETENSORS"
        assert remote.files() == {"deep/style.SAFETENSORS"}
        write(remote.folder, "ink.safetensors")
        assert hub.lora_file("org/name", "deep", token="secret") == remote.cache / "deep/style.SAFETENSORS"
        assert [(call["revision"], call["token"]) for call in remote.calls[-3:]] == [
            (None, "secret"), (COMMIT, "secret"), (COMMIT, "secret")
        ]  # fmt: skip
        write(remote.folder, hub.LORA_NAME)
        assert hub.lora_file("org/name") == remote.cache / hub.LORA_NAME
        assert remote.files() == {"deep/style.SAFETENSORS", hub.LORA_NAME}

    def test_several_or_none_are_one_line(self, remote):
        write(remote.folder, "README.md", *(f"{i}.safetensors" for i in range(12)))
        with pytest.raises(InputError) as error:
            hub.lora_file("org/name")
        assert_one_line(
            error, f"hub model org/name has no {hub.LORA_NAME}, and 12 others: 0.safetensors, 1.saf", "4 more;"
        )
        with pytest.raises(InputError) as error:
            hub.lora_file("org/name", "deep")
        assert_one_line(error, f"hub model org/name has no deep/{hub.LORA_NAME}; name the file with weight_name=")
        assert not remote.files()

    def test_offline_the_files_in_the_cache_count(self, remote, monkeypatch):
        write(remote.cache, "ink.safetensors")
        write(remote.folder, "other.safetensors")
        assert hub.lora_file("org/name", local_files_only=True) == remote.cache / "ink.safetensors"
        monkeypatch.setenv("OFFLINE", "1")
        assert hub.lora_file("org/name") == remote.cache / "ink.safetensors"
