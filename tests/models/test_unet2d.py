"""UNet2DModel: errors, calls and construction. tests/parity compares it with diffusers."""

import json

import pytest
import torch

from fastdiff import InputError, UNet2DModel
from fastdiff.checkpoints import hub, weights
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.checkpoints.loading import Load
from fastdiff.models import model as models

TINY = {
    "sample_size": 8,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}


def up_down(down: str, up: str) -> dict:
    return {"down_block_types": down.split(), "up_block_types": up.split()}


BAD_CONFIGS = {
    "unknown-option": ({"num_heads": 4}, "num_heads"),
    "two-unknown-options": ({"num_heads": 4, "attn_mode": "x"}, "attn_mode, num_heads"),
    "unknown-block": (up_down("DownBlock2D CrossAttnDownBlock2D", "UpBlock2D UpBlock2D"), "CrossAttnDownBlock2D"),
    "unknown-up-block": (up_down("DownBlock2D DownBlock2D", "UpBlock2D UpDecoderBlock2D"), "UpDecoderBlock2D"),
    "lengths-differ": ({"block_out_channels": [16]}, "block_out_channels"),
    "unknown-activation": ({"act_fn": "selu"}, "act_fn: 'selu'"),
    "unknown-time-embedding": ({"time_embedding_type": "rotary"}, "time_embedding_type: 'rotary'"),
    "unknown-class-embedding": ({"class_embed_type": "projection"}, "class_embed_type: 'projection'"),
    "unknown-time-scale-shift": ({"resnet_time_scale_shift": "spatial"}, "resnet_time_scale_shift: 'spatial'"),
    "learned-time-without-steps": ({"time_embedding_type": "learned"}, "num_train_timesteps"),
    "groups-do-not-divide": ({"norm_num_groups": 7}, "divisible"),
    "no-groups": ({"norm_num_groups": None}, "norm_num_groups"),
    "padding": ({"downsample_padding": 2}, "downsample_padding: 2"),
    "skip-below-others": (up_down("DownBlock2D SkipDownBlock2D", "SkipUpBlock2D UpBlock2D"), "skip blocks"),
    "skip-of-four-channels": (
        up_down("SkipDownBlock2D SkipDownBlock2D", "SkipUpBlock2D SkipUpBlock2D") | {"in_channels": 4},
        "3 channels",
    ),
    "narrow-k-blocks": (up_down("KDownBlock2D KDownBlock2D", "KUpBlock2D KUpBlock2D"), "divisible"),
    "k-block-below-another-width": (
        up_down("DownBlock2D DownBlock2D", "UpBlock2D KUpBlock2D") | {"block_out_channels": [32, 64]},
        "do not fit together",
    ),
    "k-blocks-with-too-few-skips": (
        up_down("KDownBlock2D KDownBlock2D", "UpBlock2D UpBlock2D") | {"block_out_channels": [32, 32]},
        "do not fit together",
    ),
    "layers-not-a-number": ({"layers_per_block": [1, 2]}, "layers_per_block"),
    "size-not-a-number": ({"sample_size": "64"}, "here/config.json: sample_size: '64'"),
    "widths-not-a-list": ({"block_out_channels": 16}, "block_out_channels: 16 is not a list"),
    "width-0": ({"block_out_channels": [16, 0]}, "block_out_channels"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_one_line_that_names_the_option(case):
    options, named = BAD_CONFIGS[case]
    with pytest.raises(InputError) as error:
        UNet2DModel.from_config(TINY | options, source="here/config.json")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_bookkeeping_keys_are_ignored():
    config = TINY | {"_class_name": "UNet2DModel", "_diffusers_version": "0.1", "_name_or_path": "x"}
    assert UNet2DModel.from_config(config).config == UNet2DModel.from_config(TINY).config


def test_config_of_another_class_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(InputError, match="UNet2DConditionModel"):
        UNet2DModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_are_prepared_before_weights_are_read(monkeypatch, device):
    """On a GPU this happens in the background. The CPU has no kernels to prepare."""
    events = []

    def load_state_dict(*_):
        events.append("weights")
        raise InputError("enough")

    monkeypatch.setattr(weights, "load_state_dict", load_state_dict)
    monkeypatch.setattr(models, "get_ready", lambda: events.append("kernels"))
    with pytest.raises(InputError, match="enough"):
        UNet2DModel.from_folder(hub.resolve("emoji64") / "unet", Load(torch.device(device), torch.bfloat16))
    assert events == ["kernels", "weights"][device == "cpu" :]


@pytest.fixture(scope="module")
def model():
    return UNet2DModel.from_config(TINY)


BAD_SAMPLES = {
    "three-dimensions": (torch.zeros(3, 8, 8), r"sample: expected \(N, 3, H, W\)"),
    "channels": (torch.zeros(1, 4, 8, 8), r"sample: expected \(N, 3, H, W\)"),
    "odd-height": (torch.zeros(1, 3, 7, 8), "multiples of 2"),
    "odd-width": (torch.zeros(1, 3, 8, 9), "multiples of 2"),
    "dtype": (torch.zeros(1, 3, 8, 8, dtype=torch.float16), "float16"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_bad_sample(model, case):
    sample, message = BAD_SAMPLES[case]
    with pytest.raises(InputError, match=message):
        model(sample, 0)


def test_labels_for_an_unconditional_model(model):
    with pytest.raises(InputError, match="unconditional"):
        model(torch.zeros(1, 3, 8, 8), 0, class_labels=torch.tensor([1]))


def test_labels_missing():
    model = UNet2DModel.from_config(TINY | {"num_class_embeds": 3})
    with pytest.raises(InputError, match="needs class_labels"):
        model(torch.zeros(1, 3, 8, 8), 0)


def test_grad_is_refused(model):
    with pytest.raises(InputError, match="inference only"):
        model(torch.zeros(1, 3, 8, 8, requires_grad=True), 0)


def test_later_call_leaves_an_earlier_sample_alone(model):
    first = model(torch.randn(1, 3, 8, 8), 5).sample
    kept = first.clone()
    model(torch.randn(1, 3, 8, 8), 5)
    assert torch.equal(first, kept)


def test_any_memory_layout_of_the_sample(model):
    sample = torch.randn(2, 3, 8, 12)
    expected = model(sample, 5).sample
    wide = torch.randn(2, 3, 8, 24)
    wide[..., ::2] = sample
    assert torch.equal(model(sample.to(memory_format=torch.channels_last), 5).sample, expected)
    assert torch.equal(model(wide[..., ::2], 5).sample, expected)


def test_half_precision_stays_near_float32(randomise):
    model = randomise(UNet2DModel.from_config(TINY))
    sample = torch.randn(1, 3, 8, 8)
    expected = model(sample, 5).sample
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        output = model.to(dtype)(sample.to(dtype), 5).sample
        assert output.dtype == dtype
        assert (output - expected).norm() < tolerance * expected.norm()
        model.float()


def test_config_defaults_are_diffusers():
    import inspect

    import diffusers

    theirs = inspect.signature(diffusers.UNet2DModel.__init__).parameters
    ours = {name: field.default for name, field in UNet2DConfig.__dataclass_fields__.items()}
    assert ours == {name: parameter.default for name, parameter in theirs.items() if name != "self"}


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        pytest.param(torch.tensor([1.0]), "it is torch.float32; give a tensor of int64, int32", id="fraction"),
        pytest.param(torch.tensor([10]), "10 is out of range; use 0 to 9", id="beyond the table"),
    ],
)
def test_labels_that_are_embedded_in_the_table_of_timesteps(labels, problem):
    learned = {"time_embedding_type": "learned", "num_train_timesteps": 10, "class_embed_type": "timestep"}
    model = UNet2DModel.from_config(TINY | learned)
    sample = torch.zeros(1, 3, 8, 8)
    assert model(sample, 1, class_labels=torch.tensor([9])).sample.shape == sample.shape
    with pytest.raises(InputError, match=f"class_labels: {problem}"):
        model(sample, 1, class_labels=labels)
