"""The sampling and size controls, for each kind of model."""

from fastdiff.ui.parts.controls import SamplingControls, SizeControls, can_guide
from fastdiff.ui.parts.request import Limits


def test_an_unconditional_model_has_no_guidance(card, catalogue):
    unconditional = card(num_class_embeds=None)
    assert not can_guide(unconditional)
    assert not SamplingControls.properties(catalogue, unconditional, Limits())["guidance_scale"]["visible"]


def test_sampling_follows_the_model_and_a_record(card, catalogue):
    own = card(info={"num_inference_steps": 9, "scheduler": "ddpm"})
    properties = SamplingControls.properties(catalogue, own, Limits(steps=500))
    assert properties["steps"] == {"value": 9}
    assert properties["scheduler"] == {"value": "ddpm"}
    assert not properties["eta"]["visible"]
    record = {"num_inference_steps": 3, "scheduler": "ddim", "eta": 0.5, "guidance_scale": None}
    properties = SamplingControls.properties(catalogue, own, Limits(), record)
    assert properties["steps"]["value"] == 3
    assert properties["eta"] == {"value": 0.5, "visible": True}
    assert properties["guidance_scale"]["value"] == 1.0


def test_only_sizes_that_the_model_can_draw(card):
    properties = SizeControls.properties(
        card(sample_size=[32, 48], block_out_channels=[64, 64, 128, 128]), Limits(side=100)
    )
    assert {key: properties["width"][key] for key in ("minimum", "maximum", "step", "value")} == {
        "minimum": 8,
        "maximum": 96,
        "step": 8,
        "value": 48,
    }
    assert properties["height"]["value"] == 32


def test_a_model_without_a_size_gets_one(card):
    assert SizeControls.properties(card(sample_size=None), Limits())["width"]["value"] == 64
