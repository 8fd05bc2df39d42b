"""TextEncoders: warnings about prompts that are cut, and the cache of encodings."""

import pytest
import torch

from fastdiff.pipelines import Pipeline

LONG = "the photo of the cat riding the photo of the astronaut riding the photo of the cat of the ocean of the cat"
CUT = "longer than the 24 tokens that the model reads; cut: "


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_each_end_that_is_cut_is_logged_once_by_its_name(text_folder, caplog, kind):
    pipe = Pipeline.from_pretrained(text_folder(kind), device="cpu")
    caplog.clear()  # saving the folder logs too
    options = {"num_inference_steps": 1, "output_type": "latent"}
    pipe([LONG, "a cat", LONG], negative_prompt=f"bad {LONG}", **options)
    assert caplog.messages == [f"prompt: {CUT}'an of the cat'", f"negative prompt: {CUT}'ocean of the cat'"]
    caplog.clear()
    pipe("a cat", negative_prompt=f"bad {LONG}", guidance_scale=1, **options)
    assert not caplog.messages, "a negative prompt without effect is not encoded"


def test_the_texts_used_last_are_remembered(text_folder, monkeypatch):
    encoders, made = Pipeline.from_pretrained(text_folder("sdxl"), device="cpu").encoders, []
    encode = encoders._encode
    monkeypatch.setattr(encoders, "_encode", lambda texts, *rest: made.append(texts) or encode(texts, *rest))
    texts = [("a", "a"), ("b", "b"), ("a", "a"), ("c", "c"), ("b", "b")]
    encoders.remember(0)
    expected = [encoders.encode(text).text for text in texts]
    assert made == texts
    made.clear()
    encoders.remember(2)
    assert all(torch.equal(encoders.encode(text).text, each) for text, each in zip(texts, expected, strict=True))
    assert made == [("a", "a"), ("b", "b"), ("c", "c"), ("b", "b")]  # the cache keeps the prompts used last
    encoders.encode(("b", "b"), 1)
    assert len(made) == 5
