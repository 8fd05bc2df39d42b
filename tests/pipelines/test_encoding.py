"""Prompts on their way to the text encoders: the warnings of ends that are cut."""

import pytest

from fastdiff.pipelines import Pipeline

LONG = "the photo of the cat riding the photo of the astronaut riding the photo of the cat of the ocean of the cat"
CUT = "longer than the 24 tokens that the model reads; cut: "


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_each_end_that_is_cut_is_logged_once_by_its_name(text_folder, caplog, kind):
    pipe = Pipeline.from_pretrained(text_folder(kind), device="cpu")
    caplog.clear()  # of what saving the folder logs
    options = {"num_inference_steps": 1, "output_type": "latent"}
    pipe([LONG, "a cat", LONG], negative_prompt=f"bad {LONG}", **options)
    assert caplog.messages == [f"prompt: {CUT}'an of the cat'", f"negative prompt: {CUT}'ocean of the cat'"]
    caplog.clear()
    pipe("a cat", negative_prompt=f"bad {LONG}", guidance_scale=1, **options)
    assert not caplog.messages, "a negative prompt without effect is not encoded"
