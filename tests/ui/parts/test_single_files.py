"""Single files among the models of the page: the list, drawing, and the file that drew a PNG."""

import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastdiff import cli
from fastdiff.checkpoints import hub, model_hash
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.models import Models
from fastdiff.requests import png
from fastdiff.ui.drawing import draw, prepare, with_model_here
from fastdiff.ui.parts.request import Limits, UncheckedRequest
from fastdiff.ui.shared import Shared
from tests.checkpoints.single_files import ldm
from tests.requests.foreign_pictures import png_picture
from tests.ui.history.unserved import UnservedPage, upload

SMALL, XL = "./small.safetensors", "./deep/my XL ü.SFT"
UPLOAD = "Drop a picture anywhere to load its settings"


@pytest.fixture(scope="module")
def shared(files_dir) -> Shared:
    return Shared(Models(files_dir, device="cpu"))


def names_of(catalogue: Catalogue) -> list[str]:
    """Return the names of the models that are not bundled."""
    return [name for name in catalogue.names() if name not in hub.bundled_models()]


def test_files_are_listed_wherever_they_are(shared):
    assert names_of(shared.catalogue) == [XL, SMALL]


NAMES = ("plain.safetensors", "UPPER.SAFETENSORS", "Short.Sft", "two  spaces.sft", "ünï 图 🐱.safetensors")
NAMES += ("a/b/deep.sft", "comma, colon: {0}.safetensors", "-dash.safetensors", "link.safetensors", "linked/one.sft")


def test_the_command_the_list_and_the_page_take_the_same_names(files_dir, tmp_path, monkeypatch, capsys):
    mine, target = tmp_path / "models", tmp_path / "elsewhere"
    target.mkdir()
    shutil.copy(files_dir / SMALL, target / "one.sft")
    for name in NAMES[:-2]:
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(target / "one.sft", mine / name)
    (mine / "link.safetensors").symlink_to(target / "one.sft")
    (mine / "linked").symlink_to(target)
    shared = Shared(Models(mine, device="cpu"))
    assert set(names_of(shared.catalogue)) == {f"./{name}" for name in NAMES}
    monkeypatch.chdir(mine)
    assert cli.main(["models", "--models-dir", "."]) == 0
    listed = re.findall(r"^(.+?) +file +checkpoint of Stable Diffusion 1$", capsys.readouterr().out, re.MULTILINE)
    assert set(listed) == set(NAMES)
    assert [cli.main(["info", f"./{name}"]) for name in NAMES] == [0] * len(NAMES)
    pictures = set()
    for number, name in enumerate((NAMES[4], NAMES[6], NAMES[-1])):
        out = str(tmp_path / f"{number}.png")
        flags = ["--prompt", "the cat", "-s", "5", "--steps", "1", "--num-images", "1", "--device", "cpu", "-o", out]
        assert cli.main(["sample", "-m", f"./{name}", *flags]) == 0
        asked = UncheckedRequest(model=f"./{name}", prompt="the cat", seed=5, steps=1)
        *_, (_, [picture]) = draw(prepare(asked, shared, Limits()), shared, tmp_path / str(number))
        assert picture.record["model"] == png.read_settings(out)["model"] == f"./{name}"
        pictures |= {pixels(picture).tobytes(), pixels_of(Path(out)).tobytes()}
    assert len(pictures) == 1


def test_links_are_followed_except_in_a_circle(files_dir, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.safetensors").symlink_to(files_dir / SMALL)
    (tmp_path / "models" / "more").symlink_to(files_dir / "deep")
    (tmp_path / "models" / "circle").symlink_to(tmp_path)
    catalogue = Catalogue(tmp_path / "models")
    assert names_of(catalogue) == ["./more/my XL ü.SFT", "./one.safetensors"]
    assert catalogue.card("./one.safetensors").file == tmp_path / "models" / "one.safetensors"


def drawn_by(shared: Shared, folder: Path, **asked):
    asked = UncheckedRequest(prompt="the cat", seed=5, steps=2, **asked)
    *_, (_, [picture]) = draw(prepare(asked, shared, Limits()), shared, folder)
    return picture


@pytest.mark.parametrize("name", [SMALL, XL])
def test_pictures_are_the_commands_byte_for_byte_and_name_the_file(shared, files_dir, monkeypatch, tmp_path, name):
    picture = drawn_by(shared, tmp_path / "page", model=name)
    monkeypatch.chdir(files_dir)
    command = ["sample", "-m", name, "--prompt", "the cat", "--num-images", "1", "-s", "5", "--steps", "2"]
    assert cli.main([*command, "--device", "cpu", "-b", "1", "-o", str(tmp_path / "command.png")]) == 0
    assert picture.path.read_bytes() == (tmp_path / "command.png").read_bytes()
    digits = file_hash(files_dir / name)
    assert picture.record["model_hash"] == digits
    assert f"Model hash: {digits[:10]}, Model: {Path(name).stem}, " in png.read_text(picture.path)["parameters"]


def test_files_of_one_kind_are_different_models_and_so_is_a_new_file_of_the_name(tmp_path, files_dir):
    shutil.copy(files_dir / SMALL, tmp_path / "a.safetensors")
    state = ldm.whole("sd1", ldm.save_pipeline("sd1", tmp_path / "saved").pipe)
    other = {key: tensor * (1.5 if "conv_out" in key or ".out." in key else 1) for key, tensor in state.items()}
    ldm.save(other, tmp_path / "b.safetensors")
    shutil.rmtree(tmp_path / "saved")
    shared = Shared(Models(tmp_path, device="cpu"))
    first, second = (drawn_by(shared, tmp_path / name, model=f"./{name}.safetensors") for name in "ab")
    assert not np.array_equal(pixels(first), pixels(second))
    os.replace(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    third = drawn_by(shared, tmp_path / "c", model="./a.safetensors")
    assert np.array_equal(pixels(third), pixels(second)) and third.record["model_hash"] == second.record["model_hash"]


def pixels(picture) -> np.ndarray:
    return pixels_of(picture.path)


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.parametrize(
    ("model", "like", "found", "notice"),
    [
        (SMALL, SMALL, SMALL, False),
        (SMALL, XL, SMALL, True),
        ("/elsewhere/small.safetensors", None, SMALL, False),
        ("C:\\models\\small.safetensors", XL, XL, False),
        ("other name.safetensors", SMALL, SMALL, False),
        ("emoji64", None, "emoji64", False),
    ],
)
def test_the_file_of_a_png_is_found(shared, files_dir, model, like, found, notice):
    record = {"model": model, "model_hash": like and file_hash(files_dir / like)}
    located, line = with_model_here(record, "p.png", shared.catalogue)
    assert located == record | {"model": found}
    own, theirs = (file_hash(files_dir / name)[:10] for name in (SMALL, XL))
    said = f"{SMALL} has the model hash {own}, and p.png was drawn with {theirs}; the picture will differ"
    assert line == (said if notice else None)


def test_a_file_that_is_nowhere_is_named(shared):
    with pytest.raises(
        InputError, match=r"^p\.png was drawn with fox\.sft, model hash unknown: no model here has this"
    ):
        with_model_here({"model": "a/fox.sft"}, "p.png", shared.catalogue)


def test_hashes_of_large_files_are_not_waited_for(shared, files_dir, monkeypatch, tmp_path):
    digits = file_hash(files_dir / SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_hash, "_LARGE", 1)
    monkeypatch.setattr(model_hash, "_begun", {})
    record = {"model": "renamed.safetensors", "model_hash": digits}
    with pytest.raises(InputError, match=r"no model here has this name or this hash; fastdiff now computes 2 hashes"):
        with_model_here(record, "p.png", shared.catalogue)
    deadline, found = time.monotonic() + 60, None
    while found is None:
        assert time.monotonic() < deadline
        with_hash = model_hash.known_hash(files_dir / SMALL), model_hash.known_hash(files_dir / XL)
        found = with_model_here(record, "p.png", shared.catalogue) if all(with_hash) else None
        time.sleep(0.01)
    assert found == (record | {"model": SMALL}, None)
    monkeypatch.setattr(model_hash, "_begun", {})  # as in a new process
    assert model_hash.known_hash(files_dir / SMALL) == digits


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Model hash: 0123456789, Model: small", SMALL),
        ("Model: sub/small.safetensors", SMALL),
        ("Model hash: {xl}, Model: small", XL),
        ("Model hash: {xl}, Model: renamed", XL),
        ("Model hash: 0123456789, Model: other", None),
    ],
)
def test_a_picture_of_another_tool_chooses_the_file_that_drew_it(shared, files_dir, unserved_page, model, found):
    digits = file_hash(files_dir / XL)[:10]
    text = f"the cat\nSteps: 7, Sampler: Euler a, CFG scale: 2.5, Seed: 9, Size: 16x16, {model.format(xl=digits)}"
    page = unserved_page(files_dir)
    data = png_picture({"parameters": text})
    said = page.press("DrawTab.restore", {UPLOAD: upload(data, "a.png"), "Model": XL if found is None else "emoji64"})
    loaded = "Loaded from a.png (made by AUTOMATIC1111): "
    if found is None:
        assert f"{loaded}Prompt, Steps, Guidance, Seed, Width, Height, Scheduler; not supported by {XL}: Model<" in said
    else:
        assert f"{loaded}Model, Prompt, Steps, Guidance, Seed, Width, Height, Scheduler<" in said
        assert f'"{found}"' in said and '"the cat"' in said


def test_a_dropped_png_of_the_command_chooses_the_file_and_its_settings(shared, files_dir, tmp_path, upload_folder):
    picture = drawn_by(shared, tmp_path, model=XL)
    assert picture.record["model"] == XL
    moved = Path(shutil.copy(files_dir / XL, tmp_path / "renamed.safetensors")).parent
    page = UnservedPage(tmp_path / "outputs", moved)
    said = page.press("DrawTab.restore", {UPLOAD: upload(picture.path.read_bytes(), "p.png")})
    assert "Loaded the settings of p.png<" in said and '"./renamed.safetensors"' in said and '"the cat"' in said
