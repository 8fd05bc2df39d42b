"""The scheduler of a Stable Diffusion folder: options that the pipeline class sets, and schedulers made from it."""

import inspect
from typing import Any

import diffusers
import pytest

from fastdiff.checkpoints.registry import PIPELINES
from fastdiff.sampler_names import SCHEDULER_OPTIONS, SCHEDULERS, scheduler_name
from fastdiff.samplers.shared.from_config import folder_scheduler, scheduler_from_config, scheduler_like
from tests.support.pairwise import each_sampler, product

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",  # diffusers warns about the options that it sets
    "ignore:__array__ implementation:DeprecationWarning",  # from diffusers' ancestral Euler
    "ignore:__array_wrap__:DeprecationWarning",  # from diffusers' DPM2
)

CHANGES = PIPELINES["StableDiffusionPipeline"].scheduler_options
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
FILES = {  # scheduler_config.json
    "sd15": {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "steps_offset": 1, "clip_sample": False},
    "sd21": {"_class_name": "DDIMScheduler", "steps_offset": 1, "clip_sample": False, "skip_prk_steps": True},
    "old": {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False},
    "old-ddim": {"_class_name": "DDIMScheduler"},
    "clips": {"_class_name": "DDIMScheduler", "clip_sample": True, "steps_offset": 0},
    "clips-by-default": {"_class_name": "DDPMScheduler", "steps_offset": 0},
    "marked": {"_class_name": "DDIMScheduler", "clip_sample": True, "_use_default_values": ["clip_sample"]},
    "of-another": {"_class_name": "EulerDiscreteScheduler", "clip_sample": True, "set_alpha_to_one": False},
    "euler": {"_class_name": "EulerAncestralDiscreteScheduler"},
    "offset-3": {"_class_name": "UniPCMultistepScheduler", "steps_offset": 3, "timestep_spacing": "leading"},
}


def live(config: dict[str, Any]) -> Any:
    """Return the scheduler of a diffusers pipeline loaded from a folder with this file."""
    scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    parts = dict.fromkeys(
        ("vae", "text_encoder", "tokenizer", "unet", "safety_checker", "feature_extractor", "image_encoder")
    )
    return diffusers.StableDiffusionPipeline(**parts, scheduler=scheduler, requires_safety_checker=False).scheduler


def options(scheduler: Any, of: Any) -> dict[str, Any]:
    """Return the scheduler's options that the diffusers class of `of` also has."""
    names = inspect.signature(type(of).__init__).parameters.keys() - {"self"}
    values = {name: scheduler.config.get(name, "not there") for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def assert_same_options(ours: Any, theirs: Any) -> None:
    assert options(ours, theirs) == options(theirs, theirs)


@pytest.mark.parametrize("name", FILES)
def test_it_is_that_of_the_live_pipeline(name):
    config = BETAS | FILES[name]
    own = scheduler_name(config["_class_name"], config)
    for asked in (None, own):
        ours = folder_scheduler(config, asked, own, CHANGES)
        assert_same_options(ours, live(config))
        assert ours.schedule(5).timesteps.tolist() == scheduler_like(live(config)).schedule(5).timesteps.tolist()


@pytest.mark.parametrize(("asked", "name"), product(each_sampler(), list(FILES), together=1))
def test_another_is_made_of_the_live_pipelines_config(name, asked):
    config = BETAS | FILES[name]
    own = scheduler_name(config["_class_name"], config)
    if asked == own:
        pytest.skip("the folder's own: test_it_is_that_of_the_live_pipeline")
    kind, changed = getattr(diffusers, SCHEDULERS[asked]), SCHEDULER_OPTIONS.get(asked, {})
    theirs = kind.from_config(live(config).config, **changed)
    assert_same_options(folder_scheduler(config, asked, own, CHANGES), theirs)
    for pipelines in (folder_scheduler(config, None, own, CHANGES), scheduler_like(live(config))):
        assert_same_options(scheduler_from_config(pipelines.config, asked), theirs)


def test_a_pipeline_that_sets_nothing_leaves_the_file_as_it_is():
    config = BETAS | FILES["clips"]
    assert folder_scheduler(config, None, "ddim", {}).config == scheduler_from_config(config).config
    assert folder_scheduler(config, None, "ddim", {}).config.steps_offset == 0
