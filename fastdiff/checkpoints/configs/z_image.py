"""The config of a ZImageTransformer2DModel. Unknown options are errors, never ignored."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval, Len

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import Place
from fastdiff.errors import InputError
from fastdiff.kinds import Channels, Fraction, Layers, PositiveNumber, Side
from fastdiff.schema import Wanted

AXES = 3  # of positions: the caption and the frame, the row, the column
MOST_TIME_CHANNELS = 256  # of the time embedding that the blocks read; fixed in diffusers
TRAINED_SIZE = (128, 128)  # latents of 1024 x 1024 pixels, which diffusers draws by default
USUAL_SIZE = (32, 32)  # a smaller one for trials

PatchSizes = Annotated[tuple[Side, ...], Len(1, 8)]
AxisLength = Annotated[int, Interval(ge=1, le=2**16)]
NoSigLIP = Annotated[None, Wanted("null: Z-Image-Omni, which reads pictures by SigLIP, is not supported")]


@dataclass(frozen=True)
class ZImageTransformer2DConfig(DenoiserConfig):
    """The config of a ZImageTransformer2DModel, with diffusers' option names and defaults."""

    all_patch_size: PatchSizes = (2,)  # height and width of a patch; a call chooses one
    all_f_patch_size: PatchSizes = (1,)  # frames of a patch, for each of all_patch_size
    in_channels: Channels = 16
    dim: Channels = 3840  # width of a token
    n_layers: Layers = 30  # that read picture and caption in one stream
    n_refiner_layers: Layers = 2  # before them, for each of picture and caption
    n_heads: Channels = 30
    n_kv_heads: Channels = 30  # no effect, as in diffusers
    norm_eps: Fraction = 1e-5  # of the norms of tokens; the norms of heads have 1e-5
    qk_norm: bool = True  # RMSNorm of queries and keys
    cap_feat_dim: Channels = 2560  # width of a caption's token
    siglip_feat_dim: NoSigLIP = None
    rope_theta: PositiveNumber = 256.0
    t_scale: PositiveNumber = 1000.0  # multiplies t before its embedding
    axes_dims: tuple[Channels, Channels, Channels] = (32, 48, 48)  # channels of a head that each axis turns
    axes_lens: tuple[AxisLength, AxisLength, AxisLength] = (1024, 512, 512)  # positions on each axis

    sample_size = None
    class_embed_type = None
    num_class_embeds = None

    def check(self) -> None:
        if len(self.all_patch_size) != len(self.all_f_patch_size):
            raise InputError(
                f"all_f_patch_size: {len(self.all_f_patch_size)} sizes for {len(self.all_patch_size)} of "
                "all_patch_size; give one for each"
            )
        if len({*self.patches}) < len(self.patches):
            raise InputError("all_patch_size: two patches have the same sizes; give each once")
        if self.dim % self.n_heads:
            raise InputError(f"n_heads: {self.n_heads} does not divide dim {self.dim}")
        if any(width % 2 for width in self.axes_dims):
            raise InputError(f"axes_dims: {self.axes_dims}; each must be even, as channels are turned in pairs")
        if sum(self.axes_dims) != self.head_dim:
            raise InputError(f"axes_dims: {self.axes_dims} sum to {sum(self.axes_dims)}, but a head is {self.head_dim}")

    @property
    def patches(self) -> tuple[tuple[int, int], ...]:
        """The (side, frames) of each kind of patch."""
        return tuple(zip(self.all_patch_size, self.all_f_patch_size, strict=True))

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def mlp_dim(self) -> int:
        """The inner width of the MLPs."""
        return int(self.dim / 3 * 8)

    @property
    def time_channels(self) -> int:
        """The width of the time embedding that the blocks read."""
        return min(self.dim, MOST_TIME_CHANNELS)

    @property
    def prediction_channels(self) -> int:
        return self.in_channels

    @property
    def places(self) -> dict[str, Place]:
        side, frames = self.patches[0]
        return {
            "n_layers": Place("layers.", None, self.n_layers),
            "n_refiner_layers": Place("noise_refiner.", None, self.n_refiner_layers),
            "dim": Place("x_pad_token", 1, self.dim),
            "cap_feat_dim": Place("cap_embedder.1.weight", 1, self.cap_feat_dim),
            "in_channels x all_patch_size^2 x all_f_patch_size": Place(
                f"all_x_embedder.{side}-{frames}.weight", 1, side**2 * frames * self.in_channels
            ),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        block = 4 * self.dim**2 + 3 * self.dim * self.mlp_dim
        return {
            "n_layers": self.n_layers * block,
            "n_refiner_layers": 2 * self.n_refiner_layers * block,
            "cap_feat_dim": self.cap_feat_dim * self.dim,
            "in_channels": 2 * sum(side**2 * frames for side, frames in self.patches) * self.in_channels * self.dim,
        }

    @property
    def trained_size(self) -> tuple[int, int]:
        return TRAINED_SIZE

    @property
    def usual_size(self) -> tuple[int, int]:
        return USUAL_SIZE

    @property
    def size_factor(self) -> int:
        return self.all_patch_size[0]

    @property
    def min_size(self) -> int:
        return self.all_patch_size[0]
