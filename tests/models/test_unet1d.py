"""UNet1DModel: errors, calls and construction. tests/parity compares it with diffusers."""

import inspect
import json
import pickle
from dataclasses import fields

import diffusers
import pytest
import torch

from fastdiff import InputError, UNet1DModel
from fastdiff.checkpoints.configs.unet1d import UNet1DConfig
from fastdiff.checkpoints.weights import diffusers_shapes

POLICY = {  # the config of Hopper, horizon 32, except for the widths
    "_class_name": "UNet1DModel",
    "sample_size": 65536,
    "in_channels": 14,
    "out_channels": 14,
    "extra_in_channels": 0,
    "time_embedding_type": "positional",
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "use_timestep_embedding": True,
    "down_block_types": ["DownResnetBlock1D"] * 3,
    "up_block_types": ["UpResnetBlock1D"] * 2,
    "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock",
    "block_out_channels": [8, 16, 32],
    "act_fn": "mish",
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "downsample_each_block": False,
}
VALUE = POLICY | {
    "up_block_types": [],
    "mid_block_type": "ValueFunctionMidBlock1D",
    "out_block_type": "ValueFunction",
    "downsample_each_block": True,
}
WIDE = {"block_out_channels": [8, 16, 40]}
AUDIO = {
    "down_block_types": ("DownBlock1D", "AttnDownBlock1D", "DownBlock1DNoSkip"),
    "up_block_types": ("UpBlock1D", "AttnUpBlock1D", "UpBlock1DNoSkip"),
    "mid_block_type": ("UNetMidBlock1D",),
}


@pytest.mark.parametrize(("option", "kind"), [(option, kind) for option, kinds in AUDIO.items() for kind in kinds])
def test_audio_blocks_are_refused_by_name(option, kind):
    kinds = kind if option == "mid_block_type" else [*POLICY[option][1:], kind]
    with pytest.raises(InputError, match=f"^here: {option}: {kind} is a block of audio models; fastdiff runs"):
        UNet1DModel.from_config(POLICY | {option: kinds}, source="here")


BAD_CONFIGS = {  # diffusers cannot build or run these, or builds something else
    "unknown-option": (POLICY, {"num_heads": 4}, "num_heads"),
    "unknown-block": (POLICY, {"down_block_types": ["DownBlock2D"] * 3}, "down_block_types: 'DownBlock2D'"),
    "no-mid-block": (POLICY, {"mid_block_type": None}, "mid_block_type: None"),
    "unknown-out-block": (POLICY, {"out_block_type": "OutValueFunctionBlock"}, "out_block_type: 'OutValueFunctionBloc"),
    "no-activation": (POLICY, {"act_fn": None}, "act_fn: diffusers cannot run"),
    "unknown-activation": (POLICY, {"act_fn": "selu"}, "act_fn: 'selu'"),
    "no-timestep-embedding": (POLICY, {"use_timestep_embedding": False}, "use_timestep_embedding: .* give true"),
    "unknown-time-embedding": (POLICY, {"time_embedding_type": "learned"}, "time_embedding_type: 'learned'"),
    "odd-fourier": (POLICY, {"time_embedding_type": "fourier", "time_embedding_dim": 47}, "time_embedding_dim: 47"),
    "lengths-differ": (POLICY, {"block_out_channels": [8, 16]}, "block_out_channels and down_block_types"),
    "no-blocks": (POLICY, {"block_out_channels": [], "down_block_types": []}, "down_block_types: .* list of 1 to 12"),
    "one-up-block": (POLICY, {"up_block_types": ["UpResnetBlock1D"]}, "up_block_types: 1 given for 3 down blocks"),
    "four-up-blocks": (
        POLICY,
        {"up_block_types": ["UpResnetBlock1D"] * 4},
        "up_block_types: 4 given for 3 down blocks",
    ),
    "policy-of-halves": (POLICY, {"downsample_each_block": True}, "downsample_each_block: .* give false"),
    "value-mid-block": (POLICY, {"mid_block_type": "ValueFunctionMidBlock1D"}, "mid_block_type: ValueFunctionMid"),
    "value-out-block": (POLICY, {"out_block_type": "ValueFunction"}, "'ValueFunction' cannot read"),
    "value-with-up-blocks": (VALUE, {"up_block_types": ["UpResnetBlock1D"] * 2}, "up_block_types: .* give none"),
    "value-groups": (VALUE, WIDE, r"block_out_channels\[-1\] / 4: 10 channels are not divisible into the 8"),
    "narrow": (POLICY, {"block_out_channels": [8, 12, 16]}, r"block_out_channels\[1\]: 12 channels"),
    "groups-do-not-divide": (POLICY, {"norm_num_groups": 3}, r"block_out_channels\[0\]: 8 channels .* the 3 groups"),
    "groups-0": (POLICY, {"norm_num_groups": 0}, "norm_num_groups: 0"),
    "no-out-block-14": (POLICY, {"out_block_type": None}, "out_channels: 14 channels are not divisible into the 8"),
    "no-out-block-no-up-blocks": (
        POLICY,
        {
            "out_block_type": None,
            "up_block_types": [],
            "block_out_channels": [8],
            "down_block_types": ["DownResnetBlock1D"],
        },
        "out_block_type: null",
    ),
    "layers-less-than-0": (POLICY, {"layers_per_block": -1}, "layers_per_block: -1"),
    "extra-less-than-0": (POLICY, {"extra_in_channels": -1}, "extra_in_channels: -1"),
    "width-0": (POLICY, {"block_out_channels": [8, 16, 0]}, r"block_out_channels: \[8, 16, 0\]"),
    "size-0": (POLICY, {"sample_size": 0}, "sample_size: 0"),
    "shift-a-word": (POLICY, {"freq_shift": "1"}, "freq_shift: '1'"),
    "up-blocks-null": (POLICY, {"up_block_types": None}, "up_block_types: None is not a list"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_one_line_that_names_the_option(case):
    config, options, named = BAD_CONFIGS[case]
    with pytest.raises(InputError, match=f"^here/config.json: .*{named}") as error:
        UNet1DModel.from_config(config | options, source="here/config.json")
    assert "\n" not in str(error.value)


def test_config_defaults_are_diffusers():
    theirs = inspect.signature(diffusers.UNet1DModel.__init__).parameters
    ours = {field.name: field.default for field in fields(UNet1DConfig)}
    assert ours == {name: parameter.default for name, parameter in theirs.items() if name != "self"}


def test_config_of_another_class_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(POLICY | {"_class_name": "UNet2DModel"}))
    with pytest.raises(InputError, match="describes a UNet2DModel, but UNet1DModel is wanted"):
        UNet1DModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("config", [POLICY, VALUE], ids=["policy", "value"])
def test_keys_and_shapes_are_diffusers(config):
    theirs = {name: tensor.shape for name, tensor in diffusers.UNet1DModel.from_config(config).state_dict().items()}
    assert diffusers_shapes(UNet1DModel.from_config(config)) == theirs


@pytest.fixture(scope="module")
def policy():
    return UNet1DModel.from_config(POLICY)


@pytest.fixture(scope="module")
def value():
    return UNet1DModel.from_config(VALUE)


BAD_SAMPLES = {
    "two-dimensions": (torch.zeros(14, 16), r"sample: expected \(N, 14, L\)"),
    "four-dimensions": (torch.zeros(1, 14, 1, 16), r"sample: expected \(N, 14, L\)"),
    "channels": (torch.zeros(1, 16, 14), r"sample: expected \(N, 14, L\)"),
    "horizon": (torch.zeros(1, 14, 18), "sample: horizon 18: this model takes multiples of 4"),
    "dtype": (torch.zeros(1, 14, 16, dtype=torch.float16), "float16"),
    "grad": (torch.zeros(1, 14, 16, requires_grad=True), "inference only"),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_bad_sample(policy, case):
    sample, message = BAD_SAMPLES[case]
    with pytest.raises(InputError, match=message):
        policy(sample, 0)


def test_a_horizon_that_a_value_function_does_not_fit(value):
    with pytest.raises(InputError, match="horizon 33: this value function takes 1 to 32, as in diffusers"):
        value(torch.zeros(1, 14, 33), 0)
    theirs = diffusers.UNet1DModel.from_config(VALUE)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        theirs(torch.zeros(1, 14, 33), 0)


def test_any_memory_layout_of_the_sample(policy):
    sample = torch.randn(2, 14, 16)
    expected = policy(sample, 5).sample
    assert torch.equal(policy(sample.permute(0, 2, 1).contiguous().permute(0, 2, 1), 5).sample, expected)
    wide = torch.randn(2, 14, 32)
    wide[..., ::2] = sample
    assert torch.equal(policy(wide[..., ::2], 5).sample, expected)


def test_a_tuple_on_demand(policy, value):
    for model, shape in ((policy, (2, 14, 16)), (value, (2, 1))):
        sample = torch.randn(2, 14, 16)
        (output,) = model(sample, 5, return_dict=False)
        assert output.shape == shape
        assert torch.equal(output, model(sample, 5).sample)


def test_a_copy_of_the_model_runs_alone(policy):
    sample = torch.randn(1, 14, 16)
    copied = pickle.loads(pickle.dumps(policy))
    assert torch.equal(copied(sample, 5).sample, policy(sample, 5).sample)
    with torch.no_grad():
        copied.up_blocks[0].upsample.conv.weight.mul_(2)
    assert not torch.equal(copied(sample, 5).sample, policy(sample, 5).sample)


def test_half_precision_stays_near_float32(randomise):
    model = randomise(UNet1DModel.from_config(POLICY))
    sample = torch.randn(1, 14, 16, generator=torch.Generator().manual_seed(0))
    expected = model(sample, 5).sample
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        output = model.to(dtype)(sample.to(dtype), 5).sample
        assert output.dtype == dtype
        assert (output - expected).norm() < tolerance * expected.norm()
        model.float()


def test_filters_are_laid_out_as_kernels_read_them(policy):
    """The channels of a tap are contiguous, so that no call copies a filter."""
    filters = [parameter for parameter in policy.parameters() if parameter.ndim == 3]
    assert all(each[:, :, None].permute(0, 2, 3, 1).is_contiguous() for each in filters)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_filters_are_laid_out_anew_for_another_dtype_or_device():
    """On a GPU the output channels of a float32 filter are contiguous."""
    model = UNet1DModel.from_config(POLICY)

    def all_lie(*order: int) -> bool:
        filters = [parameter[:, :, None] for parameter in model.parameters() if parameter.ndim == 3]
        return all(each.permute(order).is_contiguous() for each in filters)

    model.cuda()
    assert all_lie(2, 3, 1, 0)
    model.bfloat16()
    assert all_lie(0, 2, 3, 1)
    model.float()
    assert all_lie(2, 3, 1, 0)
    model.cpu()
    assert all_lie(0, 2, 3, 1)
