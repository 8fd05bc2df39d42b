"""`fastdiff sample` with trajectory models: a .npy and a plot per trajectory, and refused flags."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from fastdiff import Pipeline
from fastdiff.requests import png


@pytest.fixture
def planner(save_planner):
    _, folder = save_planner("DDPM")
    return folder


def test_sample_writes_arrays_and_plots(here, planner, tmp_path, files):
    args = ["sample", "-m", "planner", "--horizon", 16, "--steps", 3, "-s", 4, "--num-images", 3, "-b", 2]
    done = here(*args, "--json")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "outputs") == [f"{seed}.{kind}" for seed in (4, 5, 6) for kind in ("npy", "png")]
    assert "fastdiff: drawing 3 trajectories with planner" in done.stderr
    assert re.fullmatch(r"fastdiff: wrote 3 trajectories to outputs in .* s", done.stderr.splitlines()[-1])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["trajectory"] for line in lines] == [f"outputs/{seed}.npy" for seed in (4, 5, 6)]
    expected = Pipeline.from_pretrained(planner, device="cpu")(
        horizon=16, num_inference_steps=3, seed=4, num_images=3
    ).trajectories
    for line, trajectory in zip(lines, expected, strict=True):
        array = np.load(tmp_path / line["trajectory"])
        assert (array.dtype, array.shape) == (np.float32, (14, 16))
        np.testing.assert_array_equal(array, trajectory)
        settings = png.read_settings(tmp_path / line["path"])
        assert settings == line["settings"] | {"schema": 1, "numerics": png.NUMERICS}
        assert (settings["horizon"], settings["seed"], settings["scheduler"]) == (16, line["seed"], "ddpm")
        with Image.open(tmp_path / line["path"]) as image:
            assert image.size == (settings["width"], settings["height"])


def test_from_plans_one_again_and_flags_win(here, planner, tmp_path):
    assert here("sample", "-m", planner, "--horizon", 16, "--steps", 2, "-s", 7, "--num-images", 1).returncode == 0
    first = tmp_path / "outputs"
    done = here("sample", "--from", first / "7.png", "-o", "again.png")
    assert done.returncode == 0, done.stderr
    for kind in ("png", "npy"):
        assert (tmp_path / f"again.{kind}").read_bytes() == (first / f"7.{kind}").read_bytes()
    assert done.stderr.splitlines()[-1].startswith("fastdiff: wrote 1 trajectory to again.png in ")
    done = here("sample", "--from", first / "7.png", "--horizon", 32, "-o", "long.png")
    assert done.returncode == 0 and np.load(tmp_path / "long.npy").shape == (14, 32), done.stderr
    done = here("sample", "--from", first / "7.png", "-m", "emoji64", "--label", 0, "-o", "emoji.png")
    assert done.returncode == 0 and "horizon" not in png.read_settings(tmp_path / "emoji.png"), done.stderr


def test_files_that_exist_are_kept_without_overwrite(here, planner, tmp_path, files):
    args = ["sample", "-m", planner, "--horizon", 16, "--steps", 1, "--num-images", 1]
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "0.npy").write_text("mine")
    done = here(*args)
    assert done.returncode == 0 and "wrote 1 trajectory to outputs/0-2.png" in done.stderr
    assert files(tmp_path / "outputs") == ["0-2.npy", "0-2.png", "0.npy"]
    done = here(*args)
    assert (
        done.stderr == "fastdiff: outputs/0-2.png exists with these settings and was kept; --overwrite draws it again\n"
    )
    (tmp_path / "outputs" / "0-2.npy").unlink()
    assert "wrote 1 trajectory to outputs/0-3.png" in here(*args).stderr, "a plot alone is not the trajectory"
    assert (tmp_path / "outputs" / "0.npy").read_text() == "mine"
    assert here(*args, "--overwrite").returncode == 0
    assert np.load(tmp_path / "outputs" / "0.npy").shape == (14, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "horizon: planner has no default; give --horizon"),
        (["--horizon", 10], r"horizon 10: .*multiples of 4"),
        (["--horizon", 0], "horizon: 0 is not a whole number from 1 to 65536"),
        (["--horizon", 16, "--grid"], "--grid: planner draws trajectories; leave it out"),
        (["--horizon", 16, "--resume"], "--resume: planner draws trajectories; leave it out"),
        (["--horizon", 16, "--label", 3], "label '3': planner has no labels"),
        (["--horizon", 16, "--cfg-scale", 2], r"cfg-scale 2\.0: planner has no null label"),
        (["--horizon", 16, "-o", "plan.npy"], r"-o plan\.npy is not the name of a PNG"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_by_name(flags, message, here, planner, tmp_path, refused, files):
    before = files(tmp_path)
    refused(here("sample", "-m", "planner", *flags), message)
    assert files(tmp_path) == before


def test_pictures_have_no_horizon(here, refused):
    refused(here("sample", "--horizon", 16), "horizon 16: emoji-sd draws pictures, which have none; leave it out")


@pytest.mark.slow
def test_the_other_commands_know_such_folders(here, save_value_guided, tmp_path):
    save_value_guided()
    done = here("models", "./value-guided")
    assert done.stdout == "./value-guided: trajectories of 14 channels, horizon any, ddpm, no labels\n", done.stderr
    done = here("sample", "-m", "value-guided", "--horizon", 16, "--explain", "--device", "cpu")
    assert done.stdout.startswith("TrajectoryPipeline, 1x1x16x14, float32, cpu\n"), done.stderr
    assert here("sample", "-m", "value-guided", "--horizon", 16, "--steps", 1).returncode == 0
    assert "horizon: 16\n" in here("info", "outputs/3.png").stdout
