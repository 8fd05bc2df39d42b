"""ControlNetModel against diffusers' in float32: each option at least once, on tiny models without zeros."""

import diffusers
import pytest
import torch

from fastdiff import ControlNetModel, UNet2DConditionModel
from fastdiff.checkpoints.weights import diffusers_state
from tests.parity.control.tiny import control_config, control_pair
from tests.parity.test_unet_condition import SDXL
from tests.parity.text_unets.tiny_model import SD, assert_close, compare, inputs
from tests.support.pairwise import each_option

ATTENTIONLESS = {"down_block_types": ("DownBlock2D",) * 2, "mid_block_type": "UNetMidBlock2D"}
CASES = {
    "sd15": (SD, {}),
    "sd21": (SD, {"attention_head_dim": (2, 4), "use_linear_projection": True, "upcast_attention": True}),
    "sdxl": (SDXL, {}),
    "sdxl-small": (SD, ATTENTIONLESS),
    "heads-by-their-own-name": (SD, {"attention_head_dim": 5, "num_attention_heads": (2, 8)}),
    "no-transformer-in-the-middle": (SD, {"mid_block_type": "UNetMidBlock2D"}),
    "depths-of-each-layer": (SDXL, {"transformer_layers_per_block": (1, (1, 2), 3)}),
    "only-cross-attention": (SD, {"only_cross_attention": True}),
    "middle-scale": (SD, {"mid_block_scale_factor": 1.5}),
    "class-table": (SD, {"num_class_embeds": 5}),
    "class-timestep": (SD, {"class_embed_type": "timestep"}),
    "class-identity": (SD, {"class_embed_type": "identity"}),
    "class-projection": (SD, {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 12}),
    "added-text": (SD, {"addition_embed_type": "text", "addition_embed_type_num_heads": 6}),
    "ldm-time": (SD, {"flip_sin_to_cos": False, "freq_shift": 1, "norm_eps": 1e-6}),
    "scale-shift": (SD, {"resnet_time_scale_shift": "scale_shift"}),
    "downsample-padding-0": (SD, {"downsample_padding": 0}),
    "mish": (SD, {"act_fn": "mish"}),
    "other-channels": (SD, {"in_channels": 5, "conditioning_channels": 2}),
    "eight-times-larger-pictures": (SD, {"conditioning_embedding_out_channels": (4, 8, 12, 16)}),
    "pictures-of-the-latents-size": (SD, {"conditioning_embedding_out_channels": (8,)}),
    "bgr": (SD, {"controlnet_conditioning_channel_order": "bgr"}),
    "pooled": (SD, {"global_pool_conditions": True}),
}


def given(config: dict, n: int = 2, height: int = 8, width: int = 12) -> tuple[tuple, dict]:
    """Return the positional and keyword arguments for a ControlNet of `config`."""
    arguments, options = inputs(config, n, height, width)
    scale = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
    pictures = torch.rand(n, config.get("conditioning_channels", 3), scale * height, scale * width)
    return (*arguments, pictures), options


def assert_same_residuals(theirs, ours, arguments, options) -> None:
    with torch.no_grad():
        expected = theirs(*arguments, **options)
    found = ours(*arguments, **options)
    assert len(found.down_block_res_samples) == len(expected.down_block_res_samples)
    pairs = zip(found.down_block_res_samples, expected.down_block_res_samples, strict=True)
    for one, other in (*pairs, (found.mid_block_res_sample, expected.mid_block_res_sample)):
        assert one.shape == other.shape
        assert_close(one, other)


@pytest.mark.parametrize("case", each_option(CASES))
def test_option(case, randomise):
    base, changes = CASES[case]
    config = control_config(base, **changes)
    pair = control_pair(randomise, config)
    assert_same_residuals(*pair, *given(config))
    assert_same_residuals(*pair, given(config)[0], given(config)[1] | {"guess_mode": True, "conditioning_scale": 0.7})


@pytest.mark.parametrize(("size", "timestep"), [((7, 9), 12.5), ((1, 5), torch.tensor([500]))], ids=["7x9", "1x5"])
def test_odd_sizes_and_timesteps(size, timestep, randomise):
    config = control_config(SDXL)
    (sample, _, text, pictures), options = given(config, 2, *size)
    options |= {"conditioning_scale": 1.3}
    pair = control_pair(randomise, config)
    assert_same_residuals(*pair, (sample, timestep, text, pictures), options)
    down, mid = pair[1](sample, timestep, text, pictures, return_dict=False, **options)
    assert isinstance(down, tuple) and mid.shape[2:] == down[-1].shape[2:]


def test_masked_pixels(randomise):
    config = control_config(SD, mid_block_type="UNetMidBlock2D")
    mask = (torch.arange(2 * 96).view(2, 96) % 3 > 0).float()
    assert_same_residuals(*control_pair(randomise, config), given(config)[0], {"attention_mask": mask})


@pytest.mark.parametrize("changes", [{}, {"global_pool_conditions": True}], ids=["plain", "pooled"])
def test_a_unet_reads_the_residuals(changes, randomise, pair):
    """Residuals of diffusers' ControlNet in our U-Net, and ours in diffusers'."""
    config = control_config(SD, **changes)
    arguments, _ = given(config)
    controls, unets = control_pair(randomise, config), pair(SD)
    with torch.no_grad():
        outputs = [control(*arguments, return_dict=False) for control in controls]
    for down, mid in outputs:
        residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        compare(*unets, arguments[:3], residuals)


def test_a_folder_of_diffusers(randomise, tmp_path):
    theirs, ours = control_pair(randomise)
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    arguments, _ = given(control_config(SD))
    for folder in ("theirs", "ours"):
        loaded = ControlNetModel.from_pretrained(tmp_path / folder)
        assert_same_residuals(diffusers.ControlNetModel.from_pretrained(tmp_path / folder), loaded, arguments, {})
        assert dict(loaded.config) == dict(ours.config)


@pytest.mark.parametrize("config", [SD, SDXL], ids=["sd", "sdxl"])
def test_from_unet(config, pair):
    """It has diffusers' config and weights, but for the condition's embedding, which begins at random."""
    theirs, ours = pair(config)
    own = {"conditioning_embedding_out_channels": (8, 12), "controlnet_conditioning_channel_order": "bgr"}
    expected, found = diffusers.ControlNetModel.from_unet(theirs, **own), ControlNetModel.from_unet(ours, **own)
    assert dict(found.config) == {key: value for key, value in expected.config.items() if not key.startswith("_")}
    state = diffusers_state(found)
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key], value) or key.startswith("controlnet_cond_embedding.")
    blank = ControlNetModel.from_unet(ours, load_weights_from_unet=False)
    assert not torch.equal(diffusers_state(blank)["conv_in.weight"], state["conv_in.weight"])
    assert isinstance(ours, UNet2DConditionModel)
