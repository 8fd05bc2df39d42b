"""The config of Qwen3, a language model that encodes prompts. Unknown options are errors, never ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from fastdiff.arguments import mapping as checked_mapping
from fastdiff.arguments import shown
from fastdiff.checkpoints.configs.model import Place, TransformersConfig
from fastdiff.errors import InputError
from fastdiff.kinds import Channels, Fraction, Layers, PositiveNumber
from fastdiff.schema import checked

TokenId = Annotated[int, Interval(ge=0, le=2**20)]

_FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class Qwen3Config(TransformersConfig):
    """The config of Qwen3, with the option names and defaults of transformers' Qwen3Config.

    `rope_parameters` is read as `rope_theta`, its older name. Sliding windows are not supported.
    """

    KEY_PREFIX: ClassVar[str] = "model."  # in files of Qwen3ForCausalLM
    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ("lm_head.weight",)  # makes words, which an encoder does not need
    SWITCHED_OFF: ClassVar[Mapping[str, Any]] = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "output_attentions": False,
        "output_hidden_states": False,
        "return_dict": True,
        "use_sliding_window": False,
    }

    vocab_size: Annotated[int, Interval(ge=1, le=2**20)] = 151936
    hidden_size: Channels = 4096
    intermediate_size: Channels = 22016
    num_hidden_layers: Layers = 32
    num_attention_heads: Channels = 32
    num_key_value_heads: Channels | None = 32  # None: as many as attention heads
    head_dim: Channels = 128
    max_position_embeddings: Annotated[int, Interval(ge=1, le=2**24)] = 32768
    rms_norm_eps: PositiveNumber = 1e-6
    rope_theta: PositiveNumber = 10000.0  # the base of the rotary embedding's wavelengths
    attention_bias: bool = False
    # Unused: an encoder keeps no keys, has no head and is not trained; windows are off; the tokenizer pads
    use_cache: bool = True
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    attention_dropout: Fraction = 0.0
    initializer_range: float = 0.02
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | tuple[TokenId, ...] | None = None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: object) -> "Qwen3Config":
        """Build a config from a config.json of transformers, older or newer. Raises as `TransformersConfig` does."""
        options = dict(checked_mapping(str(source), mapping))
        rope = {"rope_theta": options.get("rope_theta", cls.rope_theta), "rope_type": "default"}
        for name in ("rope_parameters", "rope_scaling"):
            rope |= options.pop(name, None) or {}
        if rope.keys() != {"rope_theta", "rope_type"} or rope["rope_type"] != "default":
            raise InputError(f"{source}: rope_parameters {shown(rope)} is not supported; fastdiff runs 'default' only")
        options["rope_theta"] = rope["rope_theta"]
        types = checked(f"{source}: layer_types", options.pop("layer_types", None), tuple[str, ...] | None) or ()
        if {*types} - {_FULL_ATTENTION}:
            raise InputError(f"{source}: layer_types {shown(types)}: fastdiff runs {_FULL_ATTENTION!r} layers only")
        return super().from_mapping(options, source)

    def check(self) -> None:
        if self.num_attention_heads % self.key_value_heads:
            raise InputError(
                f"num_key_value_heads: {self.key_value_heads} does not divide num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise InputError(
                f"head_dim: {self.head_dim} is odd, and the rotary embedding turns pairs; give an even one"
            )

    @property
    def key_value_heads(self) -> int:
        """The number of heads of keys and values. Each serves the same number of attention heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def places(self) -> dict[str, Place]:
        tokens, layer = "embed_tokens.weight", "layers.0."
        return {
            "num_hidden_layers": Place("layers.", None, self.num_hidden_layers),
            "vocab_size": Place(tokens, 0, self.vocab_size),
            "hidden_size": Place(tokens, 1, self.hidden_size),
            "intermediate_size": Place(f"{layer}mlp.gate_proj.weight", 0, self.intermediate_size),
            "head_dim": Place(f"{layer}self_attn.q_norm.weight", 0, self.head_dim),
        }

    @property
    def least_parameters(self) -> dict[str, int]:
        layers, width = self.num_hidden_layers, self.hidden_size
        return {
            "num_hidden_layers": layers * (2 * width + 2 * self.head_dim),
            "vocab_size": self.vocab_size * width,
            "intermediate_size": 3 * layers * self.intermediate_size * width,
            "num_attention_heads": 2 * layers * self._width(self.num_attention_heads) * width,
            "num_key_value_heads": 2 * layers * self._width(self.key_value_heads) * width,
        }

    def _width(self, heads: int) -> int:
        return heads * self.head_dim
