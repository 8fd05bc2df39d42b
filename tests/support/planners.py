"""Configs of UNet1DModels as diffusers saves them: policies that plan trajectories, and their value functions."""

from typing import Any


def policy(*widths: int, **options: Any) -> dict[str, Any]:
    """Return the config of a policy with 14 channels, as for Hopper. `widths`: the channels of each level."""
    levels = len(widths)
    return {
        "in_channels": 14,
        "out_channels": 14,
        "time_embedding_type": "positional",
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "use_timestep_embedding": True,
        "block_out_channels": widths,
        "down_block_types": ("DownResnetBlock1D",) * levels,
        "up_block_types": ("UpResnetBlock1D",) * (levels - 1),
        "mid_block_type": "MidResTemporalBlock1D",
        "out_block_type": "OutConv1DBlock",
        "act_fn": "mish",
    } | options


def value_function(*widths: int, **options: Any) -> dict[str, Any]:
    """Return the config of a value function for the trajectories of `policy`."""
    of_values = {
        "up_block_types": (),
        "mid_block_type": "ValueFunctionMidBlock1D",
        "out_block_type": "ValueFunction",
        "downsample_each_block": True,
    }
    return policy(*widths) | of_values | options
