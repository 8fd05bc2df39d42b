"""Pipelines are called as diffusers' are: arguments by position, their names, and encode_prompt."""

import inspect

import diffusers
import pytest
import torch
from diffusers.experimental import ValueGuidedRLPipeline

from fastdiff import DDIMScheduler, DDPMScheduler, InputError, LabelPipeline, Pipeline, UNet2DModel
from fastdiff.checkpoints.registry import PIPELINES
from fastdiff.diffusion.results import PipelineOutput
from fastdiff.pipelines import label, text_to_image, trajectory, z_image
from fastdiff.pipelines.caption_callbacks import CallbackOptions
from fastdiff.pipelines.captions import CaptionOptions
from fastdiff.pipelines.controlling import ControlOptions
from fastdiff.pipelines.drawing import DrawingOptions, names_of
from fastdiff.pipelines.image_prompts import ImagePromptOptions
from fastdiff.pipelines.inpainting import MaskOptions
from fastdiff.pipelines.prompts import PromptOptions
from fastdiff.pipelines.refining import PartOptions
from fastdiff.pipelines.signatures import CALLS, ENCODE_PROMPT
from fastdiff.pipelines.sizes import SizeOptions
from tests.support.text_pipelines import KINDS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]

DRAWN = {"num_inference_steps": 2, "output_type": "pt"}
BLOCKS = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "add_attention": False}


def class_of(name):
    return ValueGuidedRLPipeline if name == "ValueGuidedRLPipeline" else getattr(diffusers, name)


def names(method):
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    parameters = inspect.signature(method).parameters.values()
    return tuple(each.name for each in parameters if each.kind not in kinds and each.name != "self")


@pytest.mark.parametrize("name", CALLS)
def test_the_order_is_that_of_diffusers(name):
    assert CALLS[name] == names(class_of(name).__call__)
    if name in ENCODE_PROMPT:
        assert ENCODE_PROMPT[name] == names(class_of(name).encode_prompt)


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_taken_or_refused_by_name(name):
    module, kind = {
        "LabelPipeline": (label, label.LabelPipeline),
        "TextToImagePipeline": (text_to_image, text_to_image.TextToImagePipeline),
        "TrajectoryPipeline": (trajectory, trajectory.TrajectoryPipeline),
        "ZImagePipeline": (z_image, z_image.ZImagePipeline),
    }[next(iter(PIPELINES[name].denoisers.values()))]
    taken = names_of(
        *(DrawingOptions, CaptionOptions, PromptOptions, SizeOptions, PartOptions, ControlOptions, ImagePromptOptions),
        *(CallbackOptions, MaskOptions),
    )
    taken |= {*names(kind.stream), "return_dict"}
    assert sorted({*CALLS[name]} - taken - module.REFUSED.keys()) == []


@pytest.fixture
def make(randomise):
    def make(scheduler):
        unet = UNet2DModel.from_config({"sample_size": 8, "block_out_channels": (32, 32), **BLOCKS})
        return LabelPipeline(randomise(unet), scheduler)

    return make


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_prompt_and_a_size_by_position(kind, text_pipes):
    theirs, ours = text_pipes(kind)
    second = () if kind == "sd1" else ("a dog",)
    args = "a cat", *second, 16, 24, 2
    expected, found = (
        pipe(*args, generator=torch.Generator().manual_seed(3), output_type="pt").images for pipe in (theirs, ours)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert found.shape == (1, 3, 16, 24)


def test_ddpm_and_ddim_by_position(make):
    """DDPM takes (batch_size, generator, steps), DDIM takes eta before the steps."""
    generator = torch.Generator().manual_seed(5)
    args = 2, generator, 3, "pt", False
    (found,) = make(DDPMScheduler())(*args)
    generator.manual_seed(5)
    options = {"batch_size": 2, "generator": generator, "num_inference_steps": 3, "output_type": "pt"}
    assert torch.equal(found, make(DDPMScheduler())(**options).images)
    generator.manual_seed(5)
    found = make(DDIMScheduler())(2, generator, 0.5, 3, None, "pt")
    generator.manual_seed(5)
    assert torch.equal(found.images, make(DDIMScheduler())(eta=0.5, **options).images)
    assert isinstance(found, PipelineOutput) and len(found.images) == 2


def test_dit_by_position():
    pipe = Pipeline.from_pretrained("emoji64-dit", device="cpu")
    found = pipe([3, 4], 2.0, None, 1, "pt").images
    options = {"class_labels": [3, 4], "guidance_scale": 2.0, "num_inference_steps": 1}
    assert torch.equal(found, pipe(output_type="pt", **options).images)


@pytest.mark.parametrize(
    ("args", "options", "line"),
    [
        ((1,) * 6, {}, "LabelPipeline: 6 arguments by position, and it takes at most 5: batch_size, generator"),
        ((1,), {"batch_size": 1}, "batch_size: it is given by position and by name; leave out one of the two"),
        ((), {"strength": 1}, "strength: pipelines of labels have no such argument; leave it out"),
        ((), {"strength": None}, "strength: pipelines of labels have no such argument; leave it out"),
        ((), {"prompt": "a cat"}, "prompt: this model has no text encoder"),
        ((), {"image": 3}, "image: only text-to-image pipelines start from a picture; leave it out"),
        (("two",), {}, "batch_size: 'two' is not a whole number"),
        ((), {"return_dict": 3}, "return_dict: 3 is not true or false"),
    ],
)
def test_wrong_calls_are_one_line(make, args, options, line):
    with pytest.raises(InputError, match=f"^{line}"):
        make(DDPMScheduler())(*args, **options)


def test_planners_take_diffusers_names(save_value_guided):
    pipe = Pipeline.from_pretrained(save_value_guided()[1], device="cpu")
    assert pipe(None, 2, 16, 0, num_inference_steps=1).trajectories.shape == (2, 14, 16)
    for options, line in [
        ({"obs": [0.0]}, "obs: observations are not normalised here; give conditions="),
        ({"scale": 0.1}, "scale: guidance by the value's gradient is not supported"),
        ({"n_guide_steps": 2}, "n_guide_steps: 2 asks for guidance by the value's gradient"),
        ({"planning_horizon": 16, "horizon": 16}, "planning_horizon: horizon is also given"),
        ({"prompt": "a"}, "prompt: this model has no text encoder"),
        ({"height": 8}, "height: this model plans trajectories; give horizon"),
        ({"image": 8}, "image: this model plans trajectories; leave it out"),
        ({"strength": 8}, "strength: pipelines of trajectories have no such argument"),
    ]:
        with pytest.raises(InputError, match=f"^{line}"):
            pipe(**options)


ENCODED = {
    "plain": {},
    "rows": {"num_images_per_prompt": 3, "prompt": ["a cat", "riding"]},
    "negative": {"negative_prompt": "a dog"},
    "unguided": {"do_classifier_free_guidance": False},
    "skip": {"clip_skip": 1, "negative_prompt": "a dog"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ENCODED)
def test_prompts_are_encoded_as_in_diffusers(kind, case, text_pipes):
    defaults = {"prompt": "a cat", "device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True}
    options = defaults | ENCODED[case]
    theirs, ours = (pipe.encode_prompt(**options) for pipe in text_pipes(kind))
    assert len(ours) == len(theirs)
    for found, expected in zip(ours, theirs, strict=True):
        if expected is None:
            assert found is None
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_embeddings_are_repeated_as_in_diffusers(kind, text_pipes):
    theirs, ours = text_pipes(kind)
    given = ours.encode_prompt("a cat", **{} if kind == "sdxl" else {"device": None})
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    options = dict(zip(names, given, strict=False)) | {"prompt": None, "device": "cpu", "num_images_per_prompt": 2}
    options["do_classifier_free_guidance"] = True
    for found, expected in zip(ours.encode_prompt(**options), theirs.encode_prompt(**options), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("args", "options", "line"),
    [
        (("a",), {"prompt": "a"}, "prompt: it is given by position and by name"),
        ((), {}, "prompt: this model needs a prompt"),
        (("a",), {"device": "nowhere"}, "device: 'nowhere' is unknown"),
        (("a",), {"num_images_per_prompt": 0}, "num_images_per_prompt: 0 is not a whole number"),
        (("a",), {"do_classifier_free_guidance": 3}, "do_classifier_free_guidance: 3 is not true or false"),
        (("a",), {"lora_scale": "x"}, "lora_scale: 'x' is not a number"),
        (("a",), {"strength": 0.5}, "strength: text encoders have no such argument"),
    ],
)
def test_wrong_prompts_are_one_line(args, options, line, text_pipes):
    with pytest.raises(InputError, match=f"^{line}"):
        text_pipes("sd1")[1].encode_prompt(*args, **options)


def test_the_last_run_is_seen_on_the_pipeline(text_pipes, text_folder):
    theirs, _ = text_pipes("sd1")
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    seen = "guidance_scale", "num_timesteps", "do_classifier_free_guidance", "guidance_rescale", "clip_skip"
    assert [getattr(pipe, name) for name in seen] == [7.5, 51, True, 0.0, None]  # PNDM calls the model once more
    options = {"guidance_scale": 1.0, "guidance_rescale": 0.5, "clip_skip": 1, "num_inference_steps": 2}
    theirs("a cat", output_type="pt", **options)
    pipe("a cat", output_type="pt", **options)
    assert [getattr(pipe, name) for name in seen] == [getattr(theirs, name) for name in seen]
    for name in ("interrupt", "cross_attention_kwargs", "vae_scale_factor"):
        assert getattr(pipe, name) == getattr(theirs, name)


@pytest.mark.parametrize("custom", [{"timesteps": [900, 500, 20]}, {"sigmas": [9.0, 3.0, 0.5]}])
@pytest.mark.parametrize("kind", ["sd1", "labels", "planner"])
def test_timesteps_and_sigmas_replace_the_number_of_steps(kind, custom, make, text_folder, save_planner, monkeypatch):
    """The scheduler gets them instead of the number. Its own tests compare what it makes of them with diffusers."""
    folder = {"sd1": lambda: text_folder("sd1"), "planner": lambda: save_planner("DDPM")[1]}.get(kind)
    pipe = make(DDPMScheduler()) if folder is None else Pipeline.from_pretrained(folder(), device="cpu")
    schedule, asked = type(pipe.scheduler).schedule, []

    def noted(scheduler, num_inference_steps=None, *, timesteps=None, sigmas=None, **options):
        asked.append((num_inference_steps, {"timesteps": timesteps, "sigmas": sigmas}))
        return schedule(scheduler, 3, **options)

    monkeypatch.setattr(type(pipe.scheduler), "schedule", noted)
    options = {"prompt": "a cat"} if kind == "sd1" else {"horizon": 16} if kind == "planner" else {}
    next(pipe.stream(num_inference_steps=50, **custom, **options))
    next(pipe.stream(num_inference_steps=2, timesteps=None, sigmas=None, **options))
    nothing = {"timesteps": None, "sigmas": None}
    assert asked == [(None, nothing | custom), (2, nothing)]
