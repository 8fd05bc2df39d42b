"""Each text is encoded once across calls; whatever changes its encoding is seen; entries are bounded."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fastdiff import Pipeline
from fastdiff.pipelines.remembering import Encoded, Remembered
from tests.adapters.formats import in_diffusers, random_loras
from tests.support.text_pipelines import CLIP, text_pipeline, tiny_encoder

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)  # the card is only named
STEPS = {"num_inference_steps": 2, "output_type": "latent", "seed": 3}
PROMPT = "a photo of the (cat:1.5)"
LONG = "a cat, " * 20

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loras():
    """Return two LoRAs of the text encoder alone."""
    pipe = text_pipeline("sd1")
    pipe.unet = nn.Identity()
    return [in_diffusers(random_loras(pipe, 4, i)) for i in (1, 2)]


@pytest.fixture
def load(text_folder):
    return lambda kind="sd1": Pipeline.from_pretrained(text_folder(kind), device="cpu")


@pytest.fixture
def pipe(load):
    return load()


@pytest.fixture
def made(monkeypatch):
    """Return a list that gets the texts of each encoding."""
    made = []

    def watch(pipe):
        for name in ("_encode", "_encode_weighted"):
            encode = getattr(pipe.encoders, name)
            monkeypatch.setattr(
                pipe.encoders, name, lambda texts, *rest, encode=encode: made.append(texts[0]) or encode(texts, *rest)
            )
        return made

    return watch


def draw(pipe, prompt=PROMPT, **options):
    return pipe(prompt, **STEPS | options).images


def drawn_anew(pipe, **options):
    pipe.encoders.forget()
    return draw(pipe, **options)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_each_text_is_encoded_once_across_calls_and_methods(load, made, kind):
    pipe = load(kind)
    texts = made(pipe)
    first = draw(pipe, negative_prompt="dog")
    assert texts == [PROMPT, "dog"]
    assert torch.equal(draw(pipe, negative_prompt="dog"), first)
    assert torch.equal(draw(pipe, ["the cat", PROMPT], negative_prompt="dog", seed=[4, 3], batch_size=2)[1], first[0])
    pipe.encode_prompt(PROMPT, negative_prompt="the cat")
    assert texts == [PROMPT, "dog", "the cat"]
    assert torch.equal(drawn_anew(pipe, negative_prompt="dog"), first) and len(texts) == 5


def written(pipe):
    with torch.no_grad():
        next(pipe.text_encoder.parameters()).mul_(1.5)


def replaced(pipe):
    norm = pipe.text_encoder.final_layer_norm
    norm.weight = nn.Parameter(norm.weight * 1.5, requires_grad=False)
    pipe.text_encoder.release_graphs()  # they read the old one


def state_of_another(pipe, **options):
    other = tiny_encoder(CLIP, seed=9)
    pipe_of_other = Pipeline.from_pipe(pipe, text_encoder=other)
    pipe.text_encoder.load_state_dict(pipe_of_other.text_encoder.state_dict(), **options)


def cast_and_back(pipe):
    pipe.text_encoder.to(torch.bfloat16).to(torch.float32)


def with_lora(pipe, loras, weight=1.0):
    pipe.load_lora_weights(loras[0], "ink")
    pipe.set_adapters("ink", weight)


def vectors(seed):
    return {"photo_": torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))}


def with_embedding(pipe, seed=0):
    pipe.unload_textual_inversion()
    pipe.load_textual_inversion(vectors(seed))


def nothing(pipe, *rest):
    pass


WEIGHTED = {"prompt_syntax": "weighted"}
SCALED = {"cross_attention_kwargs": {"scale": 0.5}}
# What is done before the first picture, with the options of its call; and before the second picture
CHANGES = {
    "prompt": (nothing, {}, nothing, {"prompt": "a photo of the cat"}),
    "negative-prompt": (nothing, {}, nothing, {"negative_prompt": "dog"}),
    "clip-skip": (nothing, {}, nothing, {"clip_skip": 1}),
    "syntax": (nothing, {}, nothing, WEIGHTED),
    "emphasis": (nothing, WEIGHTED, nothing, WEIGHTED | {"emphasis": "no-norm"}),
    "chunks": (nothing, WEIGHTED, nothing, WEIGHTED | {"negative_prompt": LONG}),
    "adapter": (nothing, {}, with_lora, {}),
    "weight-of-an-adapter": (with_lora, {}, lambda pipe, _: pipe.set_adapters("ink", 0.3), {}),
    "scale-of-adapters": (with_lora, {}, nothing, SCALED),
    "disabled-adapters": (with_lora, {}, lambda pipe, _: pipe.disable_lora(), {}),
    "fused-and-changed": (
        lambda pipe, loras: (with_lora(pipe, loras), pipe.fuse_lora(["text_encoder"])),
        {},
        lambda pipe, loras: (pipe.unfuse_lora(), pipe.set_adapters("ink", 0.3)),
        {},
    ),
    "another-file": (
        with_lora,
        {},
        lambda pipe, loras: pipe.load_lora_weights(loras[1], "ink", hotswap=True),
        {},
    ),
    "embedding": (nothing, {"prompt": "a photo_"}, lambda pipe, _: with_embedding(pipe), {"prompt": "a photo_"}),
    "another-embedding": (
        lambda pipe, _: with_embedding(pipe),
        {"prompt": "a photo_"},
        lambda pipe, _: with_embedding(pipe, 1),
        {"prompt": "a photo_"},
    ),
    "written": (nothing, {}, lambda pipe, _: written(pipe), {}),
    "replaced": (nothing, {}, lambda pipe, _: replaced(pipe), {}),
    "state": (nothing, {}, lambda pipe, _: state_of_another(pipe), {}),
    "assigned-state": (nothing, {}, lambda pipe, _: state_of_another(pipe, assign=True), {}),
    "cast": (nothing, {}, lambda pipe, _: cast_and_back(pipe), {}),
    "written-below-an-adapter": (with_lora, {}, lambda pipe, _: written(pipe), {}),
    "another-encoder": (nothing, {}, lambda pipe, _: setattr(pipe, "text_encoder", tiny_encoder(CLIP, seed=9)), {}),
}


@pytest.mark.parametrize(("before", "options", "change", "then"), CHANGES.values(), ids=CHANGES)
def test_a_change_draws_another_picture(pipe, loras, before, options, change, then):
    before(pipe, loras) if before is not nothing else None
    first = draw(pipe, **options)
    assert torch.equal(draw(pipe, **options), first)
    change(pipe, loras)
    second = draw(pipe, **then)
    assert not torch.equal(second, first)
    assert torch.equal(drawn_anew(pipe, **then), second)


def test_the_second_text_of_sdxl_counts(load):
    pipe = load("sdxl")
    first, second = draw(pipe), draw(pipe, prompt_2="dog")
    assert not torch.equal(first, second) and torch.equal(drawn_anew(pipe, prompt_2="dog"), second)


def test_states_of_adapters_that_come_back_are_remembered(pipe, loras, made):
    with_lora(pipe, loras)
    texts, scales = made(pipe), (0.5, 1.0, 0.5, 1.0)
    images = [draw(pipe, guidance_scale=1, cross_attention_kwargs={"scale": scale}) for scale in scales]
    assert texts == [PROMPT] * 2
    assert torch.equal(images[0], images[2]) and torch.equal(images[1], images[3])


def test_pipelines_that_share_an_encoder_see_its_changes(pipe, loras):
    other = Pipeline.from_pipe(pipe)
    before = draw(pipe), draw(other)
    with_lora(pipe, loras)
    assert torch.equal(draw(other), draw(pipe)) and not torch.equal(draw(other), before[1])
    written(other)
    assert torch.equal(draw(other), draw(pipe))


def test_pipelines_of_other_encoders_share_nothing(pipe, load):
    other = load()
    other.text_encoder = tiny_encoder(CLIP, seed=9)
    first, second = draw(pipe), draw(other)
    assert not torch.equal(first, second)
    assert torch.equal(draw(pipe), first) and torch.equal(draw(other), second)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_begin_empty(pipe, copied):
    first = draw(pipe)
    alike = copied(pipe.encoders)
    assert not len(alike._remembered) and len(pipe.encoders._remembered)
    with torch.no_grad():
        next(alike.models[0].parameters()).mul_(1.5)
    one, other = alike.encode([PROMPT]).text, pipe.encoders.encode([PROMPT]).text
    assert not torch.equal(one, other) and alike.encode([PROMPT]).text is one
    assert torch.equal(draw(pipe), first)


def test_weights_of_inference_mode_have_no_count_and_nothing_is_remembered(load, made):
    with torch.inference_mode():
        pipe = load()
        first, texts = draw(pipe), made(pipe)
        next(pipe.text_encoder.parameters()).mul_(1.5)
        assert not torch.equal(draw(pipe), first)
    assert texts == [PROMPT, ""] and not len(pipe.encoders._remembered)


def test_callbacks_and_returned_embeddings_are_copies(pipe):
    def spoil(_, step, timestep, given):
        given["prompt_embeds"].zero_()
        return {}

    first = draw(pipe)
    draw(pipe, callback_on_step_end=spoil, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    pipe.encode_prompt(PROMPT)[0].zero_()
    assert torch.equal(draw(pipe), first)


def test_offloaded_encoders_are_remembered(pipe, made):
    first = draw(pipe)
    pipe.offloaded_from(CPU)
    texts = made(pipe)
    assert torch.equal(draw(pipe), first) and torch.equal(draw(pipe), first)
    assert len(texts) <= 2


def entry(size):
    return Encoded(torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))


def test_entries_are_bounded_in_number_and_in_bytes():
    kept = Remembered()
    kept.most_texts, kept.most_bytes = 3, 100
    for key in "abcd":
        kept.add(key, entry(9))
    assert [key for key in "abcd" if kept.find(key, CPU)] == []  # they were added for no device
    for key in "abcd":
        kept.add(key, entry(9))
    assert [key for key in "abcd" if kept.find(key, CPU)] == ["b", "c", "d"] and kept.nbytes == 30
    kept.find("b", CPU)
    kept.add("e", entry(89))
    assert [key for key in "bcde" if kept.find(key, CPU)] == ["b", "e"]  # the latest, up to 100 bytes
    kept.add("f", entry(100))
    assert not len(kept)


def test_another_device_frees_the_entries():
    kept = Remembered()
    kept.find("a", CPU)
    kept.add("a", entry(9))
    assert kept.find("a", CPU) and kept.find("a", CARD) is None and not len(kept)


def test_nothing_is_remembered_on_request(pipe, made):
    first, texts = draw(pipe), made(pipe)
    pipe.encoders.remember(0)
    assert torch.equal(draw(pipe), first) and torch.equal(draw(pipe), first)
    assert texts == [PROMPT, ""] * 2 and not pipe.encoders._remembered.nbytes
