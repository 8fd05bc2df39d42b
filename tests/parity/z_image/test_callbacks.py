"""Callbacks of ZImagePipeline have the same effect as in diffusers, and wrong return values are refused."""

import pytest
import torch

from fastdiff import InputError

PROMPTS = ["a cat", "a dog and a long prompt, longer than the other one"]
CALL = {"height": 16, "width": 24, "num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "latent"}
NAMES = ["latents", "prompt_embeds", "negative_prompt_embeds"]

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(pipe, callback=None, names=(), **options):
    given = CALL | options
    if callback is not None:
        given |= {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": [*names]}
    return pipe(prompt=[*PROMPTS], generator=torch.Generator().manual_seed(1), **given).images


def assert_close(ours, theirs):
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def other(tensor):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor) + tensor


def others(value):
    return [other(each) for each in value] if isinstance(value, list) else other(value)


def replacing(name):
    return lambda pipe, step, timestep, tensors: {name: others(tensors[name])} if step == 1 else {}


def editing(name):
    def edit(pipe, step, timestep, tensors):
        for each in tensors[name] if isinstance(tensors[name], list) else [tensors[name]]:
            each.mul_(1.1).add_(0.01)
        return {}

    return edit


@pytest.mark.parametrize("make", [replacing, editing])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_is_replaced_or_edited(theirs, ours, make, name):
    expected = draw(theirs, make(name), [name])
    found = draw(ours, make(name), [name])
    assert_close(found, expected)
    assert (draw(ours) - found).abs().max() > 1e-3


def test_a_callback_reads_the_latents_by_default(theirs, ours):
    assert_close(*(draw(pipe, callback_on_step_end=editing("latents")) for pipe in (ours, theirs)))


def longer(pipe, step, timestep, tensors):
    """Give the first picture a caption as long as another padded length."""
    first, second = tensors["prompt_embeds"]
    return {"prompt_embeds": [torch.cat([first, second]), second]} if step == 0 else {}


def rising(pipe, step, timestep, tensors):
    assert pipe.guidance_scale == 3.0 + step and pipe.do_classifier_free_guidance and pipe.num_timesteps == 4
    pipe._guidance_scale = 4.0 + step
    return {}


def pausing(pipe, step, timestep, tensors):
    pipe._guidance_scale = [0.0, 0.0, 2.0, 0.0][step]
    return {}


def last_alone(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] * 2} if step == 3 else {}


@pytest.mark.parametrize("callback", [longer, rising, pausing, last_alone])
@pytest.mark.parametrize("options", [{}, {"cfg_truncation": 0.5}, {"cfg_normalization": True}], ids=str)
def test_lengths_and_scales_change_as_in_diffusers(theirs, ours, callback, options):
    names = NAMES[:2]
    assert_close(draw(ours, callback, names, **options), draw(theirs, callback, names, **options))


@pytest.mark.parametrize("guidance", [0.0, 3.0])
def test_what_a_callback_sees_is_what_diffusers_shows(theirs, ours, guidance):
    seen = []

    def look(pipe, step, timestep, tensors):
        seen.append(
            (step, float(timestep), [each.clone() for each in tensors["prompt_embeds"]], tensors["latents"].clone())
        )
        return {}

    for pipe in (theirs, ours):
        draw(pipe, look, NAMES[:2], guidance_scale=guidance)
    for one, two in zip(seen[:4], seen[4:], strict=True):
        assert one[0] == two[0] and one[1] == pytest.approx(two[1], rel=1e-6)
        assert len(one[2]) == len(two[2]) == 2
        for mine, its in [*zip(one[2], two[2], strict=True), (one[3], two[3])]:
            assert mine.shape == its.shape and (mine - its).abs().max() <= 1e-4


def test_a_callback_that_changes_nothing_leaves_the_bits(ours):
    def unchanged(pipe, step, timestep, tensors):
        return {**tensors}

    assert torch.equal(draw(ours, unchanged, NAMES), draw(ours))
    assert torch.equal(draw(ours, editing("prompt_embeds"), NAMES), draw(ours, editing("prompt_embeds"), NAMES))
    assert torch.equal(draw(ours), draw(ours, unchanged, NAMES))  # remembered states were not edited


def test_each_picture_of_a_prompt_has_states_of_its_own(ours):
    def first_alone(pipe, step, timestep, tensors):
        tensors["prompt_embeds"][0].mul_(1.5)
        return {}

    options = {"num_images_per_prompt": 2, "num_inference_steps": 3}
    found, plain = draw(ours, first_alone, NAMES, **options), draw(ours, **options)
    assert [torch.equal(*each) for each in zip(found, plain, strict=True)] == [False, True, True, True]


def giving(value):
    return lambda pipe, step, timestep, tensors: value


def interrupting(pipe, step, timestep, tensors):
    pipe._interrupt = True
    return {}


def guiding(pipe, step, timestep, tensors):
    pipe._guidance_scale = 2.0
    return {}


WRONG = {
    "no-function": (7, {}, "callback_on_step_end: 7 is not callable"),
    "no-mapping": (giving(None), {}, "callback_on_step_end: it returned None"),
    "no-tensor": (giving({"latents": 1}), {}, "callback_on_step_end: latents: 1 is not a tensor"),
    "shape": (giving({"latents": torch.zeros(1, 4, 8, 12)}), {}, r"latents has shape \(1, 4, 8, 12\); return it with"),
    "count": (giving({"prompt_embeds": [torch.zeros(3, 24)]}), {}, "prompt_embeds must be a list of 2 tensors"),
    "width": (
        giving({"prompt_embeds": [torch.zeros(3, 9)] * 2}),
        {},
        r"prompt_embeds\[0\] has shape \(3, 9\); .*24",
    ),
    "empty": (giving({"prompt_embeds": [torch.zeros(0, 24)] * 2}), {}, r"prompt_embeds\[0\] has shape \(0, 24\)"),
    "interrupt": (interrupting, {}, "_interrupt is not supported"),
    "guidance": (guiding, {"guidance_scale": 0.0}, "_guidance_scale 2 in a run without guidance"),
}


@pytest.mark.parametrize(("callback", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_named_and_the_pipeline_goes_on(ours, callback, options, message):
    before = draw(ours)
    with pytest.raises(InputError, match=message):
        draw(ours, callback, NAMES, **options)
    assert torch.equal(draw(ours), before)


def test_an_unknown_tensor_is_named(ours):
    with pytest.raises(InputError, match="callback_on_step_end_tensor_inputs: 'mask' is not one of latents, prompt"):
        draw(ours, print, ["mask"])
