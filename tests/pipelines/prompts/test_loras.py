"""`<lora:name:0.8>` in a weighted prompt: the picture of `set_adapters`, for that call alone."""

import pytest
import torch

from fastdiff import InputError, Pipeline
from tests.adapters.formats import in_diffusers, random_loras
from tests.support.text_pipelines import text_pipeline

STEPS = {"num_inference_steps": 2, "output_type": "latent", "seed": 3, "prompt_syntax": "weighted"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def files():
    live = text_pipeline("sd1")
    return [in_diffusers(random_loras(live, 4, i)) for i in (1, 2)]


def with_adapters(text_folder, files):
    """Return a pipeline with two adapters. The second one is active, with the weight 0.3."""
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    for name, file in zip(("ink", "wash"), files, strict=True):
        pipe.load_lora_weights(file, name)
    pipe.set_adapters("wash", 0.3)
    return pipe


@pytest.fixture
def pipe(text_folder, files):
    return with_adapters(text_folder, files)


@pytest.fixture(scope="module")
def refusing(text_folder, files):
    """Return a pipeline and its picture, for prompts that are refused: each leaves it as it was."""
    pipe = with_adapters(text_folder, files)
    return pipe, draw(pipe)


def draw(pipe, prompt="a cat", **options):
    return pipe(prompt, **STEPS | options).images


def weights_of(pipe):
    return [weight.clone() for model in (pipe.unet, pipe.text_encoder) for weight in model.parameters()]


def drawn_with(pipe, names, weights, prompt="a cat", **options):
    pipe.set_adapters(names, weights)
    image = draw(pipe, prompt, **options)
    pipe.set_adapters("wash", 0.3)
    return image


@pytest.mark.parametrize(
    ("prompt", "weights"),
    [
        ("a <lora:ink:0.8>cat", [0.3, 0.8]),
        ("<lora:ink>a cat", [0.3, 1.0]),
        ("a cat<lora:ink:0>", [0.3, 0.0]),
        ("a cat<lora:wash:0.7>", [0.7, 0.0]),
        ("<lora:wash:-0.5>a <lora:ink:0.8>cat", [-0.5, 0.8]),
        ("<lora:ink:0.8>a <lora:wash:-0.5>cat", [-0.5, 0.8]),
        ("a cat<lora:ink:0.2:0.8>", [0.3, {"text_encoder": 0.2, "unet": 0.8}]),
        ("a cat<lora:ink:unet=0.8:te=0.2>", [0.3, {"text_encoder": 0.2, "unet": 0.8}]),
        ("a cat<lora:ink:unet=0.8>", [0.3, {"text_encoder": 1.0, "unet": 0.8}]),
    ],
)
def test_a_tag_draws_the_picture_of_set_adapters_and_its_own_weights_come_back(pipe, prompt, weights):
    own, before = draw(pipe), weights_of(pipe)
    found = draw(pipe, prompt)
    assert all(map(torch.equal, weights_of(pipe), before))  # also for whoever calls the models alone
    assert torch.equal(draw(pipe), own) and pipe.get_active_adapters() == ["wash"]
    assert torch.equal(found, drawn_with(pipe, ["wash", "ink"], weights))
    assert torch.equal(draw(pipe, prompt), found)


def test_prompts_of_one_call_name_the_same_loras_in_any_order(pipe):
    prompts = ["a cat <lora:ink:0.8><lora:wash:1>", "<lora:wash:1><lora:ink:0.8>(dog:1.3)"]
    batch = draw(pipe, prompts, seed=[3, 4], batch_size=2)
    for i, prompt in enumerate(prompts):
        assert torch.equal(batch[i], draw(pipe, prompt, seed=3 + i)[0])
    for other in ("a dog", "a dog <lora:ink:0.7>", "<lora:wash:0.8>"):
        with pytest.raises(InputError, match="is not the same in all prompts; draw prompts with other LoRAs"):
            draw(pipe, ["a cat <lora:ink:0.8>", other])


def test_the_scale_of_a_call_multiplies_the_weight(pipe):
    options = {"cross_attention_kwargs": {"scale": 0.5}}
    found = draw(pipe, "a cat<lora:ink:0.8>", **options)
    assert torch.equal(found, drawn_with(pipe, ["wash", "ink"], [0.3, 0.8], **options))


def test_encode_prompt_has_the_weight_of_the_text_encoder(pipe):
    options = {"do_classifier_free_guidance": False, "prompt_syntax": "weighted"}
    own = pipe.encode_prompt("a cat", **options)[0]
    found = pipe.encode_prompt("a cat<lora:ink:0.8:0>", **options)[0]
    assert torch.equal(pipe.encode_prompt("a cat", **options)[0], own) and not torch.equal(found, own)
    pipe.set_adapters(["wash", "ink"], [0.3, 0.8])
    assert torch.equal(pipe.encode_prompt("a cat", **options)[0], found)


def test_both_parts_of_an_enlarged_picture_have_it(pipe):
    options = {"upscale": 2, "upscale_strength": 0.5}
    found = draw(pipe, "a cat<lora:ink:0.8>", **options)
    assert torch.equal(found, drawn_with(pipe, ["wash", "ink"], [0.3, 0.8], **options))


def test_runs_side_by_side_and_a_run_that_is_left(pipe):
    prompts = ["a cat", "a cat<lora:ink:0.8>"]
    alone = [draw(pipe, prompt) for prompt in prompts]
    runs = [pipe.stream(prompt, **STEPS) for prompt in prompts]
    for pair in zip(*runs, strict=True):
        last = pair
    assert all(torch.equal(step.images, image) for step, image in zip(last, alone, strict=True))
    left = pipe.stream(prompts[1], **STEPS)
    next(left)
    left.close()
    assert torch.equal(draw(pipe), alone[0])
    weights = pipe.unet.state_dict()
    assert weights.keys() and pipe.unet.merging.of_prompt == {} == pipe.text_encoder.merging.of_prompt


def test_a_plain_prompt_has_the_tag_as_text(pipe):
    options = {"prompt_syntax": "plain"}
    assert not torch.equal(draw(pipe, "a cat<lora:ink:0.8>", **options), draw(pipe, "a cat", **options))
    draw(pipe, "a cat<lora:nowhere>", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "<lora:inc:1>"}, r"<lora:inc>: no adapter of this name is loaded; did you mean ink\?"),
        ({"prompt": "<lora:xyz:1>"}, "<lora:xyz>: no adapter of this name is loaded; use one of ink, wash"),
        ({"prompt": "<lora:ink:x>"}, "<lora:ink>: its weight 'x' is not a number"),
        ({"prompt": "<lora:ink:>"}, "<lora:ink>: its weight '' is not a number"),
        ({"prompt": "<lora:ink:1:1:1>"}, "<lora:ink>: '1' is one too many"),
        ({"prompt": "<lora:ink:1:te=1>"}, "<lora:ink>: 'te=1' is one too many"),
        ({"prompt": "<lora:ink:1><lora:ink:2>"}, "<lora:ink> is there twice"),
        ({"prompt": "<lyco:ink:1>"}, "<lyco:ink>: load the file as a LoRA, and write <lora:ink>"),
        ({"prompt": "<hypernet:ink:1>"}, "<hypernet:ink>: hypernetworks are not supported"),
        ({"prompt": "a", "negative_prompt": "<lora:ink:1>"}, "negative_prompt: <lora:ink> names a LoRA"),
        ({"prompt": "<lora:ink:1e39>"}, "LoRA: its weight times its scale is beyond the range of float32"),
    ],
)
def test_tags_that_are_refused(refusing, options, message):
    pipe, before = refusing
    with pytest.raises((InputError, ValueError), match=message):
        draw(pipe, **options)
    assert torch.equal(draw(pipe), before)


def test_disabled_and_fused_adapters_are_refused(pipe):
    pipe.disable_lora()
    with pytest.raises(InputError, match="<lora:ink>: the adapters are disabled; call enable_lora first"):
        draw(pipe, "<lora:ink>")
    pipe.enable_lora()
    pipe.fuse_lora(adapter_names=["ink"])
    with pytest.raises(InputError, match="<lora:ink>: the adapter is fused; call unfuse_lora first"):
        draw(pipe, "<lora:ink>")
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    with pytest.raises(InputError, match="no adapter of this name is loaded; load one with load_lora_weights first"):
        draw(pipe, "<lora:ink>")
