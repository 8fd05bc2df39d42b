"""`--from` of a picture that a single file drew: the file is found by its hash, then by its name."""

import re
import shutil

import pytest
from sd_parsers import ParserManager

from fastdiff import cli
from fastdiff.checkpoints import model_hash
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.runs.model_files import find_recorded
from tests.checkpoints.single_files import ldm


@pytest.fixture
def models(tmp_path):
    """A folder with two files, and others."""
    for name, content in (("a/cat.safetensors", b"cat"), ("b/dog.safetensors", b"dog"), ("b/cat.txt", b"x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def record(name: str, like=None) -> dict:
    return {"model": name, "model_hash": None if like is None else file_hash(like)}


@pytest.mark.parametrize("name", ["gone/cat.safetensors", "C:\\models\\cat.safetensors", "other.safetensors"])
def test_the_hash_counts_first(models, name):
    """Another file has the name, but only one has the contents."""
    found = find_recorded(record(name, models / "b/dog.safetensors"), "p.png", str(models))
    assert found == str(models / "b/dog.safetensors")


def test_then_the_name_counts(models, monkeypatch):
    monkeypatch.setenv("FASTDIFF_MODELS", str(models))
    for name in ("gone/cat.safetensors", "C:\\models\\cat.safetensors"):
        assert find_recorded(record(name, models / "b/cat.txt"), "p.png", None) == str(models / "a/cat.safetensors")
        assert find_recorded(record(name), "p.png", None) == str(models / "a/cat.safetensors")


@pytest.mark.parametrize("name", ["a folder", "org/name", "emoji-sd"])
def test_what_is_no_file_stays(models, name):
    assert find_recorded(record(name), "p.png", str(models)) == name


def test_a_file_that_is_there_is_not_read(models):
    name = str(models / "a/cat.safetensors")
    assert find_recorded(record(name, models / "b/dog.safetensors"), "p.png", str(models)) == name


def test_what_is_missing_is_one_line(models, monkeypatch):
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    digits = file_hash(models / "b/cat.txt")[:10]
    line = f"p.png was drawn with fox.safetensors, model hash {digits}: it is not at gone/fox.safetensors"
    wanted = record("gone/fox.safetensors", models / "b/cat.txt")
    with pytest.raises(InputError, match=f"^{line}, nor in {re.escape(str(models))} by hash or name; give "):
        find_recorded(wanted, "p.png", str(models))
    with pytest.raises(InputError, match=f"^{line}, and no models folder is given; give .* --models-dir"):
        find_recorded(wanted, "p.png", None)
    with pytest.raises(InputError, match=r"fox\.safetensors, model hash unknown: it"):
        find_recorded(wanted | {"model_hash": 7}, "p.png", None)


def test_the_hash_of_a_large_file_is_computed_once(models, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_hash, "_LARGE", 2)
    path, read = models / "a/cat.safetensors", []
    monkeypatch.setattr(model_hash, "_sha256", lambda paths: read.append(paths) or f"digits {len(read)}")

    def hashed(path) -> str:
        monkeypatch.setattr(model_hash, "_begun", {})  # as in a new process
        return file_hash(path)

    assert [hashed(path), hashed(path)] == ["digits 1", "digits 1"]
    assert hashed(models / "b/dog.safetensors") == "digits 2"
    path.write_bytes(b"other")
    assert [hashed(path), hashed(path)] == ["digits 3", "digits 3"]
    for kept in (tmp_path / "cache/fastdiff/hashes").iterdir():
        kept.write_text("[1, 2")
    assert hashed(path) == "digits 4"


def test_a_moved_file_draws_the_same_picture(tmp_path, monkeypatch, capsys):
    """The texts of the PNG name the file as A1111 does, and the picture comes back from another folder."""
    monkeypatch.chdir(tmp_path)
    _, pipe, folder, file = ldm.save_pipeline("sd1", tmp_path)
    flags = ["--device", "cpu", "--steps", "2", "--dtype", "float32"]
    asked = ["--model", "model.safetensors", "--config", str(folder), "--prompt", "the cat", "--seed", "5"]
    assert cli.main(["sample", *asked, *flags, "-o", "first.png", "--num-images", "1"]) == 0
    digits = file_hash(file)
    assert f"Model hash: {digits[:10]}, Model: model, " in png.read_text("first.png")["parameters"]
    (sampler,) = ParserManager().parse("first.png").samplers
    assert (sampler.model.name, sampler.model.hash) == ("model", digits[:10])

    (tmp_path / "models/mine").mkdir(parents=True)
    shutil.move(file, tmp_path / "models/mine/renamed.sft")
    ldm.save({key: 2 * tensor for key, tensor in ldm.whole("sd1", pipe).items()}, tmp_path / "models/model.safetensors")
    again = ["sample", "--from", "first.png", "--device", "cpu"]
    assert cli.main([*again, "--models-dir", "models", "-o", "again.png"]) == 0
    assert png.read_settings("again.png")["model"] == "models/mine/renamed.sft"
    assert pixels("again.png") == pixels("first.png")

    (tmp_path / "models/mine/renamed.sft").unlink()
    capsys.readouterr()
    assert cli.main([*again, "--models-dir", "models", "-o", "other.png"]) == 0
    assert f"and first.png was drawn with {digits[:10]}; the picture will differ\n" in capsys.readouterr().err
    assert pixels("other.png") != pixels("first.png")
    assert cli.main([*again, "--models-dir", "models/mine", "-o", "none.png"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"model.safetensors, model hash {digits[:10]}: it is not at" in err


def pixels(path: str) -> bytes:
    from PIL import Image

    with Image.open(path) as image:
        return image.tobytes()
