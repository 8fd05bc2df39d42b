"""Model names: folders, bundled names and hub ids, with the real hub client offline."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.registry import CONTROLNET, controlnets_below
from fastdiff.checkpoints.single_files import listing
from fastdiff.errors import InputError
from tests.checkpoints.hub.folders import COMMIT, INDEX, STEM, assert_one_line, write


def write_cache(cache: Path, repo_id: str, *names: str, index: dict | None = INDEX) -> Path:
    """Write a repository in the layout of huggingface_hub's cache. Return its snapshot folder."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return write(repo / "snapshots" / COMMIT, *names, index=index)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Set HF_HUB_OFFLINE=1 and an empty cache for the real client. Return the cache's folder."""
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
        pytest.param("zebra", ["'zebra'", "bundled: emoji-sd, emoji64", "hub id org/name"], id="unknown"),
        pytest.param("", ["''", "emoji64"], id="empty"),
        pytest.param("../no/such/folder", ["'../no/such/folder'"], id="no-such-path"),
        pytest.param("x" * 5000, ["bundled"], id="longer-than-a-path"),
        pytest.param("a\0b", ["bundled"], id="nul"),
        pytest.param("https://huggingface.co/org/name", ["hub id org/name"], id="url"),
        pytest.param(__file__, [__file__, "is a file", "from_single_file"], id="file"),
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


# The real hub client, offline


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
    assert listing.cached_models() == {"org/model": model, "org/pipeline": pipeline}


def test_cached_models_take_the_main_revision(cache):
    main = write_cache(cache, "org/name")
    write(main.parent / ("f" * 40))
    assert listing.cached_models() == {"org/name": main}


def test_cached_models_that_cannot_be_read_are_listed_and_stop_no_other(cache):
    good = write_cache(cache, "org/good")
    dangling, half = (write_cache(cache, f"org/{name}", index=None) for name in ("dangling", "half"))
    (dangling / "model_index.json").symlink_to("../../blobs/gone")
    (half / "model_index.json").write_text("{")
    damaged = cache / "models--org--damaged"
    (damaged / "snapshots").mkdir(parents=True)
    (damaged / "refs" / "main").mkdir(parents=True)
    (cache / "models--org--file").touch()
    assert listing.cached_models() == {"org/dangling": dangling, "org/good": good, "org/half": half}


def test_a_cached_model_without_permission_is_listed(cache, monkeypatch):
    good, locked = write_cache(cache, "org/good"), write_cache(cache, "org/locked").parent
    iterate = Path.iterdir

    def iterdir(folder):
        if folder == locked:
            raise PermissionError(13, "Permission denied", str(folder))
        return iterate(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert listing.cached_models() == {"org/good": good, "org/locked": locked.parent}


def test_cached_controlnets(cache):
    """A repository is one, or has a folder for each. The ControlNets of pipelines are their pipelines'."""
    write_cache(cache, "org/model", "config.json", index=None)
    pipeline = write_cache(cache, "org/pipeline", "controlnet/config.json")
    (pipeline / "controlnet/config.json").write_text(json.dumps({"_class_name": "ControlNetModel"}))
    for name, configs in (("one", ["config.json"]), ("several", ["canny/config.json", "depth/config.json"])):
        folder = write_cache(cache, f"org/{name}", *configs, index=None)
        for config in configs:
            (folder / config).write_text(json.dumps({"_class_name": "ControlNetModel"}))
    broken = write_cache(cache, "org/broken", "config.json", index=None)
    (broken / "config.json").write_text("{")
    (cache / "models--org--damaged" / "refs" / "main").mkdir(parents=True)
    found = listing.cached_controlnets()
    assert list(found) == ["org/one", "org/several"]
    assert not listing.cached_models().keys() & found.keys()
    assert controlnets_below(found["org/several"]) == ["canny", "depth"]


SEVERAL = {
    "a folder for each": (["canny", "depth"], "2 ControlNets: canny, depth; give the folder of one, as in --control "),
    "of a pipeline": (["controlnet", "controlnet_1"], "2 ControlNets: controlnet, controlnet_1; give the folder of"),
    "one in a folder": (["canny"], "a ControlNet in a folder: canny; give the folder of one"),
    "many": ([f"net{i}" for i in range(10)], "net6, net7 and 2 more; give"),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_a_folder_with_several_controlnets_is_one_line(case, tmp_path):
    names, message = SEVERAL[case]
    for name in names:
        write(tmp_path / name, "config.json", index=None)
        (tmp_path / name / "config.json").write_text(json.dumps({"_class_name": "ControlNetModel"}))
    with pytest.raises(InputError, match=re.escape(message)) as error:
        hub.resolve_part(tmp_path, CONTROLNET)
    assert_one_line(error, f"ControlNetModel.from_pretrained({str(tmp_path)!r}, subfolder={names[0]!r})")
    assert f":{names[0]}, or in Python " in str(error.value)
    assert hub.resolve_part(tmp_path, CONTROLNET, names[0]) == tmp_path / names[0]
    assert hub.resolve_part(f"{tmp_path}:{names[0]}", CONTROLNET) == tmp_path / names[0]
    assert hub.resolve_part(tmp_path / names[0], CONTROLNET) == tmp_path / names[0]
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "ControlNetModel"}))
    if "controlnet" not in names:
        assert hub.resolve_part(tmp_path, CONTROLNET) == tmp_path, "it is one itself"


def test_no_cache_means_no_cached_models(cache):
    assert listing.cached_models() == {}
    cache.write_text("a file in its place")
    assert listing.cached_models() == {}


def test_bundled_models_are_listed_without_torch_or_the_hub_client():
    code = """if True:
        import sys
        from fastdiff.checkpoints import hub
        from fastdiff.checkpoints import model_info
        model_info.ModelInfo.from_folder(hub.resolve("emoji64")).label_index("noto animals")
        print([name for name in ("torch", "numpy", "huggingface_hub", "diffusers") if name in sys.modules])
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
