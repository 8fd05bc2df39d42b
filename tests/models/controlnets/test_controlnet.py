"""ControlNetModel: errors and construction. tests/parity/control compares it with diffusers."""

import dataclasses
import inspect
import json

import diffusers
import pytest
import torch

from fastdiff import ControlNetModel, InputError, UNet2DModel
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig

TINY = {
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "conditioning_embedding_out_channels": [4, 6, 8],
}
BAD_CONFIGS = {
    "unknown-option": ({"num_heads": 4}, "num_heads"),
    "unknown-block": ({"down_block_types": ["AttnDownBlock2D"] * 2}, "down_block_types: block type 'AttnDownBlock2D'"),
    "no-middle": ({"mid_block_type": None}, "mid_block_type: None"),
    "text-projection": ({"encoder_hid_dim": 8}, "encoder_hid_dim: 8 is not null"),
    "projection-type": ({"encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim_type: 'text_proj' is not null"),
    "simple-projection": ({"class_embed_type": "simple_projection"}, "class_embed_type: 'simple_projection'"),
    "text-and-image": ({"addition_embed_type": "text_image"}, "addition_embed_type: 'text_image'"),
    "channel-order": ({"controlnet_conditioning_channel_order": "grb"}, "controlnet_conditioning_channel_order: 'grb'"),
    "no-embedding": ({"conditioning_embedding_out_channels": None}, "conditioning_embedding_out_channels: None"),
    "lengths-differ": ({"block_out_channels": [8]}, "down_block_types: 2 given for 1 block_out_channels"),
    "heads": ({"num_attention_heads": [2]}, "1 given for 2"),
    "timestep-class": ({"class_embed_type": "timestep", "act_fn": "mish"}, "act_fn: 'mish' beside"),
    "sdxl-without-width": ({"addition_embed_type": "text_time"}, "projection_class_embeddings_input_dim: missing"),
    "groups-do-not-divide": ({"norm_num_groups": 3}, "divisible"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_one_line_that_names_the_option(case):
    options, named = BAD_CONFIGS[case]
    with pytest.raises(InputError) as error:
        ControlNetModel.from_config(TINY | options, source="here/config.json")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_config_defaults_are_diffusers():
    theirs = inspect.signature(diffusers.ControlNetModel.__init__).parameters
    ours = {field.name: field.default for field in dataclasses.fields(ControlNetConfig)}
    assert ours == {name: parameter.default for name, parameter in theirs.items() if name != "self"}


@pytest.fixture(scope="module")
def model():
    return ControlNetModel.from_config(TINY)


PICTURES = torch.zeros(2, 3, 32, 48)
BAD_CALLS = {
    "no-picture": ({"controlnet_cond": None}, "controlnet_cond: None is not a tensor"),
    "picture-of-another-size": ({"controlnet_cond": PICTURES[..., :32]}, r"it must be \(2, 3, 32, 48\)"),
    "grey-picture": ({"controlnet_cond": PICTURES[:, :1]}, "controlnet_cond: its shape"),
    "one-picture-for-two": ({"controlnet_cond": PICTURES[:1]}, "controlnet_cond: its shape"),
    "text-of-another-width": ({"encoder_hidden_states": torch.zeros(2, 5, 8)}, "encoder_hidden_states: its shape"),
    "scale": ({"conditioning_scale": "much"}, "conditioning_scale: 'much' is not a number"),
    "infinite-scale": ({"conditioning_scale": float("inf")}, "conditioning_scale: inf is not a number"),
    "guess": ({"guess_mode": 1}, "guess_mode: 1"),
    "guidance-embedding": ({"timestep_cond": torch.zeros(2, 4)}, "timestep_cond: the model's config has no"),
    "attention-processor": ({"cross_attention_kwargs": {"scale": 0.5}}, "cross_attention_kwargs: "),
    "labels": ({"class_labels": torch.tensor([0, 1])}, "class_labels: this model takes no"),
    "sample-of-other-channels": ({"sample": torch.zeros(2, 9, 8, 12)}, r"sample: expected \(N, 4, H, W\)"),
    "return-dict": ({"return_dict": 1}, "return_dict: 1"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_argument_is_one_line_that_names_it(model, case):
    given = {"sample": torch.zeros(2, 4, 8, 12), "timestep": 1, "encoder_hidden_states": torch.zeros(2, 5, 12)}
    options, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=message) as error:
        model(**given | {"controlnet_cond": PICTURES} | options)
    assert "\n" not in str(error.value)


def test_a_new_one_changes_nothing(model):
    """Its zero convolutions begin as zeros, as diffusers' do."""
    output = model(torch.randn(2, 4, 8, 12), 1, torch.randn(2, 5, 12), torch.rand(2, 3, 32, 48))
    assert not any(each.any() for each in (*output.down_block_res_samples, output.mid_block_res_sample))


def test_only_a_text_unet_becomes_one():
    unet = UNet2DModel(
        block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    with pytest.raises(InputError, match="unet: a ControlNet begins as a text U-Net"):
        ControlNetModel.from_unet(unet)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ControlNetUnionModel", "control_mode.* use a ControlNetModel for each kind of picture"),
        ("UNet2DModel", "describes a UNet2DModel, but ControlNetModel is wanted"),
    ],
)
def test_a_folder_of_another_class_is_refused(name, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(InputError, match=f"{name}.*{message}" if "control_mode" in message else message) as error:
        ControlNetModel.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_half_precision_stays_near_float32(randomise):
    model = randomise(ControlNetModel.from_config(TINY))
    given = torch.randn(2, 4, 8, 12), torch.randn(2, 5, 12), torch.rand(2, 3, 32, 48)
    expected = model(given[0], 3, *given[1:], conditioning_scale=0.7)
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        sample, *rest = (each.to(dtype) for each in given)
        output = model.to(dtype)(sample, 3, *rest, conditioning_scale=0.7)
        for one, other in zip(output.down_block_res_samples, expected.down_block_res_samples, strict=True):
            assert one.dtype == dtype
            assert (one - other).norm() < tolerance * other.norm()
        model.float()
