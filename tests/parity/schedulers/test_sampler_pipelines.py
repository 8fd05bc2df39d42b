"""Pipelines with each named scheduler against loops over diffusers' model and scheduler, and what seeds promise."""

import diffusers
import pytest
import torch

from fastdiff import Pipeline
from fastdiff.errors import InputError
from fastdiff.sampler_names import SCHEDULER_OPTIONS, SCHEDULERS
from tests.support.pairwise import product

NAMES = [name for name in SCHEDULERS if name not in ("ddim", "ddpm")]
STEPS = 6
FIRST = list({SCHEDULERS[name]: name for name in reversed(NAMES)}.values())  # the first name of each class
EACH_CLASS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in NAMES]
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword",
    "ignore:__array_wrap__ must accept context",
    "ignore:.*algorithm_type.* is deprecated:FutureWarning",
)


@torch.no_grad()
def hand_written(model, scheduler, generator, steps=STEPS):
    """Return x_0 (2, C, H, W) of a loop written as in diffusers, with the generator's noise."""
    x = torch.randn((2, 3, 8, 8), generator=generator)
    scheduler.set_timesteps(steps)
    x = x * getattr(scheduler, "init_noise_sigma", 1.0)
    taken = {"generator": generator} if "generator" in type(scheduler).step.__code__.co_varnames else {}
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        output = model(scaled, t).sample
        x = scheduler.step(output, t, x, **taken).prev_sample
    return x


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), product(NAMES, ["PNDM", "DDPM"], together=1))
def test_a_name_is_the_scheduler_of_diffusers_made_from_the_folders_config(name, kind, save_pipeline):
    theirs, folder = save_pipeline("DDPM", clip_sample=False)
    if kind == "PNDM":
        diffusers.PNDMScheduler(beta_schedule="scaled_linear", skip_prk_steps=True).save_pretrained(
            folder / "scheduler"
        )
    source = getattr(diffusers, f"{kind}Scheduler").from_pretrained(folder / "scheduler")
    scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(source.config, **SCHEDULER_OPTIONS.get(name, {}))
    expected = hand_written(theirs.unet, scheduler, torch.Generator().manual_seed(3))
    ours = Pipeline.from_pretrained(folder, device="cpu", scheduler=name)
    assert ours.scheduler_name == name
    *_, last = ours.stream(
        generator=torch.Generator().manual_seed(3), batch_size=2, num_inference_steps=STEPS, output_type="pt"
    )
    assert last.num_steps == len(scheduler.timesteps)
    actual = last.x_t.permute(0, 3, 1, 2)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@EACH_CLASS
def test_a_seed_has_the_same_bits_alone_and_in_any_batch(name, save_pipeline):
    _, folder = save_pipeline("DDPM")
    ours = Pipeline.from_pretrained(folder, device="cpu", scheduler=name)
    options = {"num_inference_steps": 5, "output_type": "pt"}
    together = ours(seed=[7, 3], **options).images
    assert together.isfinite().all()
    for i, seed in enumerate((7, 3)):
        assert torch.equal(ours(seed=seed, **options).images[0], together[i])


@EACH_CLASS
def test_diffusers_own_scheduler_is_taken_over(name, save_pipeline):
    _, folder = save_pipeline("DDPM")
    ours = Pipeline.from_pretrained(folder, device="cpu")
    ours.scheduler = getattr(diffusers, SCHEDULERS[name])(**SCHEDULER_OPTIONS.get(name, {}))
    assert ours.scheduler_name == name
    assert type(ours.scheduler).__module__.startswith("fastdiff")


def test_a_folders_runge_kutta_steps_are_taken_and_left_out_by_name(save_pipeline):
    _, folder = save_pipeline("DDPM")
    path = folder / "model_index.json"
    path.write_text(path.read_text().replace("DDPMScheduler", "PNDMScheduler"))
    diffusers.PNDMScheduler().save_pretrained(folder / "scheduler")
    own = Pipeline.from_pretrained(folder, device="cpu")
    assert own.scheduler_name == "pndm-rk" and len(own.scheduler.schedule(5)) == 14
    assert Pipeline.from_pretrained(folder, device="cpu", scheduler="pndm").scheduler.config["skip_prk_steps"]


def test_options_of_ddim_are_refused_of_others(save_pipeline):
    _, folder = save_pipeline("DDPM")
    with pytest.raises(InputError, match="eta is an option of ddim and tcd, not of EulerDiscreteScheduler"):
        Pipeline.from_pretrained(folder, device="cpu", scheduler="euler")(eta=0.5, num_inference_steps=2)


def test_an_unknown_name_is_told_which_there_are(save_pipeline):
    _, folder = save_pipeline("DDPM")
    with pytest.raises(InputError, match=r"scheduler: 'eular' is not one of ddim, ddpm, euler"):
        Pipeline.from_pretrained(folder, device="cpu", scheduler="eular")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EACH_CLASS
def test_a_gpu_draws_through_graphs_what_the_cpu_draws(name, save_pipeline):
    _, folder = save_pipeline("DDPM")
    options = {"num_inference_steps": 8, "output_type": "pt", "seed": [7, 3, 9]}
    expected = Pipeline.from_pretrained(folder, device="cpu", scheduler=name)(**options).images
    gpu = Pipeline.from_pretrained(folder, device="cuda", dtype="float32", scheduler=name)
    together = gpu(**options).images
    torch.testing.assert_close(together.cpu(), expected, rtol=0, atol=1e-3)
    assert torch.equal(gpu(**options | {"seed": 3}).images[0], together[1])
    gpu.denoiser.use_graphs = False
    assert torch.equal(gpu(**options).images, together)
