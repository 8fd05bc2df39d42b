"""`fastdiff verify`: it agrees with diffusers where fastdiff does, and says so where it does not."""

import json
import math
import os
import subprocess
import sys

import diffusers
import pytest
import torch

from fastdiff import cli, verify
from fastdiff.sample import load_pipeline


@pytest.fixture(scope="module")
def ddpm_folder(tmp_path_factory):
    """A small unconditional DDPM pipeline that diffusers saved, with weights at which no layer is idle."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    for parameter in unet.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("ddpm")
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=100)).save_pretrained(folder)
    return str(folder)


def test_the_bundled_model_agrees_with_diffusers():
    command = [sys.executable, "-m", "fastdiff", "verify", "emoji64", "--steps", "2", "--device", "cpu", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["passed"] and report["versions"]["diffusers"] == diffusers.__version__
    names = [row["what"] for row in report["comparisons"]]
    forwards = [f"forward t={t} label={label}" for t in (0, 249, 499, 749, 999) for label in (0, 216)]
    assert names == [*forwards, "2 steps of ddim, guidance 4"]
    for row in report["comparisons"]:
        assert 0 < row["error"] <= row["allowed"] == row["tolerance"] * max(1, row["largest"])


def test_ddpm_draws_its_step_noise_as_diffusers(ddpm_folder, capsys):
    assert cli.main(["verify", ddpm_folder, "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "4 steps of ddpm, guidance 1 " in table and table.endswith("\nwithin tolerance\n")
    assert table.count(" ok\n") == 6 and "FAILED" not in table


def test_a_wrong_weight_is_found(ddpm_folder, capsys, monkeypatch):
    def load_wrong(*args):
        pipe = load_pipeline(*args)
        pipe.denoiser.conv_out.bias.data += 2e-3
        return pipe

    monkeypatch.setattr(verify, "load_pipeline", load_wrong)
    assert cli.main(["verify", ddpm_folder, "--device", "cpu"]) == 1
    table = capsys.readouterr().out
    assert table.count(" FAILED\n") == 6 and table.endswith("\nNOT within tolerance\n")


@pytest.mark.parametrize(
    ("error", "largest", "passed"),
    [(1e-4, 0.5, True), (1.1e-4, 1.0, False), (4e-4, 5.0, True), (math.nan, math.nan, False), (math.inf, 1.0, False)],
    ids=["absolute", "over", "relative-to-large-outputs", "nan", "infinity"],
)
def test_tolerance(error, largest, passed):
    assert verify.Comparison("", error, largest, tolerance=1e-4).passed is passed


def test_without_diffusers_the_remedy_is_named(ddpm_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert cli.main(["verify", ddpm_folder]) == 2
    assert capsys.readouterr().err.endswith("which is not installed; pip install 'fastdiff[diffusers]'\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [(["emoji65"], "no model 'emoji65'"), (["emoji64", "--steps", "0"], "steps 0: give a whole number")],
    ids=["model", "steps"],
)
def test_bad_input(args, message, capsys):
    assert cli.main(["verify", *args]) == 2
    assert message in capsys.readouterr().err
