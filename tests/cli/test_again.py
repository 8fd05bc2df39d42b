"""`fastdiff sample` a second time: a file is kept if it has the same settings, and never replaced."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from fastdiff.requests import png
from tests.support.waiting import TIMEOUT

KEPT = "exists with these settings and was kept; --overwrite draws it again"

WRITTEN = {"schema": 1, "numerics": png.NUMERICS}  # what every record gets


@pytest.fixture
def draw(here, tiny):
    """Runs `fastdiff sample` with few steps of the tiny model."""
    return lambda *args: here("sample", "-m", tiny, "--label", 0, "--steps", 1, "--device", "cpu", *args)


def test_the_same_command_draws_nothing_the_second_time(draw, tmp_path, files):
    assert draw("--num-images", 1).returncode == 0
    before = (tmp_path / "outputs/class0-0.png").stat().st_mtime_ns
    done = draw("--num-images", 1, "--json")
    assert (done.returncode, done.stderr) == (0, f"fastdiff: outputs/class0-0.png {KEPT}\n")
    assert json.loads(done.stdout)["path"] == "outputs/class0-0.png"
    assert (tmp_path / "outputs/class0-0.png").stat().st_mtime_ns == before
    done = draw("--num-images", 3, "--grid")
    assert "fastdiff: kept 1, wrote 2 pictures to outputs and a grid to outputs/grid.png in " in done.stderr
    done = draw("--num-images", 3, "--grid")
    line = "3 pictures in outputs exist with these settings and were kept; --overwrite draws them again"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"fastdiff: {line}\n")
    assert files(tmp_path / "outputs") == ["class0-0.png", "class0-1.png", "class0-2.png", "grid.png"]


def test_other_settings_get_a_new_name_and_the_same_seed(draw, tmp_path, files):
    for steps in (1, 2, 3):
        assert draw("-s", 5, "--num-images", 1, "-o", "a.png", "--steps", steps).returncode == 0
    assert files(tmp_path) == ["a-2.png", "a-3.png", "a.png"]
    settings = [png.read_settings(tmp_path / name) for name in ("a.png", "a-2.png", "a-3.png")]
    assert [(each["seed"], each["num_inference_steps"]) for each in settings] == [(5, 1), (5, 2), (5, 3)]
    done = draw("-s", 5, "--num-images", 1, "-o", "a.png", "--steps", 2)
    assert done.stderr == f"fastdiff: a-2.png {KEPT}\n"
    done = draw("-s", 6, "--num-images", 1, "-o", "a.png")
    assert "fastdiff: a.png exists with other contents and stays; the new file is a-4.png\n" in done.stderr
    assert png.read_settings(tmp_path / "a-4.png")["seed"] == 6
    done = draw("-s", "5,7", "--grid", "a.png", "-o", "b")
    assert done.stderr.splitlines()[-1].startswith("fastdiff: wrote 2 pictures to b and a grid to a-5.png in ")
    assert draw("-s", "5,7", "--grid", "a.png", "-o", "b").stderr.startswith("fastdiff: 2 pictures in b exist ")


def make_text(path):
    path.write_text("not a picture")


def make_picture(path):
    Image.new("RGB", (8, 8)).save(path)


def make_link(path):
    path.symlink_to("nowhere.png")


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def age(path):
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("change", [make_text, make_picture, make_link, cut, age])
def test_what_is_no_whole_picture_of_the_model_as_it_is_stays(draw, tmp_path, files, change):
    path = tmp_path / "a.png"
    if change in (cut, age):
        assert draw("--num-images", 1, "-o", "a.png").returncode == 0
    change(path)
    before = path.read_bytes() if path.exists() else os.readlink(path)
    assert draw("--num-images", 1, "-o", "a.png").returncode == 0
    assert (path.read_bytes() if path.exists() else os.readlink(path)) == before
    assert png.read_settings(tmp_path / "a-2.png")["seed"] == 0
    assert draw("--num-images", 1, "-o", "a.png").stderr == f"fastdiff: a-2.png {KEPT}\n"


@pytest.mark.slow
def test_commands_at_once_never_write_one_file(tiny, tmp_path, environment, files):
    def draw(steps: int) -> subprocess.CompletedProcess:
        command = [
            sys.executable,
            "-m",
            "fastdiff",
            "sample",
            "-m",
            tiny,
            "--label",
            "0",
            "--num-images",
            "20",
            "-b",
            "1",
        ]
        return subprocess.run(
            [*map(str, command), "--steps", str(steps), "--grid", "--json"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(draw, (1, 2, 1, 2)))
    assert [done.returncode for done in every] == [0] * 4, [done.stderr for done in every]
    for done in every:
        for line in map(json.loads, done.stdout.splitlines()):
            assert png.read_settings(tmp_path / line["path"]) == line["settings"] | WRITTEN
    assert len(files(tmp_path / "outputs")) == 2 * 21, "two pictures of each seed, and two grids"
