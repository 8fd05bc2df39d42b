"""What a model folder's JSON files say, as frozen dataclasses. A model option we do not know is an error, never ignored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from fastdiff.errors import InputError

Config = TypeVar("Config")


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in `path`; InputError where there is no such file or it holds anything else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; a model folder in diffusers' layout has it") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON ({error}); save the model again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a JSON object; save the model again")
    return content


def from_mapping(cls: type[Config], mapping: Mapping[str, Any], source: str) -> Config:
    """Build the dataclass `cls` from a config; keys that start with _ are diffusers' bookkeeping.

    Lists become tuples. Raises InputError naming every key that `cls` does not have.
    """
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}
    values = {key: value for key, value in values.items() if not key.startswith("_")}
    known = {field.name for field in fields(cls)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise InputError(f"{source}: unknown option {', '.join(unknown)}; {cls.__name__} has {', '.join(sorted(known))}")
    return cls(**values)


@dataclass(frozen=True)
class UNet2DConfig:
    """The options of diffusers' UNet2DModel, by the same names and with the same defaults."""

    sample_size: int | tuple[int, int] | None = None  # height and width, pixels; the default size to draw
    in_channels: int = 3
    out_channels: int = 3
    center_input_sample: bool = False  # the input is in [0, 1] and is brought to [-1, 1]
    time_embedding_type: str = "positional"  # positional, fourier, learned
    time_embedding_dim: int | None = None  # None: 4 * block_out_channels[0]
    freq_shift: int = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...] = ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D")
    mid_block_type: str | None = "UNetMidBlock2D"
    up_block_types: tuple[str, ...] = ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    block_out_channels: tuple[int, ...] = (224, 448, 672, 896)
    layers_per_block: int = 2
    mid_block_scale_factor: float = 1
    downsample_padding: int = 1  # 0 pads (0, 1, 0, 1), as DDPM's models were trained
    downsample_type: str = "conv"  # of attention blocks: conv, resnet
    upsample_type: str = "conv"
    dropout: float = 0.0  # training only
    act_fn: str = "silu"  # silu, swish, mish, gelu, relu
    attention_head_dim: int | None = 8  # None: one head as wide as the block
    norm_num_groups: int | None = 32
    attn_norm_num_groups: int | None = None  # of the mid block's attention
    norm_eps: float = 1e-5
    resnet_time_scale_shift: str = "default"  # default, scale_shift
    add_attention: bool = True  # in the mid block
    class_embed_type: str | None = None  # None, timestep, identity
    num_class_embeds: int | None = None  # with class_embed_type None: labels are indices into a table
    num_train_timesteps: int | None = None  # with time_embedding_type learned
