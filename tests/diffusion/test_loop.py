"""The loop against its definition: predict, guide, step."""

import pytest
import torch

from fastdiff import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    UNet2DModel,
    UniPCMultistepScheduler,
)
from fastdiff.diffusion.conditions import Conditions, Guidance
from fastdiff.diffusion.loop import _Loop, denoise
from fastdiff.execution.memory import OutOfMemoryError, Portions
from fastdiff.kernels.denoise import denoise_step, philox_normal

TINY = {
    "sample_size": 8,
    "block_out_channels": (16,),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
    "num_class_embeds": 4,
}
LABELS = torch.tensor([0, 2, 3])  # the conditions of the run; 3 is the null label
PICTURES = torch.tensor([1, 0, 1, 2])  # the condition of each of four pictures
NULL = torch.full_like(PICTURES, 2)
SEEDS = torch.tensor([5, 6, 7, 2**32 - 1])
SCHEDULES = {
    "ddpm": lambda: DDPMScheduler().schedule(3),
    "ddim": lambda: DDIMScheduler().schedule(3),
    "ddim-eta": lambda: DDIMScheduler().schedule(3, eta=0.7),
}


@pytest.fixture
def denoiser(randomise):
    return randomise(UNet2DModel.from_config(TINY))


def portions(count=4, halves=True, release=lambda: None):
    return Portions(count, torch.device("cpu"), torch.float32, halves=halves, release=release)


def predict(denoiser, x, timestep, labels):
    return denoiser(x.permute(0, 3, 1, 2), timestep, labels).sample.permute(0, 2, 3, 1)


@pytest.mark.parametrize("scale", [None, 3.0], ids=["plain", "guided"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_steps_are_prediction_guidance_and_row(denoiser, kind, scale):
    schedule = SCHEDULES[kind]()
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    conditions = Conditions(LABELS, PICTURES, None if scale is None else Guidance(scale, null_conditions=NULL))
    steps = list(denoise(denoiser, x, schedule, conditions, noise=SEEDS, portions=portions()))
    assert len(steps) == 3
    for i, (x_prev, x0) in enumerate(steps):
        timestep = schedule.timesteps[i]
        output = predict(denoiser, x, timestep, LABELS[PICTURES])
        if scale is not None:
            null = predict(denoiser, x, timestep, torch.full_like(PICTURES, 3))
            output = null + scale * (output - null)
        noise = philox_normal(SEEDS, i, x.shape[1:]) if schedule.draws_noise[i] else None
        expected = denoise_step(output, x, schedule.rows[i], schedule.options, noise=noise)
        torch.testing.assert_close(x_prev, expected[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(x0, expected[1], rtol=0, atol=1e-4)
        x = x_prev


def test_noise_is_asked_for_only_where_a_step_adds_it(denoiser):
    asked = []
    conditions = Conditions(LABELS, PICTURES)
    x = torch.randn(4, 8, 8, 3)

    def draw_noise():
        asked.append(0)
        return torch.zeros_like(x)

    for _ in denoise(denoiser, x, SCHEDULES["ddpm"](), conditions, noise=draw_noise, portions=portions()):
        pass
    assert len(asked) == 2  # not at timestep 0


@pytest.mark.parametrize("guidance", [None, Guidance(3.0, null_conditions=NULL)], ids=["plain", "guided"])
@pytest.mark.parametrize("noise", ["seeds", "given", None], ids=str)
def test_the_whole_batch_at_once_takes_the_same_step(denoiser, guidance, noise):
    """The GPU path, here without a graph, equals the CPU's picture-by-picture path up to rounding."""
    loop = _Loop(denoiser, SCHEDULES["ddim-eta"](), Conditions(LABELS, PICTURES, guidance))
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    z = {"seeds": SEEDS, "given": torch.randn(4, 8, 8, 3), None: None}[noise]
    for i in range(3):
        expected, found = loop.step_by_picture(x, i, z), loop.step_as_graph(x, i, z)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-4)


@pytest.fixture
def fits(monkeypatch):
    """From step `since` on, make a step of more than `most` pictures at once run out of memory."""

    def fits(most, since=0):
        asked = []
        step = _Loop.step_by_picture

        def step_if_it_fits(self, x_t, i, noise, part):
            asked.append((i, len(x_t[part])))
            if len(x_t[part]) > most and i >= since:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return step(self, x_t, i, noise, part)

        monkeypatch.setattr(_Loop, "step_by_picture", step_if_it_fits)
        return asked

    return fits


@pytest.mark.parametrize("guidance", [None, Guidance(3.0, null_conditions=NULL)], ids=["plain", "guided"])
def test_out_of_memory_halves_what_is_computed_together_and_repeats_no_step(denoiser, fits, guidance):
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    given = denoiser, x, SCHEDULES["ddim-eta"](), Conditions(LABELS, PICTURES, guidance)
    expected = list(denoise(*given, noise=SEEDS, portions=portions()))
    asked, released, found = fits(1, since=1), [], portions(release=lambda: released.append(0))
    steps = list(denoise(*given, noise=SEEDS, portions=found))
    for step, same in zip(steps, expected, strict=True):
        assert torch.equal(step[0], same[0]) and torch.equal(step[1], same[1])
    assert asked == [(0, 4), (1, 4), (1, 2), *[(1, 1)] * 4, *[(2, 1)] * 4]
    assert found.size == 1 and len(released) == 2


def test_without_halves_the_first_time_is_the_last(denoiser, fits):
    x, asked = torch.randn(4, 8, 8, 3), fits(1)
    given = denoiser, x, SCHEDULES["ddpm"](), Conditions(LABELS, PICTURES)
    with pytest.raises(OutOfMemoryError, match="for 4 pictures at a time; lower batch size, height or width"):
        list(denoise(*given, noise=lambda: torch.zeros_like(x), portions=portions(halves=False)))
    assert asked == [(0, 4)]


@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 4)], ids=["first", "last"])
@pytest.mark.parametrize("noise", ["seeds", "given", None], ids=str)
def test_a_part_of_the_batch_takes_the_step_of_its_pictures(denoiser, part, noise):
    """The GPU path, here without a graph."""
    loop = _Loop(denoiser, SCHEDULES["ddim-eta"](), Conditions(LABELS, PICTURES, Guidance(3.0, null_conditions=NULL)))
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    z = {"seeds": SEEDS, "given": torch.randn(4, 8, 8, 3), None: None}[noise]
    for expected, found in zip(loop.step_by_picture(x, 1, z), loop.step_as_graph(x, 1, z, part), strict=True):
        torch.testing.assert_close(found, expected[part], rtol=0, atol=1e-4)


OTHER_WAYS = {
    "scaled-input": lambda: EulerAncestralDiscreteScheduler().schedule(3),
    "earlier-outputs": lambda: DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++").schedule(3),
    "earlier-sample": lambda: UniPCMultistepScheduler().schedule(3),
}


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["all", "part"])
@pytest.mark.parametrize("kind", OTHER_WAYS)
def test_a_step_reads_and_keeps_the_same_either_way(denoiser, kind, part):
    """Both the CPU and the GPU path read what earlier steps kept, and the scale of the input."""
    loop = _Loop(denoiser, OTHER_WAYS[kind](), Conditions(LABELS, PICTURES, Guidance(3.0, null_conditions=NULL)))
    x, *earlier = (torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(i)) for i in range(5))
    given = {} if loop.schedule.keeps_output is None else {"earlier": tuple(earlier)}
    noise = SEEDS if loop.schedule.draws_noise[1] else None
    expected, found = loop.step_by_picture(x, 1, noise, **given), loop.step_as_graph(x, 1, noise, part, **given)
    assert len(found) == (4 if given else 2)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one[part], rtol=0, atol=1e-4)
