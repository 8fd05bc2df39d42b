"""What a model folder's JSON files say, as frozen dataclasses. An unknown model option is an error, never ignored."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

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
    for key, only in getattr(cls, "SWITCHED_OFF", {}).items():
        if values.pop(key, only) != only:
            raise InputError(f"{source}: {key} {mapping[key]!r} is not supported; fastdiff runs {key} {only!r} only")
    known = {field.name for field in fields(cls)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise InputError(
            f"{source}: unknown option {', '.join(unknown)}; {cls.__name__} has {', '.join(sorted(known))}"
        )
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except TypeError as error:
        raise InputError(f"{source}: an option is of the wrong type ({error}); save the model again") from None


def autoencoder_scale(config: Mapping[str, Any], source: str | Path = "vae") -> int:
    """How many pixels of a picture one latent stands for, in height and in width; of diffusers' AutoencoderKL."""
    widths = config.get("block_out_channels")
    if not isinstance(widths, list | tuple) or not widths:
        raise InputError(f"{source}: block_out_channels is {widths!r}, not a list of widths; save the VAE again")
    return 2 ** (len(widths) - 1)


class DenoiserConfig:
    """What is asked of the config of any denoiser. Below are diffusers' options, by their names and defaults."""

    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {}  # options of diffusers' class that we know at one value only
    sample_size: int | tuple[int, int] | None
    in_channels: int
    out_channels: int
    num_class_embeds: int | None  # labels are indices into a table of this size
    class_embed_type: str | None
    null_label: int | None = None  # the index that stands for "no label", where the architecture has one
    size_factor: int  # what height and width must be multiples of
    min_size: int

    @property
    def trained_size(self) -> tuple[int, int] | None:
        """Height and width of what it was trained to denoise, where the config says."""
        size = self.sample_size
        return size if isinstance(size, tuple) or size is None else (size, size)

    @property
    def takes_labels(self) -> bool:
        return self.num_class_embeds is not None or self.class_embed_type is not None

    def check_size(self, height: int, width: int, scale: int = 1) -> None:
        """InputError unless the model can draw height x width pixels; a VAE makes `scale` x `scale` of them of one."""
        factor, least = scale * self.size_factor, scale * self.min_size
        if height < least or width < least or height % factor or width % factor:
            raise InputError(f"height {height}, width {width}: this model draws multiples of {factor}, from {least} on")

    def _check_choices(self, choices: Mapping[str, tuple]) -> None:
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise InputError(f"{name}: {value!r} is not supported; choose from {', '.join(map(str, known))}")


def _check_counts(counts: Mapping[str, Any]) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name}: {value!r} is not a whole number of at least 1")


@dataclass(frozen=True)
class UNet2DConfig(DenoiserConfig):
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
    downsample_type: str | None = "conv"  # of attention blocks: conv (None too), resnet
    upsample_type: str | None = "conv"
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

    def __post_init__(self):
        self._check_choices(_UNET_CHOICES)
        for kinds, known in ((self.down_kinds, _DOWN_BLOCKS), (self.up_kinds, _UP_BLOCKS)):
            for kind in kinds:
                if kind not in known:
                    raise InputError(f"block type {kind!r} is not supported; choose from {', '.join(known)}")
        if not len(self.block_out_channels) == len(self.down_kinds) == len(self.up_kinds) > 0:
            raise InputError(
                "block_out_channels, down_block_types and up_block_types must be of one length, at least 1"
            )
        self._check_numbers()
        self._check_skip_blocks()

    @property
    def activation(self) -> str:
        """The canonical name of `act_fn`."""
        return "silu" if self.act_fn.lower() == "swish" else self.act_fn.lower()

    @property
    def down_kinds(self) -> tuple[str, ...]:
        """The down blocks' types without the prefix that early models carry."""
        return tuple(kind.removeprefix("UNetRes") for kind in self.down_block_types)

    @property
    def up_kinds(self) -> tuple[str, ...]:
        return tuple(kind.removeprefix("UNetRes") for kind in self.up_block_types)

    @property
    def has_k_blocks(self) -> bool:
        return any(kind.startswith("K") for kind in self.down_kinds + self.up_kinds)

    @property
    def size_factor(self) -> int:
        """What height and width must be multiples of, so that the skip connections can join."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def min_size(self) -> int:
        """The least height and width: K blocks reflect the border, for which a pixel is too little."""
        return self.size_factor * (2 if self.has_k_blocks else 1)

    def _check_numbers(self) -> None:
        counts = {
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "layers_per_block": self.layers_per_block,
            **{f"block_out_channels[{i}]": width for i, width in enumerate(self.block_out_channels)},
        }
        _check_counts(counts)
        size = self.sample_size if isinstance(self.sample_size, tuple) else (self.sample_size or 1,) * 2
        if len(size) != 2 or not all(isinstance(side, int) and side >= 1 for side in size):
            raise InputError(f"sample_size: {self.sample_size!r} is neither a number nor a height and a width")
        if self.time_embedding_type == "learned" and self.num_train_timesteps is None:
            raise InputError("num_train_timesteps: time_embedding_type 'learned' needs it")
        skip_only = all("Skip" in kind for kind in self.down_kinds + self.up_kinds)
        if self.norm_num_groups is None and not skip_only:
            raise InputError("norm_num_groups: null works with skip blocks only; give a number")

    def _check_skip_blocks(self) -> None:
        """Skip blocks pass the picture on from one to the next, so nothing else may stand between them and it."""
        down, up = (["Skip" in kind for kind in kinds] for kinds in (self.down_kinds, self.up_kinds))
        if down != sorted(down, reverse=True) or up != sorted(up):
            raise InputError(
                "down_block_types, up_block_types: skip blocks must be the first down and the last up blocks"
            )
        if any(down + up) and (self.in_channels, self.out_channels) != (3, 3):
            raise InputError("in_channels, out_channels: skip blocks work on pictures of 3 channels")


_UNET_CHOICES = {
    "time_embedding_type": ("positional", "fourier", "learned"),
    "downsample_padding": (0, 1),
    "downsample_type": ("conv", "resnet", None),
    "upsample_type": ("conv", "resnet", None),
    "resnet_time_scale_shift": ("default", "scale_shift"),
    "class_embed_type": (None, "timestep", "identity"),
    "activation": ("silu", "mish", "gelu", "relu"),
}
_DOWN_BLOCKS = (
    "DownBlock2D",
    "AttnDownBlock2D",
    "ResnetDownsampleBlock2D",
    "SkipDownBlock2D",
    "AttnSkipDownBlock2D",
    "KDownBlock2D",
)
_UP_BLOCKS = (
    "UpBlock2D",
    "AttnUpBlock2D",
    "ResnetUpsampleBlock2D",
    "SkipUpBlock2D",
    "AttnSkipUpBlock2D",
    "KUpBlock2D",
)


@dataclass(frozen=True)
class DiTTransformer2DConfig(DenoiserConfig):
    """The options of diffusers' DiTTransformer2DModel, by the same names and with the same defaults."""

    num_attention_heads: int = 16
    attention_head_dim: int = 72  # the width of a head; tokens are num_attention_heads of them wide
    in_channels: int = 4
    out_channels: int | None = None  # None: in_channels. Twice as many: the second half is the learned variance
    num_layers: int = 28
    dropout: float = 0.0  # training only
    norm_num_groups: int = 32  # in diffusers without effect too
    attention_bias: bool = True  # of Q, K and V
    sample_size: int = 32  # height and width of what it denoises, latents or pixels
    patch_size: int = 2
    activation_fn: str = "gelu-approximate"  # gelu-approximate, gelu, linear-silu
    num_embeds_ada_norm: int | None = 1000  # labels; the null label is the one after them
    upcast_attention: bool = False
    norm_type: str = "ada_norm_zero"
    norm_elementwise_affine: bool = False  # of the norm before the MLP
    norm_eps: float = 1e-5  # of the norm before the MLP; the others have 1e-6

    # Transformer2DModel, diffusers' older name of the class, has these beside them.
    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {
        "attention_type": "default",
        "caption_channels": None,
        "cross_attention_dim": None,
        "double_self_attention": False,
        "interpolation_scale": None,
        "num_vector_embeds": None,
        "only_cross_attention": False,
        "upcast_attention": False,
        "use_additional_conditions": None,
        "use_linear_projection": False,
    }
    class_embed_type = None

    def __post_init__(self):
        if self.out_channels is None:
            object.__setattr__(self, "out_channels", self.in_channels)
        self._check_choices({"norm_type": ("ada_norm_zero",), "activation_fn": tuple(MLP_ACTIVATIONS)})
        names = "num_attention_heads attention_head_dim in_channels out_channels num_layers sample_size patch_size"
        _check_counts({name: getattr(self, name) for name in (*names.split(), "num_embeds_ada_norm")})
        if self.sample_size % self.patch_size:
            raise InputError(f"sample_size: {self.sample_size} is not a multiple of patch_size {self.patch_size}")
        if self.inner_dim % 4:
            raise InputError(
                f"attention_head_dim: {self.num_attention_heads} heads of it are {self.inner_dim} channels; "
                "the positions need a multiple of 4"
            )

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def num_class_embeds(self) -> int:
        return self.num_embeds_ada_norm + 1

    @property
    def null_label(self) -> int:
        return self.num_embeds_ada_norm

    @property
    def size_factor(self) -> int:
        return self.patch_size

    @property
    def min_size(self) -> int:
        return self.patch_size

    def check_size(self, height: int, width: int, scale: int = 1) -> None:
        super().check_size(height, width, scale)
        if height != width:
            raise InputError(f"height {height}, width {width}: this model draws squares; give the same for both")


MLP_ACTIVATIONS = {"gelu-approximate": "gelu_tanh", "gelu": "gelu", "linear-silu": "silu"}  # diffusers' name -> ours

CONFIGS: dict[str, type[DenoiserConfig]] = {"unet": UNet2DConfig, "transformer": DiTTransformer2DConfig}
