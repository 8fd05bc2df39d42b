"""Random LoRAs for the tiny transformer of Z-Image, in the formats that diffusers reads."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

SEPARATE = ("to_q", "to_k", "to_v")


class Pair(NamedTuple):
    """The matrices of a layer: down (rank, in) and up (out, rank)."""

    down: Tensor
    up: Tensor


Loras = dict[str, Pair]  # by the layer's name


def random_loras(transformer: nn.Module, rank: int = 4, seed: int = 0) -> Loras:
    """Return random matrices for all linear layers, of a size that changes pictures by some tens of %."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            rows, columns = module.weight.shape
            down = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
            up = torch.randn(rows, rank, generator=generator) * 0.2 / math.sqrt(rank)
            found[name] = Pair(down, up)
    return found


def of_blocks(loras: Loras) -> Loras:
    """Return the part of a LoRA that trainers usually have: the attentions and MLPs of blocks."""
    return {name: pair for name, pair in loras.items() if ".attention." in name or ".feed_forward." in name}


def in_peft(loras: Loras, prefix: str = "transformer.", adapter: str = "", alpha: float | None = None) -> dict:
    """Return the tensors with peft's names, after a prefix, perhaps with the name of an adapter and an alpha."""
    tensors = {}
    for name, (down, up) in loras.items():
        tensors |= {f"{prefix}{name}.lora_A{adapter}.weight": down, f"{prefix}{name}.lora_B{adapter}.weight": up}
        tensors |= {} if alpha is None else {f"{prefix}{name}.alpha": torch.tensor(alpha)}
    return tensors


def in_kohya(
    loras: Loras, alphas: tuple[float, ...] = (2.0,), prefix: str = "lora_unet_", *, flat: bool = True
) -> dict:
    """Return the tensors with kohya's names, if flat with `_` for each dot. Layers take the alphas in turn."""
    tensors = {}
    for i, (name, (down, up)) in enumerate(loras.items()):
        stem = prefix + (name.replace(".", "_") if flat else name)
        tensors |= {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
        tensors[f"{stem}.alpha"] = torch.tensor(alphas[i % len(alphas)])
    return tensors


def stacked(loras: Loras) -> Loras:
    """Return a LoRA of attentions with the names of Z-Image's authors: `qkv` with one down, and `out`."""
    found = {}
    for name, pair in loras.items():
        stem, _, last = name.rpartition(".")
        if last == "to_q":
            parts = [loras[f"{stem}.{each}"] for each in SEPARATE]
            found[f"{stem}.qkv"] = Pair(pair.down, torch.cat([each.up for each in parts]))
        elif name.endswith(".to_out.0"):
            found[f"{name.removesuffix('.to_out.0')}.out"] = pair
        elif last not in SEPARATE:
            found[name] = pair
    return found


def sharing_down(loras: Loras) -> Loras:
    """Return a LoRA whose q, k and v have one down, as `stacked` can write it."""
    found = dict(loras)
    for name, pair in loras.items():
        if name.endswith((".to_k", ".to_v")):
            found[name] = pair._replace(down=loras[f"{name.rpartition('.')[0]}.to_q"].down)
    return found


def written_twice(loras: Loras) -> dict:
    """Return tensors with dots in every name, and each attention also under its authors' names, which do not count."""
    tensors = {}
    for name, (down, up) in loras.items():
        dotted = name.replace("to_", "to.") if name.endswith(SEPARATE) else name
        tensors |= {f"diffusion_model.{dotted}.lora.down.weight": down, f"diffusion_model.{dotted}.lora.up.weight": up}
    for name, (down, up) in stacked(loras).items():
        if name.endswith((".qkv", ".out")):
            stem = f"diffusion_model.{name}.lora"
            tensors |= {f"{stem}.down.weight": 9 * down, f"{stem}.up.weight": up}
    return tensors


def in_lokr(transformer: nn.Module, seed: int = 0) -> dict:
    """Return a LoKr of ai-toolkit: one factor whole, and the other one of two matrices with an alpha."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and ".attention." in name:
            rows, columns = module.weight.shape
            stem, inner = f"diffusion_model.{name}", (rows // 4, columns // 4)
            tensors[f"{stem}.lokr_w1"] = torch.randn(4, 4, generator=generator) * 0.3
            tensors[f"{stem}.lokr_w2_a"] = torch.randn(inner[0], 2, generator=generator) * 0.3
            tensors[f"{stem}.lokr_w2_b"] = torch.randn(2, inner[1], generator=generator) * 0.3
            tensors[f"{stem}.alpha"] = torch.tensor(1.0)
    return tensors
