"""Weighted prompts in a call: weights by hand, several chunks, prompts that change, and equal bits in any batch."""

import pytest
import torch

from fastdiff import InputError, Pipeline
from tests.support.pairwise import product

STEPS = {"num_inference_steps": 4, "output_type": "latent"}
SD2 = pytest.param("sd2", marks=pytest.mark.slow, id="sd2")
KINDS = pytest.mark.parametrize("kind", ["sd1", SD2, "sdxl"])
LONG = "a cat, " * 20
PROMPTS = ["a cat", "(a:1.4) [cat]", LONG, "[cat:dog:0.5] riding", f"[{LONG}|dog]", "a BREAK (cat:1.2)"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def load(text_folder):
    def load(kind, **options):
        return Pipeline.from_pretrained(text_folder(kind), device="cpu", dtype="float32", **options)

    return load


@pytest.fixture(scope="module")
def refusing(load):
    """Return a pipeline and its picture, for prompts that are refused: each leaves it as it was."""
    pipe = load("sd1")
    return pipe, draw(pipe, "(a:1.4)")


def draw(pipe, prompt, **options):
    return pipe(prompt, **{"prompt_syntax": "weighted"} | STEPS | options).images


def encode(pipe, prompt, **options):
    return pipe.encode_prompt(prompt, do_classifier_free_guidance=False, prompt_syntax="weighted", **options)


@KINDS
def test_a_prompt_without_syntax_is_the_plain_picture(load, kind):
    pipe = load(kind)
    plain = draw(pipe, "a cat", prompt_syntax="plain")
    assert torch.equal(draw(pipe, "a cat"), plain) and torch.equal(draw(pipe, r"[a\: cat:0]".replace(r"\:", "")), plain)
    assert not torch.equal(draw(pipe, "(a:1.4) cat"), plain)
    assert not torch.equal(draw(pipe, "(a:1.4) cat", prompt_syntax="plain"), draw(pipe, "(a:1.4) cat"))


@pytest.mark.parametrize(("kind", "sampler"), product(["sd1", SD2, "sdxl"], ["ddim", "euler-a"], together=1))
def test_a_picture_has_the_bits_that_it_has_alone(load, kind, sampler):
    """Prompts of other lengths and prompts that change are in the batch."""
    pipe = load(kind, scheduler=sampler)
    options = {"negative_prompt": "(dog:0.5)"}
    batch = draw(pipe, PROMPTS, seed=[*range(len(PROMPTS))], batch_size=len(PROMPTS), **options)
    for i, prompt in enumerate(PROMPTS):
        assert torch.equal(batch[i], draw(pipe, prompt, seed=i, **options)[0]), prompt
    back = draw(pipe, PROMPTS[::-1], seed=[*range(len(PROMPTS))][::-1], batch_size=len(PROMPTS), **options)
    assert torch.equal(back, batch.flip(0))


def test_groups_share_the_noise_of_generators(load):
    pipe = load("sd1", scheduler="euler-a")
    several = [torch.Generator().manual_seed(i) for i in range(3)]
    batch = draw(pipe, ["a cat", LONG, "a cat"], generator=several)
    for i, prompt in enumerate(["a cat", LONG, "a cat"]):
        assert torch.equal(batch[i], draw(pipe, prompt, generator=torch.Generator().manual_seed(i))[0])


def test_a_negative_prompt_of_more_chunks_is_one_run(load):
    pipe = load("sd1")
    long, short = (draw(pipe, "a cat", negative_prompt=text) for text in (LONG, "a cat,"))
    assert not torch.equal(long, short)
    batch = draw(pipe, ["a cat", "a cat"], negative_prompt=["a cat,", LONG], seed=[0, 0], batch_size=2)
    assert torch.equal(batch[0], short[0]) and torch.equal(batch[1], long[0])


@KINDS
@pytest.mark.parametrize("emphasis", ["original", "no-norm"])
@pytest.mark.parametrize("skip", [None, 1])
def test_weights_by_hand(load, kind, emphasis, skip):
    """z * w of each encoder, in float32, times mean(z) / mean(z * w) unless without the norm."""
    pipe = load(kind)
    plain = pipe.encode_prompt("a cat", do_classifier_free_guidance=False, clip_skip=skip)
    found = encode(pipe, "a (cat:1.5)", emphasis=emphasis, clip_skip=skip)
    weights = torch.ones(plain[0].shape[1], 1)
    (ids,) = {tuple(words.ids("cat")) for words in pipe.encoders.tokenizers}
    weights[2 : 2 + len(ids)] = 1.5
    expected = []
    for z in plain[0][0].split([model.config.hidden_size for model in pipe.encoders.models], dim=-1):
        weighted = z * weights
        expected.append(weighted * (z.mean() / weighted.mean()) if emphasis == "original" else weighted)
    torch.testing.assert_close(found[0][0], torch.cat(expected, -1), rtol=1e-6, atol=1e-6)
    if kind == "sdxl":
        assert torch.equal(found[2], plain[2]), "the pooled text has no weights"


@pytest.mark.parametrize(("kind", "emphasis"), product(["sd1", "sdxl"], ["original", "no-norm"], together=1))
def test_a_loaded_embedding_has_one_weight_for_all_its_vectors(load, kind, emphasis):
    pipe, generator = load(kind), torch.Generator().manual_seed(0)
    widths = [model.config.hidden_size for model in pipe.encoders.models]
    vectors = [torch.randn(3, width, generator=generator) for width in widths]
    named = dict(zip(("clip_l", "clip_g"), vectors, strict=False)) if len(vectors) > 1 else {"emb_params": vectors[0]}
    before = draw(pipe, "a (<cat-toy>:1.3)", seed=1)
    pipe.load_textual_inversion(named, token="<cat-toy>")
    plain = pipe.encode_prompt("a <cat-toy> riding", do_classifier_free_guidance=False)[0][0]
    found = encode(pipe, "a (<cat-toy>:1.3) riding", emphasis=emphasis)[0][0]
    weights = torch.ones(len(plain), 1)
    weights[2:5] = 1.3  # after the start token and "a"
    expected = []
    for z in plain.split(widths, dim=-1):
        weighted = z * weights
        expected.append(weighted * (z.mean() / weighted.mean()) if emphasis == "original" else weighted)
    torch.testing.assert_close(found, torch.cat(expected, -1), rtol=1e-6, atol=1e-6)
    options = {"emphasis": emphasis, "num_inference_steps": 2}
    alone = draw(pipe, "a (<cat-toy>:1.3)", seed=1, **options)
    batch = draw(pipe, [LONG, "a (<cat-toy>:1.3)"], seed=[0, 1], batch_size=2, **options)
    assert torch.equal(batch[1], alone[0]) and not torch.equal(alone, before)
    assert not torch.equal(alone, draw(pipe, "a <cat-toy>", seed=1, **options))
    pipe.unload_textual_inversion()
    assert torch.equal(draw(pipe, "a (<cat-toy>:1.3)", seed=1), before)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_the_vectors_of_an_embedding_stay_in_one_chunk(load, kind):
    pipe = load(kind)
    widths = [model.config.hidden_size for model in pipe.encoders.models]
    named = dict(zip(("clip_l", "clip_g"), [torch.ones(3, width) for width in widths], strict=False))
    pipe.load_textual_inversion(named if len(widths) > 1 else {"emb_params": named["clip_l"]}, token="<cat-toy>")
    room = pipe.tokenizer.room
    found = encode(pipe, "the " * (room - 2) + "(<cat-toy>:1.3)")[0]
    expected = [encode(pipe, text)[0] for text in ("the " * (room - 2), "(<cat-toy>:1.3)")]
    assert torch.equal(found, torch.cat(expected, dim=1))


@KINDS
def test_chunks_are_encoded_one_by_one(load, kind):
    pipe = load(kind)
    found = encode(pipe, "a BREAK (cat:1.5)")
    first, second = encode(pipe, "a"), encode(pipe, "(cat:1.5)")
    assert torch.equal(found[0], torch.cat([first[0], second[0]], dim=1))
    if kind == "sdxl":
        assert torch.equal(found[2], first[2]) and not torch.equal(found[2], second[2])


def test_both_prompts_have_as_many_chunks(load):
    pipe = load("sd1")
    prompt, negative = pipe.encode_prompt("a BREAK b", prompt_syntax="weighted", negative_prompt="dog")
    dog, empty = encode(pipe, "dog")[0], encode(pipe, "")[0]
    assert prompt.shape == negative.shape and torch.equal(negative, torch.cat([dog, empty], dim=1))


@KINDS
def test_a_prompt_that_changes_is_each_text_for_its_steps(load, kind):
    """A callback that replaces the embeddings draws the same picture."""
    pipe = load(kind)
    pipe.denoiser.use_graphs = False
    seen = []
    project = pipe.denoiser.project
    pipe.denoiser.project = lambda prompt: seen.append(prompt.text) or project(prompt)
    try:
        changing = draw(pipe, "[cat:dog:2]", guidance_scale=1.0)
    finally:
        del pipe.denoiser.project
    cat, dog = (encode(pipe, text)[0] for text in ("cat", "dog"))
    assert [torch.equal(text, dog) for text in seen] == [False, True] and torch.equal(seen[0], cat)
    assert not torch.equal(changing, draw(pipe, "cat", guidance_scale=1.0))
    assert torch.equal(draw(pipe, "[cat:dog:9]", guidance_scale=1.0), draw(pipe, "cat", guidance_scale=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a AND b"}, "prompt: AND combines several prompts"),
        ({"prompt": "a", "negative_prompt": "a AND b"}, "prompt: AND combines several prompts"),
        ({"prompt": "<lora:ink:1>"}, "prompt: <lora:ink>: no adapter of this name is loaded; load one with"),
        ({"prompt": "(" * 10**5}, "prompt: it has 100000 characters"),
        ({"prompt": "(a:1.2.3)"}, "prompt: the weight '1.2.3' is not a number"),
        ({"prompt": "a", "prompt_syntax": "a1111"}, "prompt_syntax: 'a1111'"),
        ({"prompt": "a", "emphasis": "none"}, "emphasis: 'none'"),
        ({"prompt": "BREAK " * 70}, "prompt: it has 70 chunks"),
        ({"prompt": ["a", LONG], "callback_on_step_end": lambda *args: {}}, "callback_on_step_end: a prompt changes"),
        ({"prompt": "[a:b:1]", "callback_on_step_end": lambda *args: {}}, "callback_on_step_end: a prompt changes"),
    ],
)
def test_prompts_that_are_refused(refusing, options, message):
    pipe, before = refusing
    with pytest.raises(InputError, match=message):
        pipe(**{"prompt_syntax": "weighted"} | STEPS | options)
    assert torch.equal(draw(pipe, "(a:1.4)"), before)


def test_encode_prompt_refuses_a_prompt_that_changes(load):
    with pytest.raises(InputError, match="prompt: it changes during a run"):
        encode(load("sd1"), "[a:b:1]")


def test_the_cache_of_encoders_knows_the_weights(load):
    pipe = load("sd1")
    pipe.encoders.remember(8)
    texts = [("(cat:1.5)", "original"), ("(cat:1.5)", "no-norm"), ("cat", "original")]
    found = [encode(pipe, text, emphasis=emphasis)[0] for text, emphasis in texts]
    plain = pipe.encode_prompt("(cat:1.5)", do_classifier_free_guidance=False)[0]
    assert not any(torch.equal(one, other) for one, other in zip([plain, *found], found, strict=False))
