"""Z-Image encodes each text once, also across calls, and sees what changes the states of its text encoder."""

import logging

import pytest
import torch

import fastdiff
from fastdiff import InputError, Qwen3Model
from fastdiff.errors import NonFiniteError
from tests.parity.z_image import tiny

PROMPT = "a cat"
CALL = {"height": 16, "width": 24, "num_inference_steps": 2, "guidance_scale": 2.0, "seed": 3, "output_type": "pt"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pipe(folder):
    return fastdiff.Pipeline.from_pretrained(folder, device="cpu")


@pytest.fixture
def runs(monkeypatch):
    """Return a list that gets the number of tokens of each run of the text encoder."""
    found, encode = [], Qwen3Model.penultimate_states
    monkeypatch.setattr(
        Qwen3Model, "penultimate_states", lambda self, ids: found.append(ids.shape[1]) or encode(self, ids)
    )
    return found


def draw(pipe, prompt=PROMPT, **options):
    return pipe(prompt, **CALL | options).images


def test_each_text_is_encoded_once_across_calls(pipe, runs):
    first = draw(pipe)
    assert len(runs) == 2  # the prompt, and the empty negative prompt
    assert torch.equal(draw(pipe), first) and len(runs) == 2
    assert torch.equal(draw(pipe, ["a dog", PROMPT], seed=[5, 3], batch_size=2)[1], first[0])
    assert len(runs) == 3  # "a dog" has as many tokens, and other ones
    draw(pipe, negative_prompt="a dog")
    assert len(runs) == 3
    pipe.encoders.forget()
    assert torch.equal(draw(pipe), first) and len(runs) == 5


def test_nothing_is_remembered_on_request(pipe, runs):
    pipe.encoders.remember(0)
    assert torch.equal(draw(pipe), draw(pipe))
    assert len(runs) == 4


def test_a_prompt_that_is_cut_is_told_each_time(pipe, runs, caplog):
    with caplog.at_level(logging.WARNING):
        images = [draw(pipe, "a cat in the snow", max_sequence_length=most) for most in (20, 20, 22)]
    assert len(caplog.messages) == 3 and torch.equal(images[0], images[1]) and not torch.equal(images[1], images[2])
    assert runs == [20, 19, 22]  # the empty prompt has 19


def written(pipe):
    with torch.no_grad():
        next(pipe.text_encoder.parameters()).mul_(1.5)


def replaced(pipe):
    with torch.random.fork_rng():
        torch.manual_seed(9)
        config = tiny.ENCODER | {"vocab_size": pipe.text_encoder.config.vocab_size}
        pipe.text_encoder = Qwen3Model.from_config(config)


def cast(pipe):
    pipe.text_encoder.to(torch.bfloat16)


@pytest.mark.parametrize("change", [written, replaced, cast])
def test_a_change_of_the_text_encoder_is_seen(pipe, change):
    before = draw(pipe)
    change(pipe)
    after = draw(pipe)
    assert not torch.equal(after, before)
    pipe.encoders.forget()
    assert torch.equal(draw(pipe), after)


def test_states_that_are_not_finite_are_refused(pipe):
    with torch.no_grad():
        pipe.text_encoder.embed_tokens.weight.fill_(torch.inf)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="the text encoder's output is NaN or infinite"):
            draw(pipe)


def test_without_a_text_encoder_nothing_is_encoded(pipe):
    bare = pipe.with_parts(text_encoder=None, tokenizer=None)
    assert bare.encoders is None
    with pytest.raises(InputError, match="prompt: this pipeline has no text encoder"):
        draw(bare)
