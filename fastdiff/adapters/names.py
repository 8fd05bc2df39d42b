"""Find the layer that a key of a LoRA file changes. Trainers write several forms of the same name. Imports no torch.

Names are compared with `_` for each dot, because kohya's trainers write them so. A name may be diffusers', or LDM's for
a U-Net, or its authors' for Z-Image, and one file may have both.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastdiff.checkpoints.registry import TEXT_ENCODER, TEXT_ENCODER_2, UNET_CONDITION, Z_IMAGE
from fastdiff.checkpoints.single_files.keys import flat_module

UNET, ENCODER, ENCODER_2 = UNET_CONDITION.name, TEXT_ENCODER.name, TEXT_ENCODER_2.name
TRANSFORMER = Z_IMAGE.name
PARTS = (UNET, ENCODER, ENCODER_2)  # of Stable Diffusion

# The prefix of a key -> the part of the pipeline. Trainers of Z-Image write the prefixes of a U-Net too.
PREFIXES = {
    "lora_unet_": UNET,
    "diffusion_model.": UNET,
    "transformer.": TRANSFORMER,
    "lora_transformer_": TRANSFORMER,
    "lora_te_": ENCODER,
    "lora_te1_": ENCODER,
    "lora_te2_": ENCODER_2,
    "unet.": UNET,
    "text_encoder.": ENCODER,
    "text_encoder_2.": ENCODER_2,
}
PEFT_PREFIX = "base_model.model."  # of the files in a folder that peft saved

# What a key holds -> its end
_ROLES = {
    "down": r"(?:[._]lora|\.lora_linear_layer)\.down\.weight|\.lora_down\.weight|\.lora_A(?:\.\w+)?\.weight",
    "up": r"(?:[._]lora|\.lora_linear_layer)\.up\.weight|\.lora_up\.weight|\.lora_B(?:\.\w+)?\.weight",
    "mid": r"\.lora_mid\.weight",
    "alpha": r"(?:[._]lora)?\.alpha",
    "magnitude": r"\.lora_magnitude_vector(?:\.\w+)?(?:\.weight)?",
    **{name: rf"\.hada_{name}(?:\.weight)?" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f"lokr_{name}": rf"\.lokr_{name}(?:\.weight)?" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
}
_END = re.compile("|".join(f"(?P<{role}>{end})$" for role, end in _ROLES.items()))
_QKV = "_attention_qkv"  # the end of a layer that stacks to_q, to_k and to_v, as in the code of Z-Image's authors
_ROWS = ("up", "w1_a", "w2_a", "magnitude")  # tensors with a third of their rows for each of q, k and v
_SHARED = ("down", "alpha", "w1_b", "w2_b")  # tensors that q, k and v share
_AUTHORS = {  # the names of Z-Image's authors -> diffusers'
    r"_attention_(?:to_)?out$": "_attention_to_out_0",
    r"^x_embedder$": "all_x_embedder_2-1",
    r"^final_layer_": "all_final_layer_2-1_",
}
_ENCODERS_PROJECTIONS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


class Parsed(NamedTuple):
    """A key of a file, without knowledge of the model."""

    part: str | None  # of the pipeline; None if the key does not say
    module: str  # in the file's naming
    role: str  # such as "down", "up" or "alpha"


class Place(NamedTuple):
    """The layer that a key of a file is about, and what the key holds for it."""

    part: str  # of the pipeline
    weight: str  # diffusers' key of the weight that it changes
    role: str  # such as "down", "up" or "alpha"
    third: int | None = None  # of the rows of a layer that stacks to_q, to_k and to_v; None: all
    is_authors: bool = False  # whether Z-Image's authors name the layer so; a file may repeat it under diffusers' name

    def rows(self, tensor: Any) -> Any:
        """Return the rows of the file's tensor that belong to this weight."""
        if self.third is None or self.role not in _ROWS or not tensor.shape or len(tensor) % 3:
            return tensor  # a number of rows that is no multiple of 3 fits no weight
        count = len(tensor) // 3
        return tensor[self.third * count : (self.third + 1) * count]


class Homes:
    """The weights of a pipeline that adapters may change."""

    def __init__(self, weights: Mapping[str, Iterable[str]], unet_config: Any):
        """`weights`: the diffusers keys of each part's weights, such as `conv_in.weight`."""
        self._config = unet_config
        self._by_name = {
            part: {_flat(key.removesuffix(".weight"), part): key for key in keys} for part, keys in weights.items()
        }

    def find(self, key: str) -> list[Place]:
        """Return the places of a file's key: one, three for a stacked layer, or none without such a layer."""
        parsed = parse(key)
        if parsed is None:
            return []
        denoiser = next((part for part in (UNET, TRANSFORMER) if part in self._by_name), UNET)
        for part in self._by_name if parsed.part is None else (parsed.part,):
            places = self._places(denoiser if part == UNET else part, parsed.module, parsed.role)
            if places:
                return places
        return []

    def _places(self, part: str, module: str, role: str) -> list[Place]:
        """Return the places of what a key holds for a module, whose name may have any form."""
        there, name = self._by_name.get(part, {}), _flat(module, part)
        if name in there:
            return [Place(part, there[name], role)]
        if part == TRANSFORMER:
            return self._of_authors(name, role)
        name = flat_module(name, self._config) if part == UNET else name
        return [Place(part, there[name], role)] if name in there else []

    def _of_authors(self, name: str, role: str) -> list[Place]:
        """Return the places of a layer of Z-Image as its authors name it."""
        there = self._by_name.get(TRANSFORMER, {})
        if name.endswith(_QKV):
            stem = name.removesuffix("qkv")
            weights = [there.get(f"{stem}to_{each}") for each in "qkv"]
            known = role in (*_ROWS, *_SHARED)
            return [Place(TRANSFORMER, key, role, i, True) for i, key in enumerate(weights) if key and known]
        for theirs, ours in _AUTHORS.items():
            name = re.sub(theirs, ours, name)
        return [Place(TRANSFORMER, there[name], role, None, True)] if name in there else []


def parse(key: str) -> Parsed | None:
    """Return what a key of a LoRA file names; None for other keys."""
    end = _END.search(key)
    if end is None or end.lastgroup is None:
        return None
    module = key[: end.start()].removeprefix(PEFT_PREFIX)
    prefix = next((each for each in PREFIXES if module.startswith(each)), None)
    if prefix is None:
        return Parsed(None, module, end.lastgroup)
    return Parsed(PREFIXES[prefix], module.removeprefix(prefix), end.lastgroup)


def role_of(key: str) -> str | None:
    """Return what a key of a LoRA file holds, such as "down"; None for other keys."""
    parsed = parse(key)
    return None if parsed is None else parsed.role


def _flat(module: str, part: str) -> str:
    """Return a module's name with `_` for each dot, without what old versions of diffusers put into it."""
    name = module.replace(".processor", "").replace(".", "_").replace("_processor_", "_")
    if part == UNET:
        return f"{name}_0" if name.endswith("_to_out") else name
    name = name.removeprefix("text_model_")
    for old, new in _ENCODERS_PROJECTIONS.items():
        if name.endswith(f"_self_attn_{old}"):
            return f"{name.removesuffix(old)}{new}"
    return name
