"""Callbacks of TextToImagePipeline have the same effect as in diffusers, and wrong return values are refused."""

import pytest
import torch
from diffusers.callbacks import (
    MultiPipelineCallbacks,
    SDCFGCutoffCallback,
    SDXLCFGCutoffCallback,
    SDXLControlnetCFGCutoffCallback,
)

from fastdiff import InputError
from tests.support.pairwise import product
from tests.support.text_parity import assert_same, draw
from tests.support.text_pipelines import KINDS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]

NAMES = {
    "sd1": ("latents", "prompt_embeds"),
    "sd2": ("latents", "prompt_embeds"),
    "sdxl": ("latents", "prompt_embeds", "add_text_embeds", "add_time_ids"),
}
EACH = pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(
            kind, name, marks=pytest.mark.slow if (kind, name) in [("sd1", "latents"), ("sd2", "prompt_embeds")] else []
        )
        for kind in KINDS
        for name in NAMES[kind]
    ],
)
MOST = pytest.mark.parametrize("kind", ["sd1", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
TWO = {"prompt": ["a cat", "riding"], "negative_prompt": ["dog", "dog"], "num_inference_steps": 4}


def assert_the_same_callback_draws_the_same(pipes, make_callback, names, **options):
    """`make_callback` makes a new callback for each library, because a callback may keep state."""
    theirs, ours = pipes
    expected = draw(theirs, make_callback(), names, **options)
    assert_same(draw(ours, make_callback(), names, **options), expected)
    with pytest.raises(AssertionError):
        assert_same(draw(ours, **options), expected)


def other(tensor):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor) + tensor


@EACH
def test_a_tensor_is_replaced(kind, name, text_pipes):
    """A tensor that is returned at one step is used in all later steps."""

    def make():
        def replace(pipe, step, timestep, tensors):
            return tensors | {name: other(tensors[name])} if step == 1 else {}

        return replace

    names = [name] if name != "latents" else []
    assert_the_same_callback_draws_the_same(text_pipes(kind), make, names, **TWO)


@pytest.mark.slow
@EACH
def test_a_tensor_is_edited_in_place(kind, name, text_pipes):
    """Edits at each step add up."""

    def make():
        def edit(pipe, step, timestep, tensors):
            tensors[name].mul_(1.1).add_(0.01)
            return {}

        return edit

    names = [name] if name != "latents" else []
    assert_the_same_callback_draws_the_same(text_pipes(kind), make, names, **TWO)


@MOST
def test_all_of_a_prompt_is_replaced_where_guidance_is_off(kind, text_pipes):
    names = NAMES[kind][1:]

    def make():
        return lambda pipe, step, timestep, tensors: {name: other(tensors[name]) for name in names}

    assert_the_same_callback_draws_the_same(text_pipes(kind), make, names, **TWO | {"guidance_scale": 1.0})


def test_a_scale_of_1_ends_guidance(text_pipes):
    _, ours = text_pipes("sd1")
    seen = []

    def note(pipe, step, timestep, tensors):
        seen.append(len(tensors["prompt_embeds"]))
        pipe._guidance_scale = 1.0
        return {}

    draw(ours, note, ["prompt_embeds"], **TWO)
    assert len(seen) > 1 and seen == [4] + [2] * (len(seen) - 1)


@MOST
def test_guidance_ends_where_the_prompts_half_is_given_back(kind, text_pipes):
    """As in "dynamic classifier-free guidance" in diffusers' documentation. Later edits still apply."""

    def make():
        def cut(pipe, step, timestep, tensors):
            if step == int(pipe.num_timesteps * 0.4):
                pipe._guidance_scale = 0.0
                return {name: tensors[name].chunk(2)[-1] * 1.1 for name in NAMES[kind][1:]}
            if step == 3:
                tensors["prompt_embeds"].mul_(1.1)
            return tensors

        return cut

    assert_the_same_callback_draws_the_same(text_pipes(kind), make, NAMES[kind][1:], **TWO)


@pytest.mark.parametrize("kind", [pytest.param("sd1", marks=pytest.mark.slow), "sdxl"])
def test_either_way_to_end_guidance_is_enough(kind, text_pipes):
    """diffusers needs both the scale and the half."""
    theirs, ours = text_pipes(kind)
    names = NAMES[kind][1:]

    def cut(pipe, step, timestep, tensors, *, by_scale, by_half):
        if step == 1 and by_scale:
            pipe._guidance_scale = 0.0
        return {name: tensors[name].chunk(2)[-1] for name in names} if step == 1 and by_half else {}

    def cutting(by_scale, by_half):
        return lambda *args: cut(*args, by_scale=by_scale, by_half=by_half)

    expected = draw(theirs, cutting(True, True), names, **TWO)
    assert_same(draw(ours, cutting(True, False), names, **TWO), expected)
    assert_same(draw(ours, cutting(True, False), **TWO), expected)
    assert_same(draw(ours, cutting(False, True), names, **TWO), expected)


@MOST
def test_the_scale_of_guidance_is_set(kind, text_pipes):
    def make():
        def rise(pipe, step, timestep, tensors):
            assert pipe.guidance_scale == 3.0 + step
            pipe._guidance_scale = 4.0 + step
            return {}

        return rise

    assert_the_same_callback_draws_the_same(text_pipes(kind), make, [], **TWO | {"guidance_scale": 3.0})


CUT = {"sd1": SDCFGCutoffCallback, "sd2": SDCFGCutoffCallback, "sdxl": SDXLCFGCutoffCallback}


CUTOFFS = {"ratio": {"cutoff_step_ratio": 0.4}, "index": {"cutoff_step_index": 2, "cutoff_step_ratio": None}}


@pytest.mark.parametrize(
    ("kind", "several", "cutoff"), product(KINDS, {"one": False, "several": True}, CUTOFFS, together=1)
)
def test_the_callbacks_of_diffusers(kind, several, cutoff, text_pipes):
    options = {"prompt": "a cat", "num_inference_steps": 5, "output_type": "pt"}
    pictures = []
    for pipe in text_pipes(kind):
        callback = CUT[kind](**cutoff)
        callback = MultiPipelineCallbacks([callback]) if several else callback
        generator = torch.Generator().manual_seed(1)
        pictures.append(pipe(callback_on_step_end=callback, generator=generator, **options).images)
    torch.testing.assert_close(*pictures, rtol=0, atol=1e-3)
    uncut = text_pipes(kind)[1](generator=torch.Generator().manual_seed(1), **options).images
    assert (pictures[1] - uncut).abs().max() > 1e-2


@MOST
def test_tensors_that_come_back_as_they_were_change_no_bit(kind, text_pipes):
    _, ours = text_pipes(kind)
    options = TWO | {"output_type": "pt", "num_images_per_prompt": 2}
    expected = ours(**options).images
    given = ours(callback_on_step_end=lambda *args: {}, **options)
    back = ours(callback_on_step_end=lambda *args: args[-1], callback_on_step_end_tensor_inputs=NAMES[kind], **options)
    assert torch.equal(given.images, expected) and torch.equal(back.images, expected)


def test_the_next_run_knows_nothing_of_a_callback(text_pipes):
    """The next run uses neither the scale that a callback set nor the tensors that it edited."""
    _, ours = text_pipes("sdxl")
    embeds = torch.randn(1, 24, 72), torch.randn(1, 24)
    copies = [each.clone() for each in embeds]
    options = {"prompt_embeds": embeds[0], "pooled_prompt_embeds": embeds[1], "num_inference_steps": 2}

    def edit(pipe, step, timestep, tensors):
        pipe._guidance_scale = 2.0
        for tensor in tensors.values():
            tensor.zero_()
        return tensors

    before = ours(**options, output_type="pt").images
    ours(**options, callback_on_step_end=edit, callback_on_step_end_tensor_inputs=NAMES["sdxl"])
    assert torch.equal(ours(**options, output_type="pt").images, before)
    assert all(map(torch.equal, embeds, copies))


def test_a_callback_is_given_what_diffusers_gives(text_pipes):
    """The tensors have the same names, shapes and values as in diffusers, and the same order of the two halves."""
    theirs, ours = text_pipes("sdxl")
    seen = []

    def note(pipe, step, timestep, tensors):
        seen.append((pipe.num_timesteps, step, float(timestep), {k: v.detach().clone() for k, v in tensors.items()}))
        return tensors

    for pipe in (theirs, ours):
        draw(pipe, note, NAMES["sdxl"][1:], prompt=["a cat", "riding"], num_images_per_prompt=2)
    for (*wanted, expected), (*found, tensors) in zip(seen[:3], seen[3:], strict=True):
        assert wanted == found and list(expected) == list(tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_callback_asks_the_pipeline_whether_it_is_guided(scale, text_pipes):
    seen = []

    def note(pipe, step, timestep, tensors):
        seen.append((pipe.do_classifier_free_guidance, pipe.guidance_scale, pipe.interrupt))
        return tensors

    for pipe in text_pipes("sd1"):
        draw(pipe, note, guidance_scale=scale, num_inference_steps=1)
    theirs, ours = seen
    assert theirs == ours == (scale > 1, scale, False)


RETURNS = {
    "nothing": (None, "it returned None; return a dictionary of tensors"),
    "no-tensor": ({"latents": 3}, "latents: 3 is not a tensor"),
    "another-size": ({"latents": torch.zeros(1, 4, 9, 8)}, r"latents has shape \(1, 4, 9, 8\); return it with"),
    "another-count": ({"latents": torch.zeros(2, 4, 8, 8)}, r"latents has shape \(2, 4, 8, 8\); return it with"),
    "another-length": ({"prompt_embeds": torch.zeros(2, 9, 32)}, r"prompt_embeds has shape \(2, 9, 32\)"),
    "too-many-prompts": ({"prompt_embeds": torch.zeros(3, 24, 32)}, "prompt_embeds has shape"),
    "no-numbers": ({"prompt_embeds": torch.zeros(2, 24, 32, dtype=torch.complex64)}, "prompt_embeds: it is"),
}


@pytest.mark.parametrize("case", RETURNS)
def test_a_bad_return_is_one_line(case, text_pipes):
    returned, line = RETURNS[case]
    with pytest.raises(InputError, match=f"^callback_on_step_end: {line}") as error:
        text_pipes("sd1")[1]("a cat", callback_on_step_end=lambda *args: returned)
    assert "\n" not in str(error.value)


def test_a_bad_scale_is_one_line(text_pipes):
    def spoil(pipe, *others):
        pipe._guidance_scale = "high"
        return {}

    with pytest.raises(InputError, match=r"^callback_on_step_end: _guidance_scale: 'high' is not a"):
        text_pipes("sd1")[1]("a cat", callback_on_step_end=spoil)


def test_an_interruption_is_refused(text_pipes):
    """A run cannot be interrupted by a callback. Breaking out of the loop over `stream` ends it."""

    def interrupt(pipe, *others):
        pipe._interrupt = True
        return {}

    with pytest.raises(InputError, match=r"^callback_on_step_end: _interrupt is not supported; use stream"):
        text_pipes("sd1")[1]("a cat", callback_on_step_end=interrupt)


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("sd1", {"callback_on_step_end": 3}, "callback_on_step_end: 3 is not callable"),
        ("sd1", {"callback_on_step_end_tensor_inputs": "latents"}, "tensor_inputs: 'latents' is not one of latents, "),
        ("sd1", {"callback_on_step_end_tensor_inputs": ["add_time_ids"]}, "'add_time_ids' is not one of latents, prom"),
        ("sd1", {"callback_on_step_end_tensor_inputs": ["negative_prompt_embeds"]}, "'negative_prompt_embeds' is not"),
        ("sdxl", {"callback_on_step_end_tensor_inputs": [None]}, "None is not one of latents, .*, add_time_ids; give"),
        ("sdxl", {"callback_on_step_end": SDXLControlnetCFGCutoffCallback()}, "'image' is not one of latents"),
    ],
    ids=["no-function", "no-list", "of-sdxl", "negative", "no-name", "of-a-controlnet"],
)
def test_a_bad_callback_is_one_line(kind, options, line, text_pipes):
    with pytest.raises(InputError, match=line):
        text_pipes(kind)[1].stream("a cat", **options)
