"""LabelPipeline when a run fails: memory runs out, or the output is not finite."""

from itertools import islice

import numpy as np
import pytest
import torch

from fastdiff import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DiTTransformer2DModel,
    InputError,
    LabelPipeline,
    NonFiniteError,
    Pipeline,
    UNet2DModel,
)
from fastdiff.diffusion import decoding, loop
from tests.support.pairwise import product

TINY = {
    "sample_size": 8,
    "block_out_channels": (16,),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
}
TINY_DIT = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 20,
}
TINY_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


@pytest.fixture
def unet(randomise):
    return randomise(UNet2DModel.from_config(TINY))


@pytest.fixture
def latent(randomise):
    """A transformer that works on latents, with a VAE."""
    denoiser = randomise(DiTTransformer2DModel.from_config(TINY_DIT))
    return LabelPipeline(denoiser, DDIMScheduler(), vae=randomise(AutoencoderKL.from_config(TINY_VAE)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("scheduler", [DDIMScheduler, DDPMScheduler])
def test_the_step_that_went_wrong_is_named(unet, monkeypatch, scheduler, value):
    pipe, predict, calls = LabelPipeline(unet, scheduler(clip_sample=False)), UNet2DModel.predict, []
    unet.use_graphs = False  # a program would replay the first calls

    def predict_badly(self, x, conditioning):
        calls.append(0)
        output = predict(self, x, conditioning)
        output[0, 0, 0, 0] = value if len(calls) == 3 else 0
        return output

    monkeypatch.setattr(UNet2DModel, "predict", predict_badly)
    steps = pipe.stream(num_inference_steps=5)
    previews = list(islice(steps, 4))
    timestep = previews[2].timestep
    line = rf"NaN or infinite at step 3 of 5 \(timestep {timestep}\); try --dtype float32"
    for use in (lambda: list(steps), previews[2].preview):
        with pytest.raises(NonFiniteError, match=line):
            use()
    assert len(previews[1].preview()) == 1


@pytest.fixture
def fits(monkeypatch):
    """Make a function, such as `step_by_picture` of the loop, run out of memory for more than `most` pictures."""

    def fits(most, where, what):
        function = getattr(where, what)

        def run_if_it_fits(given, x, *others):
            together = x[others[-1]] if others else x  # the last argument of `step_by_picture` is a slice
            if len(together) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return function(given, x, *others)

        monkeypatch.setattr(where, what, run_if_it_fits)

    return fits


PLACES = {"step": (loop.Loop, "step_by_picture"), "decoder": (decoding, "decode_latents")}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "output_type"), product(list(PLACES), ["pil", "np", "pt"], together=1))
def test_out_of_memory_draws_the_same_pictures_fewer_at_a_time(latent, fits, caplog, place, output_type):
    options = {"seed": range(5), "class_labels": 1, "num_inference_steps": 3, "eta": 0.5, "output_type": output_type}
    expected = latent(**options).images
    assert not caplog.messages
    fits(2, *PLACES[place])
    for found, same in zip(latent(**options).images, expected, strict=True):
        assert np.array_equal(np.asarray(found), np.asarray(same))
    assert caplog.messages == [
        "out of memory for 5 pictures at a time; continuing with at most 2; the pictures are the same"
    ]
    steps = list(latent.stream(**options))
    assert [(step.index, len(step.x_t)) for step in steps] == [(0, 5), (1, 5), (2, 5)]
    assert {step.at_once for step in steps} == ({2} if place == "step" else {5, 2})
    assert len(steps[0].preview()) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "seeded"), product(list(PLACES), {"one picture": True, "generator": False}, together=1)
)
def test_out_of_memory_that_nothing_helps_is_one_line(latent, fits, place, seeded):
    options = {"class_labels": 1, "num_inference_steps": 2, "batch_size": 4}
    fits(0 if seeded else 2, *PLACES[place])
    line = "1 picture at a time; lower height" if seeded else "4 pictures at a time; lower batch size, height"
    with pytest.raises(MemoryError, match=f"^cpu: out of memory for {line} or width, use dtype bfloat16") as error:
        latent(generator=None if seeded else torch.Generator(), **options)
    assert isinstance(error.value, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["GPU", "host"])
def test_out_of_memory_for_the_weights_is_one_line(monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(UNet2DModel, "from_folder", fail)
    with pytest.raises(MemoryError, match=r"^cpu: out of memory for the weights of emoji64 in float32; .* bfloat16"):
        Pipeline.from_pretrained("emoji64", device="cpu")


def test_out_of_memory_for_the_noise_is_one_line(unet, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "randn", fail)
    with pytest.raises(MemoryError, match="for 3 pictures at a time; lower batch size"):
        LabelPipeline(unet, DDIMScheduler()).stream(num_images=3, num_inference_steps=2)


def test_pictures_of_more_channels_than_a_png_has_are_refused_at_once():
    pipe = LabelPipeline(UNet2DModel.from_config(TINY | {"in_channels": 5, "out_channels": 5}), DDIMScheduler())
    with pytest.raises(InputError, match=r"pictures have 5 channels, .*; use output_type np or pt"):
        pipe.stream(num_inference_steps=1)
    assert pipe(num_inference_steps=1, num_images=1, output_type="np").images.shape == (1, 8, 8, 5)


@pytest.mark.parametrize(
    ("x", "named"),
    [
        pytest.param(None, "x: None is not a tensor", id="none"),
        pytest.param(np.zeros((1, 8, 8, 3)), "x: .* is not a tensor", id="array"),
        pytest.param(torch.zeros(1, 8, 8, 3, device="meta"), "x: it is a .* on meta", id="meta"),
        pytest.param(torch.zeros(1, 8, 8, 3).to_sparse(), "x: it is a torch.sparse_coo", id="sparse"),
        pytest.param(torch.zeros(1, 8, 8, 3, dtype=torch.int32), "x: it is torch.int32", id="whole-numbers"),
        pytest.param(torch.zeros(1, 3, 8, 8), r"x: expected \(N, H, W, 3\)", id="channels-first"),
        pytest.param(torch.zeros(8, 8, 3), r"x: expected \(N, H, W, 3\)", id="one-picture"),
    ],
)
def test_what_is_no_state_is_not_decoded(unet, x, named):
    with pytest.raises(InputError, match=named):
        LabelPipeline(unet, DDIMScheduler()).decode(x, "np")


def test_a_state_that_requires_grad_is_decoded(unet):
    x = torch.zeros(1, 8, 8, 3, requires_grad=True)
    assert (LabelPipeline(unet, DDIMScheduler()).decode(x, "np") == 0.5).all()
