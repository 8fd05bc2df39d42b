"""The parts of Z-Image-Turbo with random weights in bfloat16, which are made on the GPU."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from fastdiff import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Qwen3Model,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from fastdiff.checkpoints.quantisation import formats
from fastdiff.checkpoints.weights import diffusers_shapes, load_weights
from fastdiff.execution.devices import on_meta
from fastdiff.kinds import Precision
from fastdiff.models.model import Model
from fastdiff.text.chat_tokenizer import ChatTokenizer
from fastdiff.tuning.timing import DEVICE

DTYPE = torch.bfloat16
Weights = Mapping[str, Tensor]


class Sizes(NamedTuple):
    """The configs of the models, without values that are the defaults, and the side of a picture."""

    transformer: dict[str, Any]
    encoder: dict[str, Any]
    vae: dict[str, Any]
    side: int = 1024


VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
FULL = Sizes(
    {},  # Z-Image's are the defaults
    {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
    },
    VAE,
)
TINY = Sizes(
    {"dim": 128, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 1, "cap_feat_dim": 64},
    {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    VAE | {"block_out_channels": (16, 16, 16, 16), "norm_num_groups": 4, "layers_per_block": 1},
    side=64,
)
TEMPLATE = (  # the beginning and the end of Qwen3's, with thinking on
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_weights(kind: type[Model], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return weights by diffusers' names. Norms have weights near 1. Products keep the size of their inputs."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    with on_meta():
        shapes = diffusers_shapes(kind.from_config(config))

    def make(name: str, shape: torch.Size) -> Tensor:
        values = torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)
        if len(shape) == 1:
            return 0.02 * values + name.endswith("weight")
        return values if "pad_token" in name else values.mul_(shape[1:].numel() ** -0.5)

    return {name: make(name, shape) for name, shape in shapes.items()}


def model_of(kind: Any, config: Mapping[str, Any], weights: Weights, precision: Precision = "full") -> Any:
    """Return our model with these weights."""
    with on_meta():
        model = kind.from_config(config)
    in_8_bits = formats(model, precision)
    load_weights(model, dict(weights), source="benchmark", dtype=DTYPE, device=DEVICE, in_8_bits=in_8_bits)
    return model


class Parts:
    """The random weights of a pipeline, and pipelines with them in any precision."""

    def __init__(self, sizes: Sizes, folder: Path):
        """folder: where the tokenizer's files are written."""
        self.sizes, self._tokenizer = sizes, save_tokenizer(folder)
        self.transformer = random_weights(ZImageTransformer2DModel, sizes.transformer)
        self._encoder = random_weights(Qwen3Model, sizes.encoder)
        self._vae = random_weights(AutoencoderKL, sizes.vae)

    def pipeline(self, precision: Precision = "full") -> ZImagePipeline:
        return ZImagePipeline(
            model_of(ZImageTransformer2DModel, self.sizes.transformer, self.transformer, precision),
            FlowMatchEulerDiscreteScheduler(shift=3.0),
            model_of(AutoencoderKL, self.sizes.vae, self._vae),
            model_of(Qwen3Model, self.sizes.encoder, self._encoder, precision),
            self._tokenizer,
        )


def save_tokenizer(folder: Path) -> ChatTokenizer:
    """Save a tokenizer of bytes, with Qwen3's special tokens for the turns of a chat."""
    letters = sorted(ByteLevel.alphabet())
    special = {
        str(len(letters) + i): {"content": name, "special": True}
        for i, name in enumerate(("<|im_start|>", "<|im_end|>"))
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": TEMPLATE, "added_tokens_decoder": special}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer(folder)
