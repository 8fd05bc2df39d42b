"""DiTTransformer2DModel: errors, calls and construction. tests/parity compares it with diffusers."""

import inspect
import json
from dataclasses import fields

import diffusers
import pytest
import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed

from fastdiff import DiTTransformer2DModel, InputError
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.weights import diffusers_shapes
from fastdiff.models.blocks.conditioning import GROUP
from fastdiff.models.dit import positions

TINY = {
    "sample_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 5,
}
XL_2 = {  # facebook/DiT-XL-2-256, from its config.json
    "_class_name": "Transformer2DModel",
    "_diffusers_version": "0.12.0.dev0",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": 72,
    "cross_attention_dim": None,
    "dropout": 0.0,
    "in_channels": 4,
    "norm_elementwise_affine": False,
    "norm_num_groups": 32,
    "norm_type": "ada_norm_zero",
    "num_attention_heads": 16,
    "num_embeds_ada_norm": 1000,
    "num_layers": 28,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "out_channels": 8,
    "patch_size": 2,
    "sample_size": 32,
    "upcast_attention": False,
    "use_linear_projection": False,
}
BAD_CONFIGS = {
    "unknown-option": ({"num_heads": 4}, "num_heads"),
    "cross-attention": ({"cross_attention_dim": 1152}, "cross_attention_dim 1152"),
    "only-cross-attention": ({"only_cross_attention": True}, "only_cross_attention True"),
    "double-self-attention": ({"double_self_attention": True}, "double_self_attention True"),
    "vector-quantised": ({"num_vector_embeds": 100}, "num_vector_embeds 100"),
    "captions": ({"caption_channels": 4096}, "caption_channels 4096"),
    "ada-norm-single": ({"norm_type": "ada_norm_single"}, "norm_type: 'ada_norm_single'"),
    "ada-norm": ({"norm_type": "ada_norm"}, "norm_type: 'ada_norm'"),
    "layer-norm": ({"norm_type": "layer_norm"}, "norm_type: 'layer_norm'"),
    "upcast-attention": ({"upcast_attention": True}, "upcast_attention True"),
    "geglu": ({"activation_fn": "geglu"}, "activation_fn: 'geglu'"),
    "no-labels": ({"num_embeds_ada_norm": None}, "num_embeds_ada_norm: None"),
    "no-layers": ({"num_layers": 0}, "num_layers: 0"),
    "no-patches": ({"patch_size": None}, "patch_size: None"),
    "size-not-a-number": ({"sample_size": "8"}, "sample_size: '8'"),
    "patch-does-not-divide": ({"patch_size": 3}, "sample_size: 8 is not a multiple of patch_size 3"),
    "width-without-positions": ({"attention_head_dim": 3}, "attention_head_dim"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_one_line_that_names_the_option(case):
    options, named = BAD_CONFIGS[case]
    with pytest.raises(InputError) as error:
        DiTTransformer2DModel.from_config(TINY | options, source="here/config.json")
    assert str(error.value).startswith("here/config.json: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_config_of_another_class_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "PixArtTransformer2DModel"}))
    with pytest.raises(InputError, match="PixArtTransformer2DModel"):
        DiTTransformer2DModel.from_pretrained(tmp_path)


def test_config_defaults_are_diffusers():
    theirs = inspect.signature(diffusers.DiTTransformer2DModel.__init__).parameters
    ours = {field.name: field.default for field in fields(DiTTransformer2DConfig)}
    assert ours == {name: parameter.default for name, parameter in theirs.items() if name != "self"}


def test_a_real_config_has_the_keys_and_shapes_of_diffusers():
    with torch.device("meta"):
        ours = DiTTransformer2DModel.from_config(XL_2)
        theirs = diffusers.DiTTransformer2DModel.from_config({**XL_2, "_class_name": "DiTTransformer2DModel"})
    assert diffusers_shapes(ours) == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert sum(parameter.numel() for parameter in ours.parameters()) == 749_826_464
    assert ours.conditioning_width == 28 * 6 * 1152 + 2 * 1152


@pytest.fixture(scope="module")
def model():
    return DiTTransformer2DModel.from_config(TINY)


LABELS = torch.tensor([0])
BAD_CALLS = {
    "three-dimensions": ((torch.zeros(4, 8, 8), 0, LABELS), r"sample: expected \(N, 4, H, W\)"),
    "channels": ((torch.zeros(1, 3, 8, 8), 0, LABELS), r"sample: expected \(N, 4, H, W\)"),
    "no-whole-patches": ((torch.zeros(1, 4, 9, 9), 0, LABELS), "multiples of 2"),
    "not-square": ((torch.zeros(1, 4, 8, 2), 0, LABELS), "height 8, width 2: this model draws squares"),
    "dtype": ((torch.zeros(1, 4, 8, 8, dtype=torch.float16), 0, LABELS), "float16"),
    "grad": ((torch.zeros(1, 4, 8, 8, requires_grad=True), 0, LABELS), "inference only"),
    "no-labels": ((torch.zeros(1, 4, 8, 8), 0), "needs class_labels"),
    "too-many-labels": ((torch.zeros(1, 4, 8, 8), 0, LABELS.expand(2)), "2 given for 1 pictures"),
    "processor": ((torch.zeros(1, 4, 8, 8), 0, LABELS, {"scale": 0.5}), "cross_attention_kwargs"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(model, case):
    arguments, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=message):
        model(*arguments)


def test_signature_is_diffusers(model):
    theirs = inspect.signature(diffusers.DiTTransformer2DModel.forward).parameters
    assert list(inspect.signature(type(model).forward).parameters) == list(theirs)


def test_any_memory_layout_of_the_sample(model):
    sample = torch.randn(2, 4, 8, 8)
    expected = model(sample, 5, LABELS.expand(2)).sample
    wide = torch.randn(2, 4, 8, 16)
    wide[..., ::2] = sample
    assert torch.equal(model(sample.to(memory_format=torch.channels_last), 5, LABELS.expand(2)).sample, expected)
    assert torch.equal(model(wide[..., ::2], 5, LABELS.expand(2)).sample, expected)


def test_one_label_for_all(model):
    sample = torch.randn(35, 4, 8, 8)
    assert torch.equal(model(sample, 5, torch.tensor([3])).sample, model(sample, 5, torch.full((35,), 3)).sample)


def test_a_number_is_a_timestep_for_all(model):
    sample, labels = torch.randn(2, 4, 8, 8), torch.tensor([1, 2])
    expected = model(sample, torch.tensor([12, 12]), labels, return_dict=False)[0]
    for timestep in (12, 12.5, torch.tensor(12), torch.tensor([12])):
        assert torch.equal(model(sample, timestep, labels).sample, expected)


def test_half_precision_stays_near_float32(randomise):
    model = randomise(DiTTransformer2DModel.from_config(TINY))
    sample = torch.randn(1, 4, 8, 8)
    expected = model(sample, 5, LABELS).sample
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        output = model.to(dtype)(sample.to(dtype), 5, LABELS).sample
        assert output.dtype == dtype
        assert (output - expected).norm() < tolerance * expected.norm()
        model.float()


def test_the_conditioning_of_an_entry_is_its_own(model):
    """A timestep's bits do not depend on the number of others or its place in a group: a table relies on it."""
    timesteps, labels = torch.arange(0, 1000, 25), torch.arange(40) % 6
    table = model.conditioning(timesteps, labels)
    assert table.temb.shape == (40, model.conditioning_width)
    for places in (slice(0, 3), slice(0, GROUP), slice(GROUP, 40)):
        assert torch.equal(model.conditioning(timesteps[places], labels[places]).temb, table.temb[places])


def test_positions_are_computed_once_for_a_size(model):
    model(torch.zeros(1, 4, 8, 8), 0, LABELS)
    before = dict(model.pos_embed._positions)
    model(torch.zeros(1, 4, 8, 8), 3, LABELS)
    assert model.pos_embed._positions == before


@pytest.mark.parametrize("side", [1, 4, 7])
def test_positions(side):
    theirs = get_2d_sincos_pos_embed(24, side, base_size=4, output_type="pt").float()
    torch.testing.assert_close(positions(side, 4, 24), theirs, rtol=0, atol=1e-6)
