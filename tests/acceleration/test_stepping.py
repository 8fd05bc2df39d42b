"""accelerate gives a live diffusers scheduler its timesteps on the CPU."""

import copy
import inspect
import pickle
from types import SimpleNamespace

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.acceleration import stepping
from fastdiff.sampler_names import SAMPLERS

SAMPLE = torch.linspace(-1, 1, 32).reshape(1, 2, 4, 4)
NEEDS_MORE = {"LCMScheduler": {"original_inference_steps": 50}}


@pytest.fixture
def scheduler():
    made = diffusers.PNDMScheduler(skip_prk_steps=True)
    stepping.install(made)
    return made


def loop(scheduler, device, steps=8, **options):
    """Return the samples of a loop over `scheduler.timesteps` with a model that is a product."""
    scheduler.set_timesteps(steps, device=device, **NEEDS_MORE.get(type(scheduler).__name__, {}))
    sample, samples = SAMPLE.to(device), []
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
        sample = scheduler.step(0.3 * scaled, t, sample, **options).prev_sample
        samples.append(sample)
    return torch.stack(samples)


def test_step_keeps_its_signature(scheduler):
    assert inspect.signature(scheduler.step) == inspect.signature(diffusers.PNDMScheduler().step)


def test_a_loop_on_the_cpu_is_as_before(scheduler):
    assert torch.equal(loop(scheduler, "cpu"), loop(diffusers.PNDMScheduler(skip_prk_steps=True), "cpu"))


def test_a_copy_steps_itself(scheduler):
    copied = copy.deepcopy(scheduler)
    expected = loop(scheduler, "cpu")
    assert copied.step.__self__ is copied
    assert torch.equal(loop(copied, "cpu"), expected)
    assert torch.equal(loop(pickle.loads(pickle.dumps(scheduler)), "cpu"), expected)


def test_restore_and_a_second_time(scheduler):
    step = scheduler.step
    stepping.install(scheduler)
    assert scheduler.step is step
    stepping.remove(scheduler)
    assert "step" not in vars(scheduler)
    stepping.remove(scheduler)


@pytest.mark.parametrize("kind", [SimpleNamespace, fastdiff.DDIMScheduler, diffusers.EDMEulerScheduler])
def test_other_objects_stay_as_they_are(kind):
    other = kind()
    before = dict(vars(other))
    stepping.install(other)
    stepping.remove(other)
    assert vars(other) == before


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = SimpleNamespace(type="cuda")

    def cpu(self) -> torch.Tensor:
        return self.clone().as_subclass(torch.Tensor)


def test_the_copy_follows_the_vector():
    """A new vector, and one that was written to, are copied again."""
    timesteps = stepping.HostTimesteps()
    vector = torch.Tensor._make_subclass(OnGpu, torch.tensor([9, 5, 1]))
    assert [int(timesteps.find(t)) for t in vector] == [9, 5, 1]
    vector += 1
    assert [int(timesteps.find(t)) for t in vector[1:]] == [6, 2]
    other = torch.Tensor._make_subclass(OnGpu, torch.tensor([7.5, 3.5]))
    assert [float(timesteps.find(t)) for t in other] == [7.5, 3.5]
    assert timesteps.find(4) == 4 and timesteps.find(vector) is vector


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:__array(_wrap)?__ ")  # diffusers, with numpy 2
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_loop_on_the_gpu_has_the_same_bits(name):
    made = getattr(diffusers, name)()
    options = {"generator": None} if "generator" in inspect.signature(made.step).parameters else {}
    torch.manual_seed(0)
    expected = loop(made, "cuda", **options)
    stepping.install(made)
    torch.manual_seed(0)
    assert torch.equal(loop(made, "cuda", **options), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["PNDMScheduler", "DDIMScheduler"])
def test_no_step_after_the_first_waits_for_the_gpu(name):
    made = getattr(diffusers, name)()
    stepping.install(made)
    made.set_timesteps(20, device="cuda")
    sample = SAMPLE.cuda()
    try:
        for t in made.timesteps:
            sample = made.step(0.3 * sample, t, sample).prev_sample
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
