"""UNet2DConditionModel against diffusers' in float32: each option at least once, on tiny models without zeros."""

import pytest
import torch

from tests.parity.text_unets.tiny_model import KEYS, SD, assert_close, compare, inputs
from tests.support.pairwise import each_option, product

CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
}
SDXL = SD | {
    "block_out_channels": (8, 16, 32),
    "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 3),
    "attention_head_dim": (1, 2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 20 + 6 * 8,
    "upcast_attention": None,
}
CASES = {
    "sd15": (SD, {}),
    "sd21": (SD, {"attention_head_dim": (2, 4), "use_linear_projection": True, "upcast_attention": True}),
    "sdxl": (SDXL, {}),
    "heads-do-not-divide": (SD, {"attention_head_dim": 5}),
    "inpainting": (SD, {"in_channels": 9}),
    "transformers-at-every-level": (SD, CROSS),
    "no-transformer-in-the-middle": (SD, {"mid_block_type": "UNetMidBlock2D"}),
    "no-middle": (SD, {"mid_block_type": None}),
    "middle-scale": (SD, {"mid_block_scale_factor": 1.5}),
    "layers-of-each-level": (SD, CROSS | {"layers_per_block": (1, 2)}),
    "depths-of-each-level": (SD, CROSS | {"transformer_layers_per_block": (2, 1)}),
    "depths-of-each-layer": (
        SD,
        CROSS
        | {
            "transformer_layers_per_block": ((1, 2), (2, 1)),
            "reverse_transformer_layers_per_block": ((1, 2, 1), (0, 1, 2)),
        },
    ),
    "depth-0": (SDXL, {"transformer_layers_per_block": (0, 0, 1)}),
    "reversed-depths": (
        SD,
        CROSS | {"transformer_layers_per_block": (1, 2), "reverse_transformer_layers_per_block": (1, 3)},
    ),
    "only-cross-attention": (SD, {"only_cross_attention": True}),
    "only-cross-attention-at-one-level": (SD, CROSS | {"only_cross_attention": (True, False)}),
    "text-width-of-each-level": (SD, {"cross_attention_dim": (24, 24)}),
    "text-projection": (SD, {"encoder_hid_dim": 20}),
    "text-projection-named": (SD, {"encoder_hid_dim": 20, "encoder_hid_dim_type": "text_proj"}),
    "class-table": (SD, {"num_class_embeds": 5}),
    "class-timestep": (SD, {"class_embed_type": "timestep"}),
    "class-identity": (SD, {"class_embed_type": "identity"}),
    "class-projection": (SD, {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 12}),
    "class-simple-projection": (
        SD,
        {"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 12},
    ),
    "class-beside-time": (
        SD,
        {
            "class_embed_type": "simple_projection",
            "projection_class_embeddings_input_dim": 12,
            "class_embeddings_concat": True,
        },
    ),
    "added-text": (SD, {"addition_embed_type": "text", "addition_embed_type_num_heads": 6}),
    "added-text-of-a-projection": (
        SD,
        {"addition_embed_type": "text", "addition_embed_type_num_heads": 5, "encoder_hid_dim": 20},
    ),
    "lcm": (SD, {"time_cond_proj_dim": 10}),
    "fourier": (SD, {"time_embedding_type": "fourier"}),
    "fourier-flipped-and-timestep-class": (
        SD,
        {"time_embedding_type": "fourier", "flip_sin_to_cos": False, "class_embed_type": "timestep"},
    ),
    "time-width": (SD, {"time_embedding_dim": 40}),
    "time-activations": (SD, {"time_embedding_act_fn": "gelu", "timestep_post_act": "mish"}),
    "ldm-time": (SD, {"flip_sin_to_cos": False, "freq_shift": 1, "norm_eps": 1e-6}),
    "scale-shift": (SD, {"resnet_time_scale_shift": "scale_shift"}),
    "downsample-padding-0": (SD, {"downsample_padding": 0}),
    "kernels": (SD, {"conv_in_kernel": 5, "conv_out_kernel": 1}),
    "mish": (SD, {"act_fn": "mish"}),
    "gelu": (SD, {"act_fn": "gelu", "class_embed_type": "timestep"}),
    "centred-input": (SD, {"center_input_sample": True}),
    "no-effect": (
        SD,
        {
            "resnet_out_scale_factor": 2.0,
            "resnet_skip_time_act": True,
            "cross_attention_norm": "layer_norm",
            "mid_block_only_cross_attention": True,
            "dropout": 0.3,
        },
    ),
}


@pytest.mark.parametrize("case", each_option(CASES))
def test_option(case, pair):
    base, changes = CASES[case]
    config = base | changes
    compare(*pair(config), *inputs(config))


SLOW = [(3, 2), (15, 17), (8, 9)]
SIZES = {
    "x".join(map(str, size)): pytest.param(size, marks=pytest.mark.slow if size in SLOW else [])
    for size in [(7, 9), (5, 12), (1, 1), *SLOW]
}


@pytest.mark.parametrize(("padding", "size"), product({"padding-1": 1, "padding-0": 0}, SIZES, together=1))
def test_odd_sizes(size, padding, pair):
    if padding == 0 and min(size) < 4:
        pytest.skip("a padding of 0 leaves nothing")
    config = SDXL | {"downsample_padding": padding}
    compare(*pair(config), *inputs(config, 2, *size))


@pytest.mark.parametrize("timestep", [0, 999, 12.5, 500.25, torch.tensor(12.5), torch.tensor([500])], ids=str)
def test_timestep_forms(timestep, pair):
    """Fractions matter, because Euler's timesteps have them."""
    theirs, ours = pair(SD)
    (sample, _, text), _ = inputs(SD)
    compare(theirs, ours, (sample, timestep, text), {"return_dict": True})
    assert isinstance(ours(sample, timestep, text, return_dict=False), tuple)


def test_a_condition_that_may_be_left_out(pair):
    config = SD | {"time_cond_proj_dim": 10}
    given, _ = inputs(config)
    compare(*pair(config), given, {})


MASK = torch.ones(2, KEYS)
MASK[0, 3:] = MASK[1, 5] = 0


@pytest.mark.parametrize("mask", [MASK, MASK.bool(), MASK.long()], ids=lambda mask: str(mask.dtype))
def test_masked_text(mask, pair):
    given, _ = inputs(SD)
    theirs, ours = pair(SD)
    compare(theirs, ours, given, {"encoder_attention_mask": mask})
    other = ours(*given).sample
    assert not torch.allclose(ours(*given, encoder_attention_mask=mask).sample, other, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [({"mid_block_type": None}, 96), ({"mid_block_type": None, "only_cross_attention": True}, KEYS)],
)
def test_masked_pixels(changes, keys, pair):
    """A mask fits if all first attentions have as many keys as the mask."""
    config = SD | changes
    mask = (torch.arange(2 * keys).view(2, keys) % 3 > 0).float()
    compare(*pair(config), inputs(config)[0], {"attention_mask": mask})


@pytest.mark.parametrize(
    ("size", "config"), product({"even": (8, 12), "odd": (7, 9)}, {"sd": SD, "sdxl": SDXL}, together=1)
)
def test_residuals_of_a_controlnet(config, size, pair):
    theirs, ours = pair(config)
    given, options = inputs(config, 2, *size)
    shapes = ours.config.residual_shapes(*size)
    *down, mid = (torch.randn(2, *shape) for shape in shapes)
    compare(
        theirs, ours, given, options | {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    )


@pytest.mark.parametrize(
    ("size", "case"),
    product(
        {"even": (8, 12), "odd": (7, 9)},
        {"sd": (SD, 2), "sdxl": (SDXL, 3), "sdxl-with-a-middle": (SDXL, 4)},
        together=1,
    ),
)
def test_residuals_of_a_t2i_adapter(case, size, pair):
    config, count = case
    theirs, ours = pair(config)
    given, options = inputs(config, 2, *size)
    levels = ours.config.sizes(*size)
    sizes = [levels[0], levels[1]] if config is SD else [levels[1], levels[1], levels[2], levels[2]][:count]
    widths = (*config["block_out_channels"], config["block_out_channels"][-1])
    inside = [torch.randn(2, width, *each) for width, each in zip(widths, sizes, strict=False)]
    arguments = {"down_intrablock_additional_residuals": inside}
    with torch.no_grad():  # diffusers empties the list
        expected = theirs(*given, **options, down_intrablock_additional_residuals=[*inside]).sample
    found = ours(*given, **options, **arguments).sample
    assert_close(found, expected)
    assert not torch.allclose(found, ours(*given, **options).sample, atol=1e-2)
