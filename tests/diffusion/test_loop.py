"""The loop against its definition: predict, guide, step."""

from collections import Counter

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
from fastdiff.diffusion.loop import Loop, denoise
from fastdiff.execution.memory import OutOfMemoryError, Portions
from fastdiff.execution.replaying.cuda_graphs import _describe
from fastdiff.execution.replaying.trees import Fixed, Plainly, map_tensors, plain
from fastdiff.kernels.denoise import EARLIER, denoise_step, philox_normal
from fastdiff.samplers.shared.from_config import scheduler_from_config
from tests.support.pairwise import each_sampler

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


def a_loop(denoiser, schedule, guidance=None, seeds=None):
    return Loop(denoiser, schedule, Conditions(LABELS, PICTURES, guidance), seeds)


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
    for i, x_prev, x0 in steps:
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


def test_guidance_of_an_interval_computes_one_half_in_other_steps(denoiser, monkeypatch):
    conditions = Conditions(LABELS, PICTURES, Guidance(3.0, NULL, interval=(0.25, 0.8)))  # of 5 steps: 1, 2 and 3
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    predicted, own = Counter(), denoiser.predict

    def predict(x, conditioning):
        predicted[len(whole)] += len(x)
        return own(x, conditioning)

    monkeypatch.setattr(denoiser, "predict", predict)
    denoiser.use_graphs = False
    whole, schedule = [], DDIMScheduler().schedule(5)
    for _, x_prev, _ in denoise(denoiser, x, schedule, conditions, noise=SEEDS, portions=portions()):
        whole.append(x_prev)
    assert predicted == {0: 4, 1: 8, 2: 8, 3: 8, 4: 4}
    for guided in (False, True):
        guidance = Guidance(3.0, NULL) if guided else None
        loop = a_loop(denoiser, schedule, guidance, SEEDS)
        for i in range(1, 5):
            same = torch.equal(loop.take_steps(whole[i - 1], i, i + 1, None)[0], whole[i])
            assert same == (guided == (i in (1, 2, 3)))


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
    loop = a_loop(denoiser, SCHEDULES["ddim-eta"](), guidance, SEEDS if noise == "seeds" else None)
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    z = torch.randn(4, 8, 8, 3) if noise == "given" else None
    for i in range(3):
        expected, found = loop.step_by_picture(x, i, z), loop.step_as_graph(x, i, z)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-4)


@pytest.fixture
def fits(monkeypatch):
    """From step `since` on, make a step of more than `most` pictures at once run out of memory."""

    def fits(most, since=0):
        asked = []
        step = Loop.step_by_picture

        def step_if_it_fits(self, x_t, i, noise, part):
            asked.append((i, len(x_t[part])))
            if len(x_t[part]) > most and i >= since:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return step(self, x_t, i, noise, part)

        monkeypatch.setattr(Loop, "step_by_picture", step_if_it_fits)
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
        assert step[0] == same[0] and torch.equal(step[1], same[1]) and torch.equal(step[2], same[2])
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
    guidance = Guidance(3.0, null_conditions=NULL)
    loop = a_loop(denoiser, SCHEDULES["ddim-eta"](), guidance, SEEDS if noise == "seeds" else None)
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    z = torch.randn(4, 8, 8, 3) if noise == "given" else None
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
    schedule = OTHER_WAYS[kind]()
    loop = a_loop(denoiser, schedule, Guidance(3.0, null_conditions=NULL), SEEDS)
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    earlier = torch.randn(4, EARLIER, 8, 8, 3) if schedule.multistep else None
    expected, found = loop.step_by_picture(x, 1, None, earlier=earlier), loop.step_as_graph(x, 1, None, part, earlier)
    assert len(found) == (3 if schedule.multistep else 2)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one[part], rtol=0, atol=1e-4)


class Recorder:
    """A stand-in for `Model.graphed` that notes what would be a graph's key: the name, and the inputs' shapes."""

    def __init__(self, monkeypatch, denoiser):
        self.keys, self.calls = set(), []
        monkeypatch.setattr(denoiser, "graphed", self.graphed, raising=False)
        monkeypatch.setattr(Loop, "step_alone", Loop.step_as_graph)

    def graphed(self, name, function):
        def run(*inputs, wanted):
            self.calls.append(inputs)
            self.keys.add((name, map_tensors(_describe, plain(inputs))))
            return Plainly(function)(*inputs, wanted=wanted)

        return run


@pytest.mark.parametrize("name", each_sampler())
def test_one_graph_runs_every_sampler_number_of_steps_and_scale(denoiser, monkeypatch, name):
    """Nothing is captured anew for another of them, and what does not change is copied into the graph once."""
    recorder = Recorder(monkeypatch, denoiser)
    x = torch.randn(4, 8, 8, 3)
    runs = [("ddim", 3, 2.0), (name, 4, 4.5), (name, 6, 1.5)]
    for sampler, steps, scale in runs:
        schedule = scheduler_from_config({}, sampler).schedule(steps)
        conditions = Conditions(LABELS, PICTURES, Guidance(scale, null_conditions=NULL))
        recorder.calls.clear()
        list(denoise(denoiser, x, schedule, conditions, noise=SEEDS, portions=portions()))
        fixed = [tuple(id(each) for each in inputs if isinstance(each, Fixed)) for inputs in recorder.calls]
        assert len(set(fixed)) == 1
    assert len(recorder.keys) == 1


def test_pictures_at_different_steps_take_the_step_of_their_row(denoiser):
    """The step reads each picture's row from a buffer."""
    loop = a_loop(denoiser, EulerAncestralDiscreteScheduler().schedule(3), None, SEEDS)
    x = torch.randn(4, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    whole = [loop.step_as_graph(x, i, None) for i in range(3)]
    rows = torch.tensor([2, 0, 1, 0])
    conditioning = [loop.table.at(i) for i in rows.tolist()]
    time = (
        torch.cat([each.temb[i : i + 1] for each, i in zip(conditioning, PICTURES.tolist(), strict=True)]),
        torch.cat([each.timesteps[:1] for each in conditioning]),
    )
    constants, seeds, zeros = loop.fixed(slice(None), x)
    found = loop.step(x, rows.int(), time, zeros.tensors, constants.tensors, seeds.tensors)
    for picture, row in enumerate(rows.tolist()):
        for one, other in zip(whole[row], found, strict=False):
            torch.testing.assert_close(other[picture], one[picture], rtol=0, atol=1e-5)
