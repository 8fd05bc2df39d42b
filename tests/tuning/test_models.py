"""The workloads: real models, and the inputs of their forwards."""

import subprocess
import sys

import pytest
import torch

import fastdiff
from fastdiff.kernels.conv2d import Shortcut
from fastdiff.tuning import forwards, models


def test_the_tuned_text_model_is_the_bundled_one():
    assert {"emoji-sd_b1", "emoji-sd_b64"} <= models.WORKLOADS.keys()
    assert models.EMOJI_SD["cross_attention_dim"] and not any(name.startswith("_") for name in models.EMOJI_SD)


def test_the_names_say_model_batch_and_dtype():
    assert models.WORKLOADS["hopper32_b64_fp32"] == models.WORKLOADS["hopper32_b64"] == (models.HOPPER32, 64)
    assert models.WORKLOADS["sdxl_b2"] == (models.SDXL, 2)
    assert len(models.WORKLOADS) == 28


def test_the_list_of_workloads_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import fastdiff.tuning.models"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["emoji64_b1", "emoji-sd_b1", "emoji64-dit_b1", "hopper128_b1"])
def test_a_forward_runs(name):
    config, _ = models.WORKLOADS[name]
    with torch.inference_mode():
        sample = forwards.forward(config | {"sample_size": 16}, 2, torch.float32)().sample
    assert sample.shape[0] == 2 and torch.isfinite(sample).all()


def test_the_inputs_of_sdxl_fit_its_model():
    """On the meta device, because the model has billions of parameters."""
    sample, timesteps, text, *nothing, added = forwards.inputs(models.SDXL | {"sample_size": 8}, 2)
    with torch.device("meta"):
        shapes = fastdiff.UNet2DConditionModel.from_config(models.SDXL).config.prompt_shapes
    assert (sample.shape, timesteps.shape, nothing) == ((2, 4, 8, 8), (2,), [None] * 4)
    assert {"encoder_hidden_states": text.shape[1:], **{name: each.shape[1:] for name, each in added.items()}} == shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_of_z_image_is_made_in_its_dtype(dtype, monkeypatch):
    """At its true size, the caption and the picture of a step have 4160 tokens."""
    small = {"dim": 128, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 1, "cap_feat_dim": 64}
    made, kind = [], fastdiff.ZImageTransformer2DModel
    build = kind.from_config
    monkeypatch.setattr(kind, "from_config", lambda config: made.append(build(small | {"in_channels": 16})) or made[0])
    monkeypatch.setattr(kind, "to", lambda model, dtype: model)
    config, batch = models.WORKLOADS["z-image_b2"]
    call = forwards.forward(config | small, batch, dtype)
    assert made[0].dtype == dtype and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(forwards, "LATENT_SIDE", 8)
    with torch.inference_mode():
        small_ones = forwards.inputs(config | small, batch)
        assert len(made[0](*forwards.in_dtype(small_ones, dtype)).sample) == 2
    monkeypatch.undo()
    latents, _, captions = forwards.inputs(config, 1)
    assert (latents[0].shape, captions[0].shape) == ((16, 1, 128, 128), (60, 2560)) and callable(call)


def test_floats_alone_change_their_dtype():
    given = (torch.ones(2), {"shortcut": Shortcut(torch.ones(1), torch.ones(1))}, torch.tensor(3), None)
    x, options, labels, nothing = forwards.in_dtype(given, torch.float64)
    assert x.dtype == torch.float64 and labels.dtype == torch.int64 and nothing is None
    assert isinstance(options["shortcut"], Shortcut) and options["shortcut"].weight.dtype == torch.float64


@pytest.mark.parametrize(("device", "expected"), [("cpu", "float32 float32"), ("cuda", "bfloat16 float32")])
def test_the_dtype_of_a_workload(monkeypatch, device, expected):
    monkeypatch.setattr(forwards.timing, "DEVICE", torch.device(device))
    names = ("hopper32_b1", "hopper32_b1_fp32")
    assert [forwards.dtype_of(name) for name in names] == [getattr(torch, each) for each in expected.split()]
