"""The configs of CLIP's encoders of texts and of images. Unknown options are errors, never ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from fastdiff.checkpoints.configs.model import Place, TransformersConfig
from fastdiff.errors import InputError
from fastdiff.kinds import Channels, Fraction, Layers, Pixels, PositiveNumber

TokenId = Annotated[int, Interval(ge=0, le=2**20)]

OLD_END = 2  # eos_token_id in files of transformers before 4.30: the end token is the largest id of the vocabulary


class CLIPConfig(TransformersConfig):
    """The base class of the configs of CLIP's encoders."""

    hidden_size: Channels
    intermediate_size: Channels
    num_hidden_layers: Layers
    num_attention_heads: Channels
    hidden_act: Literal["quick_gelu", "gelu"]
    layer_norm_eps: PositiveNumber

    def check(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"num_attention_heads: {self.num_attention_heads} does not divide hidden_size {self.hidden_size}"
            )


@dataclass(frozen=True)
class CLIPTextConfig(CLIPConfig):
    """The config of a CLIP text encoder, with the option names and defaults of transformers' CLIPTextConfig."""

    KEY_PREFIX: ClassVar[str] = "text_model."  # CLIPTextModel of transformers 5 no longer saves it
    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {
        "model_type": "clip_text_model",
        "output_attentions": False,
        "output_hidden_states": False,
        "return_dict": True,
        "use_attention_mask": False,  # if True, diffusers passes an attention mask
    }

    vocab_size: Annotated[int, Interval(ge=1, le=2**20)] = 49408
    hidden_size: Channels = 512
    intermediate_size: Channels = 2048
    projection_dim: Channels | None = 512  # used by CLIPTextModelWithProjection
    num_hidden_layers: Layers = 12
    num_attention_heads: Channels = 8
    max_position_embeddings: Annotated[int, Interval(ge=1, le=2**16)] = 77
    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: PositiveNumber = 1e-5
    eos_token_id: TokenId = 49407  # pooler_output is this token's; 2 stands for the largest id in the prompt
    # Unused at inference: the tokenizer does the padding; dropout and initialisation are for training
    pad_token_id: TokenId | None = 1
    bos_token_id: TokenId | None = 49406
    attention_dropout: Fraction | None = 0.0
    dropout: Fraction | None = 0.0
    initializer_range: float = 0.02
    initializer_factor: float | None = 1.0

    @property
    def places(self) -> dict[str, Place]:
        layer, tokens = "encoder.layers.", "embeddings.token_embedding.weight"
        return {
            "num_hidden_layers": Place(layer, None, self.num_hidden_layers),
            "vocab_size": Place(tokens, 0, self.vocab_size),
            "hidden_size": Place(tokens, 1, self.hidden_size),
            "intermediate_size": Place(f"{layer}0.mlp.fc1.weight", 0, self.intermediate_size),
            "max_position_embeddings": Place("embeddings.position_embedding.weight", 0, self.max_position_embeddings),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        layers, width = self.num_hidden_layers, self.hidden_size
        return {
            "num_hidden_layers": 4 * layers * width**2,
            "vocab_size": self.vocab_size * width,
            "intermediate_size": 2 * layers * self.intermediate_size * width,
            "max_position_embeddings": self.max_position_embeddings * width,
        }


@dataclass(frozen=True)
class CLIPTextConfigWithProjection(CLIPTextConfig):
    """The config of a CLIP text encoder whose pooled output is projected. Options are as in CLIPTextConfig."""

    def check(self) -> None:
        super().check()
        if self.projection_dim is None:
            raise InputError(
                "projection_dim: null, but this encoder projects its output; give the width of text_embeds"
            )

    @property
    def places(self) -> dict[str, Place]:
        assert self.projection_dim is not None  # guaranteed by check()
        return super().places | {"projection_dim": Place("text_projection.weight", 0, self.projection_dim)}

    @property
    def least_parameters(self) -> dict[str, int]:
        assert self.projection_dim is not None
        return super().least_parameters | {"projection_dim": self.projection_dim * self.hidden_size}


@dataclass(frozen=True)
class CLIPVisionConfig(CLIPConfig):
    """The config of a CLIP image encoder, with the option names and defaults of transformers' CLIPVisionConfig."""

    KEY_PREFIX: ClassVar[str] = "vision_model."
    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {
        "model_type": "clip_vision_model",
        "output_attentions": False,
        "output_hidden_states": False,
        "return_dict": True,
    }

    hidden_size: Channels = 768
    intermediate_size: Channels = 3072
    projection_dim: Channels = 512
    num_hidden_layers: Layers = 12
    num_attention_heads: Channels = 12
    num_channels: Annotated[int, Interval(ge=1, le=2**10)] = 3
    image_size: Pixels = 224
    patch_size: Pixels = 32
    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: PositiveNumber = 1e-5
    # Unused at inference
    attention_dropout: Fraction | None = 0.0
    dropout: Fraction | None = 0.0
    initializer_range: float = 0.02
    initializer_factor: float | None = 1.0

    def check(self) -> None:
        super().check()
        if self.patch_size > self.image_size:
            raise InputError(f"patch_size: {self.patch_size} is more than image_size {self.image_size}")

    @property
    def side(self) -> int:
        """The number of patches in a row."""
        return self.image_size // self.patch_size

    @property
    def places(self) -> dict[str, Place]:
        layer, patches = "encoder.layers.", "embeddings.patch_embedding.weight"
        return {
            "num_hidden_layers": Place(layer, None, self.num_hidden_layers),
            "hidden_size": Place(patches, 0, self.hidden_size),
            "num_channels": Place(patches, 1, self.num_channels),
            "patch_size": Place(patches, 2, self.patch_size),
            "intermediate_size": Place(f"{layer}0.mlp.fc1.weight", 0, self.intermediate_size),
            "image_size": Place("embeddings.position_embedding.weight", 0, self.side**2 + 1),
            "projection_dim": Place("visual_projection.weight", 0, self.projection_dim),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        layers, width = self.num_hidden_layers, self.hidden_size
        return {
            "num_hidden_layers": 4 * layers * width**2,
            "num_channels": self.num_channels * width,
            "patch_size": self.patch_size**2 * width,
            "intermediate_size": 2 * layers * self.intermediate_size * width,
            "image_size": self.side**2 * width,
            "projection_dim": self.projection_dim * width,
        }
