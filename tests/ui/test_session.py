"""A session: its own pictures, the folder of API pictures, and the page's description of a picture."""

import copy
import errno
import os
import time
from pathlib import Path

import pytest

from fastdiff.errors import DeviceLostError, InputError
from fastdiff.runs import files
from fastdiff.ui.drawing import Drawn, Session
from fastdiff.ui.gallery import captioned, settings_table
from fastdiff.ui.queueing.messages import explain, note, problem
from fastdiff.ui.serving.store import MAX_AGE, Store, new_folder


def drawn(seed: int, **record) -> Drawn:
    return Drawn(Path(f"{seed}.png"), {"seed": seed, **record})


def test_a_copy_is_a_new_session_with_the_same_store(tmp_path):
    session = Session(Store(tmp_path))
    session.drawn = session.listed = [drawn(1)]
    other = copy.deepcopy(session)
    assert other.drawn == [] and other.listed == [] and other.store is session.store


def test_old_folders_are_deleted(upload_folder):
    old, fresh = new_folder(100), new_folder(100)
    os.utime(old, (0, time.time() - MAX_AGE - 60))
    new_folder(100)
    assert not old.exists() and fresh.exists()


def test_the_oldest_folders_make_room(upload_folder):
    folders = [new_folder(100) for _ in range(3)]
    for age, folder in enumerate(folders):
        (folder / "a.png").write_bytes(bytes(40))
        os.utime(folder, (0, time.time() - 60 * age))
    new_folder(100)
    assert [folder.exists() for folder in folders] == [True, True, False]


def test_captions_are_seeds():
    assert captioned([drawn(7)]) == [("7.png", "seed 7")]


def test_settings_are_escaped_and_complete():
    record = dict.fromkeys(("num_inference_steps", "guidance_scale", "width", "height"), 8)
    record |= {"versions": {"fastdiff": "1"}, "label": "<script>", "eta": 0.0, "clip_skip": None}
    table = settings_table(drawn(7, **record, scheduler="ddim", model="a & b"))
    assert "<dt>Seed</dt><dd>7</dd>" in table
    assert "<dd>&lt;script&gt;</dd>" in table and "<dd>a &amp; b</dd>" in table
    assert "<dt>Eta</dt><dd>0.0</dd>" in table
    assert "Clip skip" not in table
    assert "&lt;script&gt;&#10;Steps: 8, Sampler: DDIM" in table


@pytest.mark.parametrize(
    ("error", "line"),
    [
        pytest.param(InputError("seed -1: give more"), "seed -1: give more", id="input"),
        pytest.param(MemoryError("cuda"), "out of memory; reduce Width and Height", id="memory"),
        pytest.param(DeviceLostError("the GPU failed"), "the GPU failed", id="lost device"),
        pytest.param(OSError(28, "No space left on device"), "No space left on device", id="disk"),
    ],
)
def test_problems_are_lines_for_people(error, line):
    assert line in explain(error)
    assert problem(error).startswith('<div role="alert"')


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("num-images: 33 is not a whole number", "Pictures: 33 is not a whole number"),
        ("seed: None is not a whole number", "Seed is empty; give a whole number"),
        ("cfg-scale: -1 is not a number", "Guidance: -1 is not a number"),
        ("infinite at step 3; try --dtype float32, or check the weights", "infinite at step 3; check the weights"),
        ("eta 1 is an option of ddim and tcd; leave it out, or give --scheduler ddim", "or give scheduler ddim"),
    ],
)
def test_the_page_has_words_of_its_own(text, line):
    assert line in problem(InputError(text)) and "--" not in problem(InputError(text))


def test_dashes_in_the_name_of_a_model_stay():
    text = "./a--b.safetensors holds no VAE; give a file that does with --vae"
    assert explain(InputError(text)) == "./a--b.safetensors holds no VAE; give a file that does with vae"


def test_a_full_disk_is_told_without_the_servers_paths(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as error:
        files.write(tmp_path / "a.png", b"x", overwrite=False)
    line = "the server cannot save the picture (No space left on device); free space on its disk"
    assert explain(error.value) == line


def test_messages_are_escaped():
    assert "<img" not in problem(InputError("<img onerror=alert(1)>"))
    assert "<img" not in note("<img>")
