"""Trajectories against loops over diffusers' UNet1DModel and schedulers: same noise and conditions, every step."""

import pytest
import torch

from fastdiff import Pipeline
from tests.support.pairwise import product

TOLERANCE = 1e-4
SEED = 5
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

POLICIES = {  # channels, widths of the levels, horizon
    "C14-3-levels-L16": (14, (8, 16, 32), 16),
    "C23-4-levels-L32": (23, (8, 16, 16, 32), 32),
    "C14-3-levels-L128": (14, (8, 16, 32), 128),
}
CALLS = {
    "ddpm": ("DDPM", {"variance_type": "fixed_small_log"}, {}),
    "ddpm-unclipped": ("DDPM", {"clip_sample": False, "prediction_type": "sample"}, {}),
    "ddim": ("DDIM", {"beta_schedule": "squaredcos_cap_v2"}, {}),
    "ddim-eta": ("DDIM", {}, {"eta": 0.7, "use_clipped_model_output": True}),
}


def conditions_of(count, channels, horizon):
    """Return the first and last observations of every trajectory, and all channels of one position shared by all."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(count, channels - 3, generator=generator)
    return {0: rows, horizon - 1: rows[:, -2:] + 1, 5: torch.randn(channels, generator=generator)}


def reset(x, conditions):
    """Set the conditions as ValueGuidedRLPipeline.reset_x0 does for trajectories (N, L, C) and one width."""
    for position, values in conditions.items():
        x[:, -values.shape[-1] :, position] = values.to(x.device)
    return x


@torch.no_grad()
def loop_of_diffusers(model, scheduler, x, steps, conditions, **options):
    """Loop over diffusers' model and scheduler, and yield x_{t-1} of every step."""
    scheduler.set_timesteps(steps)
    x = reset(x.clone(), conditions)
    for t in scheduler.timesteps:
        x = reset(scheduler.step(model(x, t).sample, t, x, **options).prev_sample, conditions)
        yield x.clone()


def assert_same_steps(steps, expected):
    for step, x in zip(steps, expected, strict=True):
        torch.testing.assert_close(step.x_t[:, 0].transpose(1, 2), x, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(step.trajectories.trajectories, x, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("policy", "call"), product(list(POLICIES), list(CALLS), together=1))
def test_every_step(policy, call, save_planner):
    channels, widths, horizon = POLICIES[policy]
    kind, config, options = CALLS[call]
    theirs, folder = save_planner(kind, {"in_channels": channels, "block_out_channels": widths}, **config)
    latents = torch.randn(2, channels, horizon, generator=torch.Generator().manual_seed(1))
    conditions = conditions_of(2, channels, horizon)
    expected = loop_of_diffusers(
        theirs.unet, theirs.scheduler, latents, 6, conditions, generator=torch.Generator().manual_seed(SEED), **options
    )
    steps = Pipeline.from_pretrained(folder, device="cpu").stream(
        latents=latents, conditions=conditions, num_inference_steps=6, output_type="pt",
        generator=torch.Generator().manual_seed(SEED), **options,
    )  # fmt: skip
    assert_same_steps(steps, expected)


def test_other_conditions_are_another_trajectory(save_planner):
    """The comparison above can fail."""
    theirs, folder = save_planner("DDIM")
    latents = torch.randn(1, 14, 16, generator=torch.Generator().manual_seed(1))
    expected = loop_of_diffusers(theirs.unet, theirs.scheduler, latents, 3, {0: torch.ones(11)})
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    steps = pipe.stream(latents=latents, conditions={1: torch.ones(11)}, num_inference_steps=3, output_type="pt")
    with pytest.raises(AssertionError):
        assert_same_steps(steps, expected)


def test_a_generator_draws_as_the_loop_does(save_planner):
    """One generator draws the starting noise (N, C, L) and the noise of all steps."""
    theirs, folder = save_planner("DDPM")
    generator = torch.Generator().manual_seed(SEED)
    latents = torch.randn(3, 14, 16, generator=generator)
    *_, expected = loop_of_diffusers(theirs.unet, theirs.scheduler, latents, 5, {}, generator=generator)
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    ours = pipe(
        horizon=16, batch_size=3, num_inference_steps=5, generator=torch.Generator().manual_seed(SEED),
        output_type="pt",
    ).trajectories  # fmt: skip
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("horizon", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_the_folder_of_a_value_guided_pipeline_sorts_by_its_values(horizon, save_value_guided):
    theirs, folder = save_value_guided()
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    call = {"horizon": horizon, "num_images": 6, "num_inference_steps": 4, "output_type": "pt"}
    unsorted = pipe(**call)
    assert unsorted.values is None
    with torch.no_grad():
        expected = theirs.value_function(unsorted.trajectories, torch.zeros(6, dtype=torch.long)).sample[:, 0]
    assert len(expected.unique()) == 6, "there is an order to find"
    trajectories, values = pipe(**call, sort_by_value=True)
    order = expected.argsort(descending=True)
    torch.testing.assert_close(values, expected[order], rtol=0, atol=TOLERANCE)
    assert torch.equal(trajectories, unsorted.trajectories[order])
    alone = pipe(**call | {"num_images": 1, "seed": int(order[0])}, sort_by_value=True)
    assert torch.equal(alone.values, values[:1]), "a value's bits do not depend on the batch"


@pytest.mark.gpu
@ON_GPU
def test_every_step_on_a_gpu(save_planner, exact_matmuls):
    theirs, folder = save_planner("DDIM")
    pipe = Pipeline.from_pretrained(folder, device="cuda", dtype="float32")
    latents = torch.randn(4, 14, 32, generator=torch.Generator().manual_seed(1)).cuda()
    conditions = conditions_of(4, 14, 32)
    expected = list(loop_of_diffusers(theirs.unet.cuda(), theirs.scheduler, latents, 6, conditions))
    for _ in range(2):  # the second run replays graphs
        steps = pipe.stream(latents=latents, conditions=conditions, num_inference_steps=6, output_type="pt")
        assert_same_steps(steps, expected)


@pytest.mark.gpu
@ON_GPU
def test_the_bits_of_a_seed_on_a_gpu_do_not_depend_on_the_batch(save_value_guided):
    _, folder = save_value_guided()
    pipe = Pipeline.from_pretrained(folder, device="cuda")
    call = {"horizon": 32, "num_inference_steps": 4, "conditions": {0: torch.ones(11)}, "output_type": "pt"}
    many = pipe(**call, num_images=5, sort_by_value=True)
    each = [pipe(**call, seed=seed, sort_by_value=True) for seed in range(5)]
    values = torch.cat([one.values for one in each])
    assert torch.equal(many.values, values.sort(descending=True).values)
    best = int(values.argmax())
    assert torch.equal(many.trajectories[:1], each[best].trajectories)
