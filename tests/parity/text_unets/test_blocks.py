"""UNet2DConditionModel's blocks outside Stable Diffusion against diffusers' in float32: DeepFloyd IF, Kandinsky, K."""

import pytest
import torch

from tests.parity.text_unets.tiny_model import KEYS, SD, compare, inputs
from tests.support.pairwise import product

SIMPLE = SD | {
    "cross_attention_dim": 32,  # a GroupNorm of the text has 32 groups
    "attention_head_dim": 8,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
}
IF = SIMPLE | {
    "act_fn": "gelu",
    "addition_embed_type": "text",
    "addition_embed_type_num_heads": 4,
    "cross_attention_norm": "group_norm",
    "encoder_hid_dim": 40,
    "encoder_hid_dim_type": "text_proj",
    "mid_block_scale_factor": 1.4142,
    "resnet_out_scale_factor": 1.4142,
    "resnet_skip_time_act": True,
    "resnet_time_scale_shift": "scale_shift",
    "time_embedding_act_fn": "gelu",
}
KANDINSKY = SIMPLE | {"encoder_hid_dim": 20, "resnet_time_scale_shift": "scale_shift"}
UPSCALER = {  # a tiny version of sd-x2-latent-upscaler
    "sample_size": 8,
    "in_channels": 8,
    "out_channels": 5,
    "block_out_channels": (32, 32, 64, 64),
    "attention_head_dim": 8,
    "layers_per_block": 2,
    "cross_attention_dim": 24,
    "norm_num_groups": None,
    "act_fn": "gelu",
    "conv_in_kernel": 1,
    "conv_out_kernel": 1,
    "mid_block_type": None,
    "time_cond_proj_dim": 12,
    "time_embedding_type": "fourier",
    "timestep_post_act": "gelu",
    "down_block_types": ("KDownBlock2D", *["KCrossAttnDownBlock2D"] * 3),
    "up_block_types": (*["KCrossAttnUpBlock2D"] * 3, "KUpBlock2D"),
}
K = {"norm_num_groups": 8, "time_embedding_dim": 48}  # no up block has the width of the time embedding
PLAIN = {"down_block_types": ("AttnDownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 8}


def _k(letters: str) -> tuple[str, ...]:
    """Return K block types: K and X of down blocks without and with text, U and Y of up blocks."""
    names = {"K": "KDownBlock2D", "X": "KCrossAttnDownBlock2D", "U": "KUpBlock2D", "Y": "KCrossAttnUpBlock2D"}
    return tuple(names[letter] for letter in letters)


CASES = {
    "if-1": (IF, {}),
    "if-2": (IF, {"in_channels": 6, "class_embed_type": "timestep"}),
    "head-dims-of-each-level": (SIMPLE, {"attention_head_dim": (8, 4)}),
    "norm-of-the-text": (SIMPLE, {"cross_attention_norm": "layer_norm"}),
    "only-the-text": (SIMPLE, {"only_cross_attention": True}),
    "only-the-text-at-one-level": (SIMPLE, {"only_cross_attention": (False, True)}),
    "only-the-text-in-the-middle": (SIMPLE, {"mid_block_only_cross_attention": True}),
    "all-but-the-middle": (SIMPLE, {"only_cross_attention": True, "mid_block_only_cross_attention": False}),
    "old-names": (SIMPLE, {"down_block_types": ("UNetResDownBlock2D", "SimpleCrossAttnDownBlock2D")}),
    "kandinsky-2.1": (KANDINSKY, {"addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"}),
    "kandinsky-2.2": (KANDINSKY, {"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"}),
    "kandinsky-2.2-controlnet": (
        KANDINSKY,
        {"addition_embed_type": "image_hint", "encoder_hid_dim_type": "image_proj", "in_channels": 8},
    ),
    "image-and-projected-text": (KANDINSKY, {"addition_embed_type": "image"}),
    "image-in-transformers": (SD, {"encoder_hid_dim": 20, "encoder_hid_dim_type": "image_proj"}),
    "text-and-image-in-transformers": (SD, {"encoder_hid_dim": 20, "encoder_hid_dim_type": "text_image_proj"}),
    "two-images": (
        SD,
        {
            "encoder_hid_dim": 24,
            "encoder_hid_dim_type": "text_image_proj",
            "addition_embed_type": "image_hint",
            "in_channels": 7,
        },
    ),
    "upscaler": (UPSCALER, {}),
    "k-of-other-widths": (UPSCALER, K | {"block_out_channels": (32, 64, 64, 96), "down_block_types": _k("KKXK")}),
    "k-without-text-below": (UPSCALER, {"up_block_types": _k("UYYU"), "down_block_types": _k("KXXK")}),
    "k-with-a-middle": (UPSCALER, {"mid_block_type": "UNetMidBlock2DCrossAttn"}),
    "k-with-a-simple-middle": (UPSCALER, {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}),
    "heads-that-do-not-divide": (SD, PLAIN | {"attention_head_dim": (6, 5)}),
}


def size_of(config: dict) -> tuple[int, int]:
    """Return the height and width of a sample: at least 2 pixels at the last level, for K blocks."""
    return (16, 24) if len(config["block_out_channels"]) == 4 else (8, 12)


@pytest.mark.parametrize("case", CASES)
def test_model(case, pair):
    base, changes = CASES[case]
    config = base | changes
    compare(*pair(config), *inputs(config, 2, *size_of(config)))


DOWN = [
    "CrossAttnDownBlock2D",
    "DownBlock2D",
    "AttnDownBlock2D",
    "ResnetDownsampleBlock2D",
    "SimpleCrossAttnDownBlock2D",
]
UP = ["CrossAttnUpBlock2D", "UpBlock2D", "AttnUpBlock2D", "ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"]
MIDDLE = ["UNetMidBlock2DCrossAttn", "UNetMidBlock2DSimpleCrossAttn"]
OPTIONS = {
    "plain": {},
    "raw-time": {"resnet_skip_time_act": True},
    "scale-shift": {"resnet_time_scale_shift": "scale_shift", "resnet_skip_time_act": True},
    "scaled": {"resnet_out_scale_factor": 1.5, "mid_block_scale_factor": 0.5},
    "only-the-text": {"only_cross_attention": True},
    "padding-0": {"downsample_padding": 0},
}


@pytest.mark.parametrize(("down", "up", "middle", "options"), product(DOWN, UP, MIDDLE, OPTIONS))
def test_blocks_together(down, up, middle, options, pair):
    kinds = {"down_block_types": (down, "DownBlock2D"), "up_block_types": (up, "UpBlock2D"), "mid_block_type": middle}
    config = SIMPLE | kinds | options
    compare(*pair(config), *inputs(config))


MASK = torch.ones(2, KEYS)
MASK[0, 3:] = MASK[1, 5] = 0


@pytest.mark.parametrize("name", ["encoder_attention_mask", "attention_mask"])
@pytest.mark.parametrize("config", [SIMPLE, UPSCALER], ids=["simple", "k"])
def test_masked_text(config, name, pair):
    """In SimpleCrossAttn blocks, attention_mask is a mask of the text too, as unCLIP uses it."""
    if config is UPSCALER and name == "attention_mask":
        pytest.skip("it masks pixels in K blocks")
    given, options = inputs(config, 2, *size_of(config))
    theirs, ours = pair(config)
    compare(theirs, ours, given, options | {name: MASK})
    assert not torch.allclose(ours(*given, **options, **{name: MASK}).sample, ours(*given, **options).sample, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (SIMPLE | {"up_block_types": ("UpBlock2D", "ResnetUpsampleBlock2D")}, (7, 9)),
        (SIMPLE | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}, (6, 10)),
    ],
    ids=["any", "even"],
)
def test_sizes(config, size, pair):
    """Blocks that upsample to the size of the skip connection take odd sizes; the others do not."""
    compare(*pair(config), *inputs(config, 2, *size))


def test_the_image_replaces_the_text(pair):
    config = KANDINSKY | {"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"}
    (sample, timestep, _), options = inputs(config)
    compare(*pair(config), (sample, timestep, None), options)
