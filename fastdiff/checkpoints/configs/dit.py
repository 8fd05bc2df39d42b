"""The config of a DiTTransformer2DModel. Unknown options are errors, never ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.model import Place
from fastdiff.errors import InputError
from fastdiff.kinds import MAX_CHANNELS, MAX_LABELS, Channels, Fraction, Layers, Side

MLP_ACTIVATIONS = {"gelu-approximate": "gelu_tanh", "gelu": "gelu", "linear-silu": "silu"}  # diffusers' name -> ours


@dataclass(frozen=True)
class DiTTransformer2DConfig(DenoiserConfig):
    """The config of a DiTTransformer2DModel, with diffusers' option names and defaults."""

    num_attention_heads: Channels = 16
    attention_head_dim: Channels = 72  # width of one head; a token has num_attention_heads of them
    in_channels: Channels = 4
    out_channels: Channels | None = None  # type: ignore[assignment]  # None: in_channels; see prediction_channels
    num_layers: Layers = 28
    dropout: Fraction = 0.0  # training only
    norm_num_groups: Channels = 32  # no effect, as in diffusers
    attention_bias: bool = True  # of Q, K and V
    sample_size: Side = 32  # height and width of a training sample, in latents or pixels
    patch_size: Side = 2
    activation_fn: Literal["gelu-approximate", "gelu", "linear-silu"] = "gelu-approximate"
    # Number of labels. The null label is the next index
    num_embeds_ada_norm: Annotated[int, Interval(ge=1, le=MAX_LABELS - 1)] = 1000
    upcast_attention: bool = False
    norm_type: Literal["ada_norm_zero"] = "ada_norm_zero"
    norm_elementwise_affine: bool = False  # of the norm before the MLP
    norm_eps: Fraction = 1e-5  # of the norm before the MLP; the others have 1e-6

    # Further options of Transformer2DModel, diffusers' older name for this class
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

    def check(self) -> None:
        if self.sample_size % self.patch_size:
            raise InputError(f"sample_size: {self.sample_size} is not a multiple of patch_size {self.patch_size}")
        heads = f"attention_head_dim: {self.num_attention_heads} heads make {self.inner_dim} channels"
        if self.inner_dim > MAX_CHANNELS:
            raise InputError(f"{heads}; the most is {MAX_CHANNELS}")
        if self.inner_dim % 4:
            raise InputError(f"{heads}; the position embedding needs a multiple of 4")

    @property
    def inner_dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def prediction_channels(self) -> int:
        """The channels of a prediction. If they are 2 * in_channels, the second half is the learned variance."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def num_class_embeds(self) -> int:
        return self.num_embeds_ada_norm + 1

    @property
    def null_label(self) -> int:
        return self.num_embeds_ada_norm

    @property
    def places(self) -> dict[str, Place]:
        patches, labels = "pos_embed.proj.weight", "norm1.emb.class_embedder.embedding_table.weight"
        return {
            "num_layers": Place("transformer_blocks.", None, self.num_layers),
            "num_attention_heads x attention_head_dim": Place(patches, 0, self.inner_dim),
            "in_channels": Place(patches, 1, self.in_channels),
            "patch_size": Place(patches, 2, self.patch_size),
            "num_embeds_ada_norm (and the null label)": Place(
                f"transformer_blocks.0.{labels}", 0, self.num_class_embeds
            ),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        block = 18 * self.inner_dim**2  # attention 4, modulation 6, MLP 8
        return {
            "num_layers": self.num_layers * block,
            "num_embeds_ada_norm": self.num_layers * self.num_class_embeds * self.inner_dim,
            "in_channels": self.patch_size**2 * self.in_channels * self.inner_dim,
            "out_channels": self.patch_size**2 * self.prediction_channels * self.inner_dim,
        }

    @property
    def size_factor(self) -> int:
        return self.patch_size

    @property
    def min_size(self) -> int:
        return self.patch_size

    def check_size(self, height: int, width: int, scale: int = 1) -> None:
        super().check_size(height, width, scale)
        if height != width:
            raise InputError(f"height {height}, width {width}: this model draws squares; give equal sides")
