"""Tiny pipelines as single files, with the names of LDM and OpenCLIP. The inverse of the loader's map, written anew."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.text_pipelines import (
    OPEN_CLIP,
    inpainting_pipeline,
    refiner_pipeline,
    text_pipeline,
    tiny_encoder,
)

State = dict[str, Tensor]


class Saved(NamedTuple):
    """A tiny pipeline, and where it is saved."""

    kind: str
    pipe: Any  # of diffusers
    folder: Path
    file: Path


RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
TOPS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
PREFIXES = {  # of the text encoders
    "sd1": {"text_encoder": "cond_stage_model.transformer."},
    "sd2": {"text_encoder": "cond_stage_model.model."},
    "sdxl": {
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
    "sdxl-refiner": {"text_encoder_2": "conditioner.embedders.0.model."},
}


def ldm_unet(unet: nn.Module) -> State:
    """Return a U-Net's weights by LDM's names."""
    layers, state = unet.config.layers_per_block, {}
    for key, tensor in unet.state_dict().items():
        state[_unet_name(key, layers, unet)] = tensor
    return state


def ldm_controlnet(net: nn.Module) -> State:
    """Return a ControlNet's weights by LDM's names."""
    layers, state = net.config.layers_per_block, {}
    last = len(net.controlnet_cond_embedding.blocks) + 1
    places = {"controlnet_cond_embedding.conv_in": 0, "controlnet_cond_embedding.conv_out": last}
    for key, tensor in net.state_dict().items():
        stem, end = key.rsplit(".", 1)
        if stem.startswith("controlnet_cond_embedding."):
            place = places[stem] if stem in places else int(stem.rsplit(".", 1)[1]) + 1
            state[f"input_hint_block.{2 * place}.{end}"] = tensor
        elif stem.startswith("controlnet_down_blocks."):
            state[f"zero_convs.{stem.rsplit('.', 1)[1]}.0.{end}"] = tensor
        elif stem == "controlnet_mid_block":
            state[f"middle_block_out.0.{end}"] = tensor
        else:
            state[_unet_name(key, layers, net)] = tensor
    return state


def _unet_name(key: str, layers: int, unet: nn.Module) -> str:
    for ours, theirs in TOPS.items():
        if key.startswith(f"{ours}."):
            return key.replace(ours, theirs, 1)
    block, rest = key.split(".", 1)
    if block == "mid_block":
        kind, number, inner = rest.split(".", 2)
        if kind == "attentions":
            return f"middle_block.1.{inner}"
        return f"middle_block.{2 * int(number)}.{_inner(inner)}"
    level, kind, number, inner = rest.split(".", 3)
    number = int(number)
    if block == "down_blocks":
        first = 1 + int(level) * (layers + 1)
        if kind == "downsamplers":
            return f"input_blocks.{first + layers}.0.{inner.replace('conv', 'op')}"
        place = f"input_blocks.{first + number}"
    else:
        first = int(level) * (layers + 1)
        if kind == "upsamplers":
            slot = 2 if hasattr(unet.up_blocks[int(level)], "attentions") else 1
            return f"output_blocks.{first + layers}.{slot}.{inner}"
        place = f"output_blocks.{first + number}"
    return f"{place}.1.{inner}" if kind == "attentions" else f"{place}.0.{_inner(inner)}"


def _inner(name: str) -> str:
    stem, end = name.rsplit(".", 1)
    return f"{RESNET[stem]}.{end}"


def ldm_vae(vae: nn.Module) -> State:
    """Return a VAE's weights by LDM's names. The attention's linear layers are 1x1 convolutions there."""
    levels, state = len(vae.config.block_out_channels), {}
    for key, tensor in vae.state_dict().items():
        name = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
        name = name.replace("mid_block.attentions.0", "mid.attn_1")
        name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
        name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d)\.resnets", lambda found: f"up.{levels - 1 - int(found[1])}.block", name)
        name = re.sub(
            r"up_blocks\.(\d)\.upsamplers\.0", lambda found: f"up.{levels - 1 - int(found[1])}.upsample", name
        )
        if ".attn_1." in name:
            pairs = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
            for ours, theirs in pairs.items():
                name = name.replace(f".{ours}.", f".{theirs}.")
            tensor = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
        state[name] = tensor
    return state


def clip(encoder: nn.Module) -> State:
    """Return the weights of a CLIP encoder by the names of older releases of transformers."""
    state = {f"text_model.{key.removeprefix('text_model.')}": tensor for key, tensor in encoder.state_dict().items()}
    length = encoder.config.max_position_embeddings
    return state | {"text_model.embeddings.position_ids": torch.arange(length)[None]}


def open_clip(encoder: nn.Module, *, last_layer: bool) -> State:
    """Return an encoder's weights by OpenCLIP's names. `last_layer` adds the layer that SD 2 does not read."""
    state: State = {"logit_scale": torch.tensor(4.6)}
    theirs = {key.removeprefix("text_model."): tensor for key, tensor in encoder.state_dict().items()}
    state["token_embedding.weight"] = theirs["embeddings.token_embedding.weight"]
    state["positional_embedding"] = theirs["embeddings.position_embedding.weight"]
    width = encoder.config.hidden_size
    projection = theirs.get("text_projection.weight", torch.ones(width, width))
    state["text_projection"] = projection.T
    state |= {f"ln_final.{end}": theirs[f"final_layer_norm.{end}"] for end in ("weight", "bias")}
    for number in range(encoder.config.num_hidden_layers):
        state |= _open_clip_layer(theirs, f"encoder.layers.{number}.", f"transformer.resblocks.{number}.")
    if last_layer:
        number = encoder.config.num_hidden_layers
        state |= _open_clip_layer(theirs, "encoder.layers.0.", f"transformer.resblocks.{number}.")
    return state


def _open_clip_layer(theirs: State, ours: str, name: str) -> State:
    modules = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    modules |= {"self_attn.out_proj": "attn.out_proj"}
    state = {}
    for end in ("weight", "bias"):
        state |= {f"{name}{new}.{end}": theirs[f"{ours}{old}.{end}"] for old, new in modules.items()}
        parts = [theirs[f"{ours}self_attn.{part}_proj.{end}"] for part in "qkv"]
        state[f"{name}attn.in_proj_{end}"] = torch.cat(parts)
    return state


def prefixed(prefix: str, state: State) -> State:
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def whole(kind: str, pipe: Any) -> State:
    """Return all weights of a pipeline by the names of a single file."""
    state = prefixed("model.diffusion_model.", ldm_unet(pipe.unet)) | prefixed("first_stage_model.", ldm_vae(pipe.vae))
    for name, prefix in PREFIXES[kind.removesuffix("-inpainting")].items():
        encoder = getattr(pipe, name)
        names = (
            clip(encoder) if prefix.endswith("transformer.") else open_clip(encoder, last_layer=kind.startswith("sd2"))
        )
        state |= prefixed(prefix, names)
    return state


def save(state: State, path: Path, metadata: dict[str, str] | None = None, dtype: torch.dtype | None = None) -> Path:
    """Write a single file. `dtype` is of its floating-point tensors."""
    tensors = {
        key: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).detach().clone().contiguous()
        for key, tensor in state.items()
    }
    save_file(tensors, path, metadata=metadata)
    return path


def save_pipeline(kind: str, root: Path) -> Saved:
    """Save a tiny pipeline as a folder and as a single file, below `root`.

    kind: sd1, sd2 or sdxl, each also with the end -inpainting, or sdxl-refiner.
    """
    base, _, task = kind.partition("-")
    # 23 layers, because diffusers knows the layer that SD 2 does not read by its number
    parts = {"text_encoder": tiny_encoder(OPEN_CLIP | {"num_hidden_layers": 23})} if base == "sd2" else {}
    if task == "refiner":
        pipe = refiner_pipeline()
    else:
        pipe = inpainting_pipeline(base, **parts) if task else text_pipeline(base, **parts)
    pipe.save_pretrained(root / "folder")
    return Saved(kind, pipe, root / "folder", save(whole(kind, pipe), root / "model.safetensors"))
