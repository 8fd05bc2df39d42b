"""Callbacks of inpainting see the mask and the masked picture, and may change them, as in diffusers."""

import pytest
import torch

from fastdiff import InputError
from tests.parity.image_starts.pictures import PLAIN, WITH_CHANNELS, mask, picture
from tests.support.text_parity import assert_same, draw

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:__array_wrap__ must accept context",
        "ignore:The configuration file of the unet has set the default `sample_size`:FutureWarning",
        "ignore:.*skip_prk_steps:FutureWarning",
    ),
]
MASK, MASKED = "mask", "masked_image_latents"
USUAL = {"prompt": ["a cat", "riding"], "image": [picture(0), picture(1)], "mask_image": [mask(0), mask(1)]}
USUAL |= {"num_inference_steps": 4, "strength": 1.0}


def inverted(pipe, step, timestep, tensors):
    return {MASK: 1 - tensors[MASK]} if step == 1 else {}


def other_mask(pipe, step, timestep, tensors):
    """Return a mask that the call does not name."""
    return {MASK: (torch.arange(8) < 3).float().expand(4 if pipe.guidance_scale > 1 else 2, 1, 8, 8)}


def edited(pipe, step, timestep, tensors):
    """Edits at each step add up."""
    tensors[MASK][..., step] = 1
    return {}


def grey(pipe, step, timestep, tensors):
    return {MASK: 0.5 * tensors[MASK] + 0.1 * step}


def other_picture(pipe, step, timestep, tensors):
    return {MASKED: 1.5 * tensors[MASKED]} if step == 1 else {}


def both_changed(pipe, step, timestep, tensors):
    tensors[MASKED].mul_(0.8)
    return {MASK: 1 - tensors[MASK], MASKED: tensors[MASKED]}


def cut(pipe, step, timestep, tensors):
    """End guidance, and go on with other inputs."""
    if step == 1:
        pipe._guidance_scale = 0.0
        return {name: tensors[name].chunk(2)[-1] for name in tensors if name != "latents"}
    return {MASK: 1 - tensors[MASK]} if step == 2 else {}


CASES = [
    *((edit, channels, [MASK]) for edit in (inverted, edited, grey) for channels in (PLAIN, WITH_CHANNELS)),
    *((edit, WITH_CHANNELS, [MASK, MASKED]) for edit in (other_picture, both_changed)),
]
CASES += [(other_mask, channels, []) for channels in (PLAIN, WITH_CHANNELS)]
PROMPTS = {"sd1": ["prompt_embeds"], "sdxl": ["prompt_embeds", "add_text_embeds", "add_time_ids"]}


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 5.0])
@pytest.mark.parametrize("kind", [pytest.param("sd1", marks=pytest.mark.slow), "sdxl"])
@pytest.mark.parametrize(("edit", "channels", "names"), CASES)
def test_a_mask_is_changed_during_a_run(edit, channels, names, kind, scale, both):
    theirs, ours = both(kind, channels)
    options = USUAL | {"guidance_scale": scale}
    expected = draw(theirs, edit, names, **options)
    assert_same(draw(ours, edit, names, **options), expected)
    with pytest.raises(AssertionError):
        assert_same(draw(ours, **options), expected)


@pytest.mark.parametrize("channels", [PLAIN, WITH_CHANNELS])
@pytest.mark.parametrize("kind", PROMPTS)
def test_guidance_ends_with_the_halves_of_a_mask(kind, channels, both):
    theirs, ours = both(kind, channels)
    names = [*PROMPTS[kind], MASK, *([MASKED] if channels == WITH_CHANNELS else [])]
    expected = draw(theirs, cut, names, **USUAL)
    assert_same(draw(ours, cut, names, **USUAL), expected)


@pytest.mark.parametrize(("channels", "names"), [(PLAIN, [MASK]), (WITH_CHANNELS, [MASK, MASKED])])
def test_a_callback_sees_diffusers_tensors(channels, names, both):
    seen = []

    def note(pipe, step, timestep, tensors):
        seen.append({name: tensors[name].clone() for name in names})
        return tensors

    for pipe in both("sdxl", channels):
        draw(pipe, note, names, **USUAL)
    theirs, ours = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    for wanted, found in zip(theirs, ours, strict=True):
        for name in names:
            torch.testing.assert_close(found[name], wanted[name])


WRONG = {
    "without-a-mask": (PLAIN, [MASK], lambda each: each, {"mask_image": None}, "'mask' is not one of latents, "),
    "a-plain-model": (
        PLAIN,
        [MASKED],
        lambda each: each,
        {},
        "'masked_image_latents' is not one of latents, .*, mask;",
    ),
    "shape": (WITH_CHANNELS, [MASK], lambda each: each[..., 1:], {}, "mask has shape .*; return it with shape"),
    "halves": (
        WITH_CHANNELS,
        [MASK],
        lambda each: each * torch.tensor([0, 0, 1, 1])[:, None, None, None],
        {},
        "mask differs in",
    ),
    "no-tensor": (PLAIN, [MASK], lambda each: 1, {}, "mask"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_a_mask_is_one_line(case, both):
    channels, names, change, options, said = WRONG[case]
    _, ours = both("sd1", channels)
    given = {name: each for name, each in (USUAL | options).items() if each is not None and name != "strength"}

    def edit(pipe, step, timestep, tensors):
        return {name: change(tensors[name]) for name in names}

    with pytest.raises(InputError, match=f"^callback_on_step_end[^\n]*{said}[^\n]*$"):
        draw(ours, edit, names, **given)
