"""Promises of all samplers: a run is a table of rows, and one function runs them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastdiff.kernels.denoise import COLUMNS, EARLIER, denoise_step
from fastdiff.samplers.shared.from_config import scheduler_from_config
from tests.support.pairwise import each_sampler

STEPS = 5
PICTURES = (2, 3, 4, 4)


def generator():
    return torch.Generator().manual_seed(1)


def model(sample, timestep):
    return torch.sin(3 * sample + float(timestep) / 100)


def channels_last(tensor):
    return tensor.permute(0, 2, 3, 1)


@pytest.mark.parametrize("name", each_sampler())
def test_a_run_is_a_row_for_each_call(name):
    scheduler = scheduler_from_config({}, name)
    schedule = scheduler.schedule(STEPS)
    assert scheduler.num_inference_steps is None  # a schedule does not change the scheduler's own loop
    scheduler.set_timesteps(STEPS)
    assert torch.equal(schedule.timesteps, scheduler.timesteps)
    calls = len(schedule)
    assert (schedule.rows.shape, schedule.rows.dtype) == ((calls, len(COLUMNS)), torch.float32)
    assert schedule.rows.isfinite().all()
    assert len(schedule.draws_noise) == calls
    assert (schedule.rows[:, COLUMNS.index("reads_earlier")] == schedule.multistep).all()
    noisy = schedule.rows[:, COLUMNS.index("sigma")] > 0
    assert not (noisy & ~torch.tensor(schedule.draws_noise)).any()


@pytest.mark.parametrize("name", each_sampler())
def test_the_class_steps_by_the_rows_of_the_schedule(name):
    """A loop over `step` equals `denoise_step` over the pipeline's table bit for bit."""
    scheduler = scheduler_from_config({}, name)
    schedule = scheduler.schedule(STEPS)
    scheduler.set_timesteps(STEPS)
    x = theirs = torch.randn(PICTURES, generator=generator()) * schedule.init_noise_sigma
    draws, ours_draws = generator(), generator()
    drawing = {"generator": draws} if any(schedule.draws_noise) else {}
    n, *shape = channels_last(x).shape
    kept = [torch.zeros(n, EARLIER, *shape) if schedule.multistep else None]
    for i, t in enumerate(schedule.timesteps):
        theirs = scheduler.step(model(theirs, t), t, theirs, **drawing).prev_sample
        noise = torch.randn(PICTURES, generator=ours_draws) if schedule.draws_noise[i] else None
        output, noise = channels_last(model(x, t)), None if noise is None else channels_last(noise)
        x, _, *kept = denoise_step(
            output, channels_last(x), schedule.rows[i], schedule.options, noise=noise, earlier=kept[0]
        )
        kept = kept or [None]
        x = x.permute(0, 3, 1, 2)
        assert torch.equal(theirs, x), f"step {i + 1}"


class Operations(TorchDispatchMode):
    """Note the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", each_sampler())
def test_every_step_runs_the_same_operations_and_does_not_wait_for_the_device(name):
    """A captured step serves every step of a run, so a sampler adds no launch and reads nothing on the host."""
    schedule = scheduler_from_config({}, name).schedule(STEPS)
    x = channels_last(torch.randn(PICTURES, generator=generator()))
    seeds = torch.arange(len(x)) if any(schedule.draws_noise) else None
    n, *shape = x.shape
    earlier = torch.zeros(n, EARLIER, *shape) if schedule.multistep else None
    runs = []
    for i in range(len(schedule)):
        step = torch.full((n,), i, dtype=torch.int32)
        with Operations() as operations:
            denoise_step(x, x, schedule.rows, schedule.options, noise=seeds, step=step, earlier=earlier)
        runs.append(operations.names)
    assert all(names == runs[0] for names in runs)
    assert "aten._local_scalar_dense.default" not in runs[0]
