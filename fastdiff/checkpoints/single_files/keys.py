"""The names of diffusers and transformers for the tensors of a single file, and how each tensor is changed.

Most single files have the names of LDM, the code of Stable Diffusion's authors, and of OpenCLIP. Imports no torch.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.configs.clip import CLIPTextConfig, CLIPTextConfigWithProjection
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.single_files.kinds import (
    CLIP,
    CONTROLNET_OF_DIFFUSERS,
    LDM_CONTROLNET,
    LDM_UNET,
    LDM_VAE,
    OPEN_CLIP,
)
from fastdiff.checkpoints.weight_files import InFile, Shapes
from fastdiff.errors import InputError

THIRDS = ("q_proj", "k_proj", "v_proj")  # of OpenCLIP's in_proj


class Source(NamedTuple):
    """Where a tensor of diffusers' name comes from."""

    key: str  # in the file
    third: int | None = None  # only this third of the rows
    is_transposed: bool = False
    is_filter: bool = False  # a 1x1 convolution, (C, C, 1, 1), that diffusers has as a linear layer

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, from the shape of the tensor in the file."""
        if self.third is not None and shape:
            return (shape[0] // 3, *shape[1:])
        if self.is_filter and shape[2:] == (1, 1):
            return shape[:2]
        return shape[::-1] if self.is_transposed else shape

    def of(self, stored: Any) -> Any:
        """Return a view of the tensor in the file."""
        if self.third is not None:
            return stored.chunk(3)[self.third]
        if self.is_filter and stored.shape[2:] == (1, 1):
            return stored[:, :, 0, 0]
        return stored.T if self.is_transposed else stored


# Diffusers' name, or None for a tensor that the model does not use
Named = tuple[str, Source] | None

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_UNET = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.1": "mid_block.attentions.0",
    "middle_block.2": "mid_block.resnets.1",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_UNET_BLOCK = re.compile(r"(input|output)_blocks\.(\d{1,3})\.(\d)\.(.+)")
_FLAT_BLOCK = re.compile(r"^(input|output)_blocks_(\d{1,3})_(\d)_")
_ZERO_CONVOLUTION = re.compile(r"(?:zero_convs\.(\d{1,3})|middle_block_out)\.0\.(.+)")
_HINT = re.compile(r"input_hint_block\.(\d{1,3})\.(.+)")
_VAE_BLOCK = re.compile(r"(encoder|decoder)\.(?:down|up)\.(\d{1,3})\.(?:block\.(\d{1,3})|downsample|upsample)\.(.+)")
_VAE_MIDDLE = re.compile(r"(encoder|decoder)\.mid\.(block|attn)_(\d)\.(.+)")
_VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
_OPEN_CLIP = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_OPEN_CLIP_LAYER = re.compile(r"transformer\.resblocks\.(\d{1,3})\.(.+)\.([^.]+)")
_OPEN_CLIP_MODULES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
_BESIDE = ("model_ema.", "v_pred", "ztsnr", "global_step")  # keys beside the part in a file without prefixes
_UNUSED_IN_CLIP = ("logit_scale", "attn_mask", "embeddings.position_ids")


def _renamed(module: str, names: Mapping[str, str]) -> str:
    """Return `module.weight` with the name of its module replaced, if it is one of `names`."""
    stem, dot, last = module.rpartition(".")
    return f"{names.get(stem, stem)}{dot}{last}"


def _of_unet(key: str, config: Any) -> list[Named]:
    match = _UNET_BLOCK.fullmatch(key)
    if match is None or key.startswith("input_blocks.0."):
        stem = next((stem for stem in _UNET if key.startswith(f"{stem}.")), None)
        if stem is None:
            return [(key, Source(key))]
        rest = _renamed(key.removeprefix(f"{stem}."), _RESNET if "resnets" in _UNET[stem] else {})
        return [(f"{_UNET[stem]}.{rest}", Source(key))]
    direction, number, slot, rest = match[1], int(match[2]), match[3], match[4]
    each = _layers(config) + (direction == "output")  # of a level; the input's levels end with a downsampler
    level, place = divmod(number, each) if direction == "output" else divmod(number - 1, each + 1)
    block = f"{'down' if direction == 'input' else 'up'}_blocks.{level}"
    if slot == "0" and rest.startswith("op."):
        return [(f"{block}.downsamplers.0.conv.{rest.removeprefix('op.')}", Source(key))]
    if slot != "0" and rest.startswith("conv."):
        return [(f"{block}.upsamplers.0.{rest}", Source(key))]
    if slot == "0":
        return [(f"{block}.resnets.{place}.{_renamed(rest, _RESNET)}", Source(key))]
    return [(f"{block}.attentions.{place}.{rest}", Source(key))]


def _of_controlnet(key: str, config: Any) -> list[Named]:
    if match := _ZERO_CONVOLUTION.fullmatch(key):
        name = "controlnet_mid_block" if match[1] is None else f"controlnet_down_blocks.{match[1]}"
        return [(f"{name}.{match[2]}", Source(key))]
    if match := _HINT.fullmatch(key):  # convolutions at even places, and activations between them
        place, last = int(match[1]) // 2, 2 * len(config.conditioning_embedding_out_channels) - 1
        name = {0: "conv_in", last: "conv_out"}.get(place, f"blocks.{place - 1}")
        return [(f"controlnet_cond_embedding.{name}.{match[2]}", Source(key))]
    return _of_unet(key, config)


def _as_named(key: str, config: Any) -> list[Named]:
    return [(key, Source(key))]


def flat_module(name: str, config: UNet2DConditionConfig) -> str:
    """Return diffusers' name of a U-Net's module for LDM's name, both with `_` for each dot.

    Other names are returned as they are.
    """
    dotted = _FLAT_BLOCK.sub(r"\1_blocks.\2.\3.", name)
    for stem in _UNET:
        dotted = re.sub(rf"^{stem.replace('.', '_')}(?:_|$)", f"{stem}.", dotted)
    for stem in _RESNET:
        dotted = re.sub(rf"\.{stem.replace('.', '_')}$", f".{stem}", dotted)
    named = _of_unet(f"{dotted.removesuffix('.')}.weight", config)[0]
    assert named is not None
    return named[0].removesuffix(".weight").replace(".", "_")


def _layers(config: UNet2DConditionConfig) -> int:
    layers = config.layers_per_block
    return layers if isinstance(layers, int) else layers[0]


def _of_vae(key: str, config: Any) -> list[Named]:
    if key.startswith("loss."):  # of training
        return [None]
    if match := _VAE_BLOCK.fullmatch(key):
        half, level, layer, rest = match[1], int(match[2]), match[3], match[4]
        if half == "encoder":
            block, sampler = f"encoder.down_blocks.{level}", "downsamplers"
        else:  # LDM counts the levels of the decoder from the largest picture
            block, sampler = f"decoder.up_blocks.{len(config.block_out_channels) - 1 - level}", "upsamplers"
        inside = f"{sampler}.0.{rest}" if layer is None else f"resnets.{layer}.{_shortcut(rest)}"
        return [(f"{block}.{inside}", Source(key))]
    if match := _VAE_MIDDLE.fullmatch(key):
        half, kind, number, rest = match[1], match[2], int(match[3]) - 1, match[4]
        if kind == "block":
            return [(f"{half}.mid_block.resnets.{number}.{_shortcut(rest)}", Source(key))]
        rest = _renamed(rest, _VAE_ATTENTION)
        return [(f"{half}.mid_block.attentions.{number}.{rest}", Source(key, is_filter=rest.endswith("weight")))]
    return [(key.replace(".norm_out.", ".conv_norm_out."), Source(key))]


def _shortcut(name: str) -> str:
    return name.replace("nin_shortcut.", "conv_shortcut.")


def _of_clip(key: str, config: Any) -> list[Named]:
    name = key.removeprefix("text_model.")
    is_unused = name == "text_projection.weight" and not _projects(config)
    return [None] if is_unused or name in _UNUSED_IN_CLIP else [(name, Source(key))]


def _of_open_clip(key: str, config: Any) -> list[Named]:
    if key in _UNUSED_IN_CLIP:
        return [None]
    if key in ("text_projection", "text_projection.weight"):
        name = "text_projection.weight"
        return [(name, Source(key, is_transposed=key != name))] if _projects(config) else [None]
    match = _OPEN_CLIP_LAYER.fullmatch(key)
    if match is None:
        return [(_OPEN_CLIP.get(key, key), Source(key))]
    number, module, last = int(match[1]), match[2], match[3]
    if number == config.num_hidden_layers and not _projects(config):
        return [None]  # SD 2 reads the last layer but one, and its folder has no last layer
    layer = f"encoder.layers.{number}"
    if module == "attn" and last in ("in_proj_weight", "in_proj_bias"):
        end = last.removeprefix("in_proj_")
        return [(f"{layer}.self_attn.{part}.{end}", Source(key, third=i)) for i, part in enumerate(THIRDS)]
    return [(f"{layer}.{_OPEN_CLIP_MODULES.get(module, module)}.{last}", Source(key))]


def _projects(config: CLIPTextConfig) -> bool:
    return isinstance(config, CLIPTextConfigWithProjection)


LAYOUTS: dict[str, tuple[type, Callable[[str, Any], list[Named]]]] = {
    LDM_UNET: (UNet2DConditionConfig, _of_unet),
    LDM_VAE: (AutoencoderKLConfig, _of_vae),
    CLIP: (CLIPTextConfig, _of_clip),
    OPEN_CLIP: (CLIPTextConfig, _of_open_clip),
    LDM_CONTROLNET: (ControlNetConfig, _of_controlnet),
    CONTROLNET_OF_DIFFUSERS: (ControlNetConfig, _as_named),
}


def sources(inside: InFile, keys: Iterable[str], config: Any) -> dict[str, Source]:
    """Return where each tensor of a part is in a file with these keys, by diffusers' names.

    A key without a name of diffusers keeps its own, and is reported as unknown later. Raises InputError for the
    config of another class.
    """
    kind, names_of = LAYOUTS[inside.layout]
    if not isinstance(config, kind):
        raise InputError(f"{inside.path}: it holds {inside.layout}, which is no {type(config).__name__}; give another")
    found: dict[str, Source] = {}
    for key in keys:
        if not key.startswith(inside.prefix) or (not inside.prefix and key.startswith(_BESIDE)):
            continue
        for named in names_of(key.removeprefix(inside.prefix), config):
            if named is not None:
                name, source = named
                found.setdefault(name, source._replace(key=_stored_key(inside, source.key)))
    return found


def _stored_key(inside: InFile, key: str) -> str:
    """Return the key in the file. LDM names moving averages without the dots of the path."""
    key = inside.prefix + key
    return f"model_ema.{key.removeprefix('model.').replace('.', '')}" if inside.ema else key


def shapes_of(sources: Mapping[str, Source], stored: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return the shapes of the tensors by diffusers' names, from the shapes in the file."""
    return {name: source.shape(stored[source.key]) for name, source in sources.items() if source.key in stored}
