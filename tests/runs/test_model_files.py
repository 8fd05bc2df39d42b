"""`--from` of a picture that single files drew: each file is found by its hash, then by its name."""

import re
import shutil

import pytest
from sd_parsers import ParserManager

from fastdiff import cli
from fastdiff.checkpoints import model_hash
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.errors import InputError
from fastdiff.requests import png
from fastdiff.requests.png import Recorded
from fastdiff.runs.model_files import find_recorded
from tests.checkpoints.single_files import ldm


@pytest.fixture
def models(tmp_path):
    """A folder with two files, and others."""
    for name, content in (("a/cat.safetensors", b"cat"), ("b/dog.safetensors", b"dog"), ("b/cat.txt", b"x")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def recorded(name: str, like=None, setting: str = "model") -> Recorded:
    return Recorded("p.png", {setting: name, f"{setting}_hash": None if like is None else file_hash(like)})


@pytest.mark.parametrize("setting", ["model", "vae"])
@pytest.mark.parametrize("name", ["gone/cat.safetensors", "C:\\models\\cat.safetensors", "other.safetensors"])
def test_the_hash_counts_first(models, name, setting):
    """Another file has the name, but only one has the contents."""
    found = find_recorded(recorded(name, models / "b/dog.safetensors", setting), setting, str(models))
    assert found == str(models / "b/dog.safetensors")


def test_then_the_name_counts(models, monkeypatch):
    monkeypatch.setenv("FASTDIFF_MODELS", str(models))
    for name in ("gone/cat.safetensors", "C:\\models\\cat.safetensors"):
        for source in (recorded(name, models / "b/cat.txt"), recorded(name)):
            assert find_recorded(source, "model", None) == str(models / "a/cat.safetensors")


@pytest.mark.parametrize("name", ["a folder", "org/name", "emoji-sd"])
def test_what_is_no_file_stays(models, name):
    assert find_recorded(recorded(name), "model", str(models)) == name


def test_a_file_that_is_there_is_not_read(models):
    name = str(models / "a/cat.safetensors")
    assert find_recorded(recorded(name, models / "b/dog.safetensors"), "model", str(models)) == name


def test_what_is_missing_is_one_line(models, monkeypatch):
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    digits = file_hash(models / "b/cat.txt")[:10]
    line = f"p.png was drawn with fox.safetensors, model hash {digits}: it is not at gone/fox.safetensors"
    wanted = recorded("gone/fox.safetensors", models / "b/cat.txt")
    with pytest.raises(InputError, match=f"^{line}, nor in {re.escape(str(models))} by hash or name; give "):
        find_recorded(wanted, "model", str(models))
    with pytest.raises(InputError, match=f"^{line}, and no models folder is given; give .* --models-dir"):
        find_recorded(wanted, "model", None)
    with pytest.raises(InputError, match=r"fox\.safetensors, VAE hash unknown: it .*; give the file with --vae, or"):
        find_recorded(recorded("fox.safetensors", setting="vae"), "vae", None)


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


def test_a_moved_vae_draws_the_same_picture(tmp_path, monkeypatch, capsys):
    """As a moved model, also beside a model folder."""
    monkeypatch.chdir(tmp_path)
    _, pipe, folder, _ = ldm.save_pipeline("sd1", tmp_path)
    state = {key: 2 * tensor for key, tensor in ldm.ldm_vae(pipe.vae).items()}
    vae = ldm.save(ldm.prefixed("first_stage_model.", state), tmp_path / "my vae.safetensors")
    drawn = ["sample", "--device", "cpu", "--steps", "1", "--num-images", "1"]
    asked = ["--model", str(folder), "--prompt", "the cat", "--seed", "5"]
    assert cli.main([*drawn, *asked, "-o", "own.png"]) == 0
    assert "VAE" not in png.read_text("own.png")["parameters"]
    assert cli.main([*drawn, *asked, "--vae", vae.name, "-o", "first.png"]) == 0
    digits = file_hash(vae)
    assert f", VAE hash: {digits[:10]}, VAE: my vae.safetensors, " in png.read_text("first.png")["parameters"]

    (tmp_path / "models/vae").mkdir(parents=True)
    shutil.move(vae, tmp_path / "models/vae/renamed.sft")
    ldm.save(ldm.prefixed("first_stage_model.", ldm.ldm_vae(pipe.vae)), tmp_path / "models/my vae.safetensors")
    again = [*drawn, "--from", "first.png", "--models-dir"]
    assert cli.main([*again, "models", "-o", "again.png"]) == 0
    assert png.read_settings("again.png")["vae"] == "models/vae/renamed.sft"
    assert pixels("again.png") == pixels("first.png") != pixels("own.png")

    (tmp_path / "models/vae/renamed.sft").unlink()
    capsys.readouterr()
    assert cli.main([*again, "models", "-o", "other.png"]) == 0
    known = f"has the VAE hash {file_hash(tmp_path / 'models/my vae.safetensors')[:10]}, and first.png was drawn with"
    assert f"{known} {digits[:10]}; the picture will differ\n" in capsys.readouterr().err
    assert pixels("other.png") == pixels("own.png")
    assert cli.main([*again, "models/vae", "-o", "none.png"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"my vae.safetensors, VAE hash {digits[:10]}: it is not at" in err


def test_the_png_is_read_once(tmp_path, monkeypatch):
    """Its settings serve the request, the search for the file and the notices."""
    monkeypatch.chdir(tmp_path)
    drawn = ["sample", "--device", "cpu", "--steps", "1", "--num-images", "1"]
    assert cli.main([*drawn, "--model", "emoji64", "--label", "0", "-o", "first.png"]) == 0
    texts, read = png.read_text, []
    monkeypatch.setattr(png, "read_text", lambda path: read.append(str(path)) or texts(path))
    assert cli.main([*drawn, "--from", "first.png", "-o", "again.png"]) == 0
    assert read.count("first.png") == 1


def pixels(path: str) -> bytes:
    from PIL import Image

    with Image.open(path) as image:
        return image.tobytes()
