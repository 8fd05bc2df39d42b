"""`fastdiff sample`: its files, its output and its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fastdiff import cli
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.diffusion import loop
from fastdiff.requests import png
from fastdiff.runs import drawing
from tests.support.waiting import TIMEOUT

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


def test_sample_draws_four_prompts_of_the_bundled_model(fastdiff, tmp_path, files):
    done = fastdiff("sample", "--steps", 2, "--grid", "--json")
    assert done.returncode == 0, done.stderr
    card = ModelCard.read("emoji-sd", hub.bundled_models()["emoji-sd"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["prompt"], line["seed"]) for line in lines] == [(prompt, 0) for prompt in card.info.prompts[:4]]
    assert files(tmp_path) == sorted([*(line["path"] for line in lines), "outputs/grid.png"])
    for line in lines:
        settings = line["settings"]
        assert (settings["model"], settings["guidance_scale"]) == ("emoji-sd", card.info.guidance_scale)
        with Image.open(tmp_path / line["path"]) as image:
            assert image.size == (128, 128) and len(image.getcolors(maxcolors=128 * 128)) > 100, "not a picture"


def test_a_label_without_a_model_is_of_the_class_model(here, tmp_path):
    done = here("sample", "--label", "noto birds", "--num-images", 1, "--steps", 1, "-o", "bird.png")
    assert done.returncode == 0 and png.read_settings(tmp_path / "bird.png")["model"] == "emoji64", done.stderr


@pytest.mark.slow
def test_sample_draws_the_default_labels_and_a_grid(here, tmp_path, files):
    done = here("sample", "-m", "emoji64", "--steps", 2, "--grid", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    labels = ["fluent-3d hearts", "fluent-flat fruit", "noto clothes", "twemoji flags"]
    assert [(line["label"], line["seed"]) for line in lines] == [(label, 0) for label in labels]
    assert files(tmp_path) == sorted([*(line["path"] for line in lines), "outputs/grid.png"])
    for line in lines:
        settings = png.read_settings(tmp_path / line["path"])
        assert settings == line["settings"] | {"schema": 1, "numerics": png.NUMERICS}
        assert (settings["num_inference_steps"], settings["guidance_scale"], settings["dtype"]) == (2, 4.0, "float32")
        assert settings["use_clipped_model_output"] is True and settings["versions"]["torch"] == torch.__version__
        with Image.open(tmp_path / line["path"]) as image:
            assert image.size == (64, 64) and len(image.getcolors(maxcolors=64 * 64)) > 100, "not a picture"
    assert done.stderr.startswith("fastdiff: drawing 4 pictures with emoji64\n")
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"fastdiff: wrote 4 pictures to outputs and a grid to outputs/grid\.png in \d+\.\d s", last)


def test_pictures_are_labels_by_seeds_and_from_draws_one_again(here, tmp_path, files):
    done = here(
        "sample", "--label", "noto food", "--label", "1", "--num-images", 2, "-s", 7, "--num-inference-steps", 2,
        "--guidance-scale", 3, "--eta", 0.5, "-b", 3, "-o", "{label}/{seed:03d}.png", "--grid", "sheet.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pictures = [f"fluent-3d-creatures/{seed}.png" for seed in ("007", "008")]
    pictures += ["noto-drinks/007.png", "noto-sweets/008.png"]  # the labels of a group alternate
    assert files(tmp_path) == [*pictures, "sheet.png"]
    sheet = png.read_settings(tmp_path / "sheet.png")
    assert (sheet["label"], sheet["seed"], sheet["width"]) == (["noto food", "fluent-3d creatures"], [7, 8], 2 * 64 + 6)
    again = here("sample", "--from", "noto-sweets/008.png", "-o", "again.png")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "noto-sweets/008.png").read_bytes()
    assert again.stderr.splitlines()[-1].startswith("fastdiff: wrote 1 picture to again.png in ")

    with Image.open(tmp_path / "sheet.png") as image, Image.open(tmp_path / "noto-sweets/008.png") as picture:
        assert image.crop((68, 2, 132, 66)).tobytes() == picture.tobytes()


def test_flags_win_over_from_and_files_are_kept_without_overwrite(here, tmp_path, files):
    assert here("sample", "--label", 0, "-s", "3,5", "--steps", 1, "-o", "a").returncode == 0
    source, old = tmp_path / "a/fluent-3d-hearts-5.png", (tmp_path / "a/fluent-3d-hearts-5.png").read_bytes()
    assert here("sample", "--from", source, "-o", "a").returncode == 0
    assert source.read_bytes() == old and len(files(tmp_path / "a")) == 2
    done = here("sample", "--from", source, "-o", "a", "--overwrite", "--scheduler", "ddpm", "--steps", 2)
    assert done.returncode == 0, done.stderr
    settings = png.read_settings(source)
    assert (settings["seed"], settings["scheduler"], settings["num_inference_steps"]) == (5, "ddpm", 2)
    assert settings["eta"] is None and files(tmp_path / "a") == [f"fluent-3d-hearts-{seed}.png" for seed in (3, 5)]


@pytest.mark.parametrize(("flags", "sizes"), [([], [1, 1, 1]), (["-b", 2], [2, 1])], ids=str)
def test_a_cpu_draws_picture_by_picture_unless_told_otherwise(here, tiny, tmp_path, monkeypatch, files, flags, sizes):
    drawn, draw = [], drawing.draw

    def recorded(run, pipe):
        for progress in draw(run, pipe):
            drawn.extend([len(progress.finished)] if progress.ended else [])
            yield progress

    monkeypatch.setattr(drawing, "draw", recorded)
    args = ["sample", "-m", tiny, "--device", "cpu", "--label", 0, "--num-images", 3, "--steps", 2]
    assert here(*args, "-o", "a", *flags).returncode == 0
    assert drawn == sizes and len(files(tmp_path / "a")) == 3


@pytest.mark.parametrize(
    ("device", "flags", "size"),
    [("cpu", [], 1), ("cpu", ["-b", 9], 9), ("cuda", [], 8), ("cuda", ["-b", 9], 9)],
    ids=str,
)
def test_the_default_batch_size_is_the_devices(here, tiny, monkeypatch, device, flags, size):
    pipe = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr("fastdiff.pipelines.load_pipeline", lambda *args, **options: pipe)
    monkeypatch.setattr("fastdiff.pipelines.reporting.report", lambda pipe, **options: options["batch_size"])
    done = here("sample", "-m", tiny, "--label", 0, "--num-images", 20, "--explain", *flags)
    assert done.stdout == f"{size}\n", done.stderr


@pytest.mark.slow
def test_explain_says_what_a_step_runs_on_and_draws_nothing(here, tiny, tmp_path, refused, files):
    args = ["sample", "-m", tiny, "--explain", "--device", "cpu", "--label", 0, "--num-images", 3, "-b", 2]
    done = here(*args)
    assert (done.returncode, files(tmp_path)) == (0, []), done.stderr
    head, *rows, share = done.stdout.splitlines()
    assert head == "LabelPipeline, 2x8x8x3, float32, cpu", "the first batch"
    assert any(re.fullmatch(r"conv2d +1x8x8x3, .* no CUDA device", row) for row in rows)
    assert any(re.fullmatch(r"denoise_step +.*, unguided, .* 2 +\d+ torch +no CUDA device", row) for row in rows)
    assert re.fullmatch(r"0\.0% of [\d.]+ GFLOP of convolutions and linear layers on our kernels", share)
    found = json.loads(here(*args, "--json").stdout)
    assert (found["what"], found["share"], found["kernel_launches"]) == (head, 0, 0)
    refused(here("sample", "--explain", "--label", "noto fod"), "label 'noto fod' .* did you mean noto food")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "emoji65"], "no model 'emoji65'; did you mean emoji64?"),
        (["-m", "org/name"], "hub model org/name: .* not in the local cache"),
        (["-m", "empty"], r"empty holds neither model_index\.json"),
        (["--label", "noto fod"], "label 'noto fod' .* did you mean noto food"),
        (["--label", "999"], "label 999 is out of range; this model has labels 0 to 216"),
        (["--scheduler", "eular"], r"argument --scheduler: invalid choice: 'eular'; did you mean euler\? see"),
        (
            ["--scheduler", "none"],
            "argument --scheduler: invalid choice: 'none'; choose from ddim, ddpm, .*, flow-euler;",
        ),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'; choose from auto, .*bfloat16"),
        (["--steps", "0"], "steps: 0 is not a whole number of at least 1"),
        (["--steps", "1001"], "steps 1001: emoji-sd was trained with 1000 steps; use 1 to 1000"),
        (["--steps", "2.5"], "argument --steps: invalid int value: '2.5'"),
        (["--num-images", "0"], "num-images: 0 is not a whole number from 1"),
        (["--batch-size", "0"], "argument -b/--batch-size: 0 is not a whole number of at least 1"),
        (["--seed", "4294967296"], "seed: 4294967296 is not a seed from 0 to 4294967295"),
        (["--seed", "-2"], "seed: '-2' is not a seed from 0"),
        (["--seed", "1,2", "--num-images", "3"], "num-images 3: the list has 2 seeds; leave one of the two out"),
        (["--eta", "2"], "eta: 2.0 is not a number from 0 to 1"),
        (["--cfg-scale", "nan"], "cfg-scale: nan is not a number of at least 0"),
        (["--device", "tpu"], "argument --device: tpu is not auto, cpu, cuda or cuda:1"),
        (["-o", "file/pictures"], "cannot write to file .it is not a folder.; choose another place with -o"),
        (["-m", "emoji64", "-o", "one.png"], r"two pictures have the name one\.png; put {seed} and {label} in -o"),
        (["-o", "{name}.png"], "-o {name}.png has an unknown field; use only {seed}"),
        (["-m", "emoji64", "-o", "{prompt}.png"], "-o {prompt}.png has {prompt}, but these pictures have no prompt"),
        (["-o", "x\ny.jpg"], r"-o x\\ny\.jpg is not the name of a PNG"),
        (["--grid", "file/grid.png"], "cannot write to file .*; choose another place with --grid"),
        (["--label", "0", "-s", "1,2", "-o", "{seed}.png", "--grid", "./2.PNG"], "the grid and a picture would both"),
        (["--from", "none.png"], r"none\.png does not exist; give a PNG"),
        (["--from", "file"], "file cannot be read as a PNG .it has no PNG signature."),
        (["--stepz", "3"], r"unrecognized arguments: --stepz 3; did you mean --steps\? see fastdiff sample --help"),
        (["--zzz", "3"], "unrecognized arguments: --zzz 3; see fastdiff sample --help"),
        (["cat"], "unrecognized arguments: cat; see fastdiff sample --help"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(here, tmp_path, args, message, refused, files):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    refused(here("sample", *args), message)
    assert files(tmp_path) == ["file"], "no partial files"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(here, tmp_path, refused, files):
    refused(here("sample", "--device", "cuda"), "device: cuda does not exist .* use cpu or auto")
    assert files(tmp_path) == []


def truncate(path: Path) -> None:
    os.truncate(path, 100_000)


def drop_a_key(path: Path) -> None:
    state = load_file(path)
    del state["conv_in.bias"]
    save_file(state, path)


def remove(path: Path) -> None:
    path.unlink()


def put_nan(path: Path) -> None:
    state = load_file(path)
    state["conv_out.bias"][1] = float("nan")
    save_file(state, path)


def overflow(path: Path) -> None:
    """Make weights finite but their products infinite."""
    state = load_file(path)
    save_file(state | {"conv_in.weight": torch.full(state["conv_in.weight"].shape, 3e38)}, path)


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (truncate, 2, "safetensors is damaged or not a safetensors file"),
        (drop_a_key, 2, r"missing: conv_in\.bias"),
        (remove, 2, "has no diffusion_pytorch_model.safetensors"),
        (put_nan, 2, r"NaN or infinity in conv_out\.bias"),
        (overflow, 1, "NaN"),
    ],
    ids=["truncated", "wrong-keys", "no-weights", "nan-in-weights", "nan-in-output"],
)
def test_weights_that_cannot_draw(here, model, damage, code, message, refused):
    damage(model / WEIGHTS)
    refused(here("sample", "-m", model, "--steps", 1, "--label", 0, "--num-images", 1), message, code)
    assert not (model.parent / "outputs").exists(), "no black or partial picture"


def test_a_full_disk_is_exit_code_1_and_leaves_no_half_picture(here, tiny, tmp_path, refused, files):
    resource = pytest.importorskip("resource")  # Unix only; a limit on file sizes simulates a full disk
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        done = here("sample", "-m", tiny, "--steps", 1, "--label", 0, "--num-images", 1, "--height", 32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(done, r"cannot write outputs/class0-0\.png \(File too large\); free space", code=1)
    assert files(tmp_path) == []


@pytest.fixture
def failing(monkeypatch):
    """Make every step of more than `most` pictures fail."""

    def failing(most, error):
        step = loop.Loop.step_by_picture

        def step_if_it_fits(self, x_t, i, noise, part):
            if len(x_t[part]) > most:
                raise error
            return step(self, x_t, i, noise, part)

        monkeypatch.setattr(loop.Loop, "step_by_picture", step_if_it_fits)

    return failing


MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
LOST = torch.AcceleratorError("CUDA error: device-side assert triggered\nFor debugging consider CUDA_LAUNCH_BLOCKING=1")


@pytest.mark.slow
def test_out_of_memory_is_said_once_and_the_pictures_are_the_same(tiny, tmp_path, failing, capsys, files):
    args = ["sample", "-m", str(tiny), "--steps", "2", "--device", "cpu", "--label", "0", "--num-images", "6"]
    args += ["-b", "4", "--json", "-o"]
    assert cli.main([*args, str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    failing(1, MEMORY)
    assert cli.main([*args, str(tmp_path / "halved")]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 6
    said = "fastdiff: out of memory for 4 pictures at a time; continuing with at most 1; the pictures are the same\n"
    assert err.count(said) == err.count("out of memory") == 1
    assert len(files(tmp_path / "whole")) == 6
    for name in files(tmp_path / "whole"):
        assert (tmp_path / "halved" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MEMORY, "cpu: out of memory for 1 picture at a time; lower height or width"),
        (LOST, r"the GPU failed, .*\(CUDA error: device-side assert triggered\); restart fastdiff"),
    ],
    ids=["memory", "lost-device"],
)
def test_a_device_that_fails_is_one_line(tiny, tmp_path, failing, capsys, files, error, line):
    failing(0, error)
    assert cli.main(["sample", "-m", str(tiny), "--steps", "1", "--device", "cpu", "-o", str(tmp_path / "new")]) == 1
    err = capsys.readouterr().err
    assert re.match(f"fastdiff: error: {line}", err.splitlines()[-1]), err
    assert err.count("fastdiff: error:") == 1 and "Traceback" not in err
    assert files(tmp_path) == []


WRONG_INDEX = """
import os
import sys

import torch

from fastdiff.cli import main
from fastdiff.models.unet2d import UNet2DModel

predict, calls = UNet2DModel.predict, []


def predict_badly(self, x, conditioning):
    calls.append(0)
    if len(calls) == int(os.environ["BAD_CALL"]):
        torch.zeros(4, device=x.device)[torch.full((2,), 9, device=x.device)]
    return predict(self, x, conditioning)


UNet2DModel.predict = predict_badly
sys.exit(main())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("call", ["1", "2", "3"], ids=["compiling", "eager", "captured"])
def test_a_lost_gpu_is_one_line_and_no_hang(tmp_path, environment, files, call):
    args = ["sample", "--steps", "5", "--label", "0", "--num-images", "2", "--device", "cuda"]
    done = subprocess.run(
        [sys.executable, "-c", WRONG_INDEX, *args], cwd=tmp_path, env=environment | {"BAD_CALL": call},
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    line = r"fastdiff: error: the GPU failed, .*\(.*device-side assert triggered.*\); restart fastdiff"
    assert re.match(line, done.stderr.splitlines()[-1]), done.stderr
    assert done.stderr.count("fastdiff: error:") == 1 and "Traceback" not in done.stderr
    assert files(tmp_path) == []


def test_ctrl_c_keeps_what_is_finished(tiny, tmp_path, files, environment):
    args = ["sample", "-m", str(tiny), "--steps", "20", "--label", "0", "--num-images", "5000", "-b", "1", "--json"]
    command = [sys.executable, "-m", "fastdiff", *args]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        first = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT)
    written = [first["path"], *(json.loads(line)["path"] for line in out.splitlines())]
    assert process.returncode == 130 and "Traceback" not in err
    last = err.splitlines()[-1]
    assert re.fullmatch(rf"fastdiff: interrupted; wrote {len(written)} of 5000 pictures to outputs\S*", last), last
    assert files(tmp_path) == sorted(written), "all whole, and no temporary file"
    for path in written:
        with Image.open(tmp_path / path) as image:
            image.load()
