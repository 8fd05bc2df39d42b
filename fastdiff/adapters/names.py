"""Find the layer that a key of a LoRA file changes. Trainers write several forms of the same name. Imports no torch.

Names are compared with `_` for each dot, because kohya's trainers write them so. A name may be diffusers' or, for a
U-Net, LDM's, and one file may have both.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastdiff.checkpoints.registry import TEXT_ENCODER, TEXT_ENCODER_2, UNET_CONDITION
from fastdiff.checkpoints.single_files.keys import flat_module

UNET, ENCODER, ENCODER_2 = UNET_CONDITION.name, TEXT_ENCODER.name, TEXT_ENCODER_2.name
PARTS = (UNET, ENCODER, ENCODER_2)

# The prefix of a key -> the part of the pipeline
PREFIXES = {
    "lora_unet_": UNET,
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


class Homes:
    """The weights of a pipeline that adapters may change."""

    def __init__(self, weights: Mapping[str, Iterable[str]], unet_config: Any):
        """`weights`: the diffusers keys of each part's weights, such as `conv_in.weight`."""
        self._config = unet_config
        self._by_name = {
            part: {_flat(key.removesuffix(".weight"), part): key for key in keys} for part, keys in weights.items()
        }

    def find(self, key: str) -> Place | None:
        """Return the place of a file's key, or None if no layer of this pipeline has it."""
        parsed = parse(key)
        if parsed is None:
            return None
        for part in PARTS if parsed.part is None else (parsed.part,):
            weight = self._weight(part, parsed.module)
            if weight is not None:
                return Place(part, weight, parsed.role)
        return None

    def _weight(self, part: str, module: str) -> str | None:
        """Return diffusers' key of the weight of a module, whose name may have any form."""
        there = self._by_name.get(part, {})
        name = _flat(module, part)
        if name not in there and part == UNET:
            name = flat_module(name, self._config)
        return there.get(name)


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
