"""Random LoRAs for tiny pipelines, written in the formats of trainers, and merged by hand as the truth."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

# The layers that random LoRAs change: projections, 1x1 and 3x3 filters, and layers of time
UNET_ENDS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "ff.net.0.proj", "conv1", "time_emb_proj", "conv_shortcut")
ENCODER_ENDS = ("q_proj", "v_proj", "out_proj", "fc1")
RESNET = {"conv1": "in_layers_2", "conv2": "out_layers_3", "time_emb_proj": "emb_layers_1"}
RESNET |= {"conv_shortcut": "skip_connection"}


class Pair(NamedTuple):
    """The matrices of a layer: down (rank, in, ...) and up (out, rank, ...), with 1x1 filters for filters."""

    down: Tensor
    up: Tensor

    @property
    def delta(self) -> Tensor:
        """up @ down, (out, in kh kw)."""
        return self.up.double().flatten(1) @ self.down.double().flatten(1)


Loras = dict[tuple[str, str], Pair]  # (part, layer) -> its matrices


def layers_of(pipe: Any, ends: Iterable[str] = (*UNET_ENDS, *ENCODER_ENDS)) -> dict[tuple[str, str], nn.Module]:
    """Return the layers of a live diffusers pipeline by part and name, if their names have one of these ends."""
    parts = {name: getattr(pipe, name, None) for name in ("unet", "text_encoder", "text_encoder_2")}
    found = {
        (part, name): module
        for part, model in parts.items()
        if model is not None
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and name.endswith(tuple(ends))
    }
    return found


def random_loras(pipe: Any, rank: int = 4, seed: int = 0, **options: Any) -> Loras:
    """Return random matrices for layers of a live pipeline, of a size that changes its pictures by some tens of %."""
    generator = torch.Generator().manual_seed(seed)
    found: Loras = {}
    for place, module in layers_of(pipe, **options).items():
        shape = module.weight.shape
        down = torch.randn(rank, *shape[1:], generator=generator) / math.sqrt(math.prod(shape[1:]))
        up = torch.randn(shape[0], rank, *(1,) * (len(shape) - 2), generator=generator) / (2 * math.sqrt(rank))
        found[place] = Pair(down, up)
    return found


@torch.no_grad()
def merge(pipe: Any, deltas: Mapping[tuple[str, str], Tensor], scale: float = 1.0) -> Any:
    """Add scale * delta to the weights of a live pipeline, in float64, and return the pipeline."""
    layers = layers_of(pipe, ends=("",))
    for place, delta in deltas.items():
        weight = layers[place].weight
        weight.copy_((weight.double() + scale * delta.reshape(weight.shape)).float())
    return pipe


def deltas_of(loras: Loras) -> dict[tuple[str, str], Tensor]:
    return {place: pair.delta for place, pair in loras.items()}


def in_diffusers(loras: Loras) -> dict[str, Tensor]:
    """Return the tensors of a file in today's naming of diffusers."""
    tensors = {}
    for (part, layer), (down, up) in loras.items():
        tensors |= {f"{part}.{layer}.lora_A.weight": down, f"{part}.{layer}.lora_B.weight": up}
    return tensors


def in_old_diffusers(loras: Loras) -> dict[str, Tensor]:
    """Return the tensors in the naming of diffusers 0.20, with attention processors."""
    tensors = {}
    for (part, layer), (down, up) in loras.items():
        attention, _, projection = layer.rpartition(".to_")
        name = f"{layer}.lora"
        if part != "unet":
            name = f"text_model.{layer.removeprefix('text_model.')}.lora_linear_layer"
        elif attention:
            name = f"{attention}.processor.to_{projection.removesuffix('.0')}_lora"
        tensors |= {f"{part}.{name}.down.weight": down, f"{part}.{name}.up.weight": up}
    return tensors


PREFIXES = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}


def in_kohya(loras: Loras, alpha: float | None = None, names: Mapping[str, str] = PREFIXES) -> dict[str, Tensor]:
    """Return the tensors in kohya's naming, which has `_` for each dot. `names`: the prefixes of the parts."""
    tensors = {}
    for (part, layer), (down, up) in loras.items():
        flat = layer.replace(".", "_")
        if part != "unet" and layer != "text_projection":
            flat = f"text_model_{flat.removeprefix('text_model_')}"
        name = f"{names[part]}_{flat}"
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def in_ldm(loras: Loras, layers: int = 1) -> dict[str, Tensor]:
    """Return the tensors in kohya's naming with LDM's names of the U-Net's layers."""
    renamed = {
        (part, ldm_name(layer, layers) if part == "unet" else layer): pair for (part, layer), pair in loras.items()
    }
    return in_kohya(renamed)


def ldm_name(layer: str, layers: int) -> str:
    """Return LDM's flat name of a U-Net's layer. `layers`: for each block."""
    fixed = {"conv_in": "input_blocks_0_0", "conv_out": "out_2", "time_embedding.linear_1": "time_embed_0"}
    fixed |= {"time_embedding.linear_2": "time_embed_2", "add_embedding.linear_1": "label_emb_0_0"}
    fixed |= {"add_embedding.linear_2": "label_emb_0_2"}
    if layer in fixed:
        return fixed[layer]
    if layer.startswith("mid_block."):
        _, kind, number, *rest = layer.split(".")
        place = 1 if kind == "attentions" else 2 * int(number)
        return f"middle_block_{place}_{_inner(rest)}"
    side, block, kind, number, *rest = layer.split(".")
    block, number = int(block), int(number)
    if side == "down_blocks":
        if kind == "downsamplers":
            return f"input_blocks_{(block + 1) * (layers + 1)}_0_op"
        return f"input_blocks_{1 + block * (layers + 1) + number}_{int(kind == 'attentions')}_{_inner(rest)}"
    if kind == "upsamplers":
        return f"output_blocks_{block * (layers + 1) + layers}_2_conv"
    return f"output_blocks_{block * (layers + 1) + number}_{int(kind == 'attentions')}_{_inner(rest)}"


def _inner(rest: list[str]) -> str:
    name = "_".join(rest)
    return RESNET.get(name, name)


def save(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> Path:
    """Save tensors as a safetensors file, and return its path."""
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, path, metadata or None)
    return path
