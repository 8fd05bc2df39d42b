"""The kinds of single files: the marks in their keys, by which each is recognised. Facts only; `reading` uses them.

LDM is the code of Stable Diffusion's authors (CompVis and Stability AI), whose names most single files have.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastdiff.checkpoints.registry import TEXT_ENCODER, TEXT_ENCODER_2, UNET_CONDITION, VAE

# Base models
SD1, SD2, SDXL = "Stable Diffusion 1", "Stable Diffusion 2", "Stable Diffusion XL"
REFINER = "Stable Diffusion XL's refiner"
Z_IMAGE = "Z-Image"
BASES = (SD1, SD2, SDXL)

# Layouts of keys
LDM_UNET, LDM_VAE, CLIP, OPEN_CLIP = "LDM's U-Net", "LDM's VAE", "CLIP", "OpenCLIP"
LDM_CONTROLNET, CONTROLNET_OF_DIFFUSERS = "LDM's ControlNet", "diffusers' ControlNet"


class Mark(NamedTuple):
    """A key that only files with this part have."""

    part: str
    layout: str
    prefix: str
    key: str  # after the prefix
    base: str | None = None  # None: other keys decide


_TOKENS, _OPEN_TOKENS = "text_model.embeddings.token_embedding.weight", "transformer.resblocks.0.ln_1.weight"
_FIRST, _MIDDLE = "input_blocks.0.0.weight", "decoder.mid.block_1.norm1.weight"
_ENCODER, _ENCODER_2 = TEXT_ENCODER.name, TEXT_ENCODER_2.name
MARKS = (
    Mark(UNET_CONDITION.name, LDM_UNET, "model.diffusion_model.", _FIRST),
    Mark(UNET_CONDITION.name, LDM_UNET, "", _FIRST),
    Mark(VAE.name, LDM_VAE, "first_stage_model.", _MIDDLE),
    Mark(VAE.name, LDM_VAE, "vae.", _MIDDLE),
    Mark(VAE.name, LDM_VAE, "", _MIDDLE),
    Mark(_ENCODER, CLIP, "cond_stage_model.transformer.", _TOKENS, SD1),
    Mark(_ENCODER, CLIP, "cond_stage_model.transformer.", _TOKENS.removeprefix("text_model."), SD1),
    Mark(_ENCODER, OPEN_CLIP, "cond_stage_model.model.", _OPEN_TOKENS, SD2),
    Mark(_ENCODER, CLIP, "conditioner.embedders.0.transformer.", _TOKENS, SDXL),
    Mark(_ENCODER_2, OPEN_CLIP, "conditioner.embedders.1.model.", _OPEN_TOKENS, SDXL),
    Mark(_ENCODER_2, OPEN_CLIP, "conditioner.embedders.0.model.", _OPEN_TOKENS, REFINER),
    Mark(_ENCODER, CLIP, "", _TOKENS),
    Mark(_ENCODER, OPEN_CLIP, "", _OPEN_TOKENS),
)

# The width of the text that a U-Net reads, and of a text encoder, tells the base model.
BY_CONTEXT = {768: SD1, 1024: SD2, 1280: REFINER, 2048: SDXL}
_READS_TEXT = re.compile(  # the inputs of a layer, of a LoRA or LoHa
    r"attn2.*to_[kv](?:\b|_lora).*(?:(?:[._]down|\.lora_down|\.lora_A(?:\.\w+)?)\.weight|\.hada_w1_b(?:\.weight)?)$"
)
_OF_Z_IMAGE = re.compile(  # the layers of a LoRA, in any naming
    r"(?:^|[._])(?:layers|noise_refiner|context_refiner)[._]\d+[._](?:attention|feed_forward|adaLN_modulation)[._]"
)
ENCODERS = {768: "CLIP ViT-L", 1024: "OpenCLIP ViT-H", 1280: "OpenCLIP ViT-bigG"}
BY_ENCODER = {768: SD1, 1024: SD2, 1280: SDXL}
WIDTH_OF_ENCODER_2 = 1280

CHANNELS = {  # of a U-Net's input, for other tasks than text to image
    5: "a depth-to-image model",
    7: "an upscaler of Stable Diffusion",
    8: "an InstructPix2Pix model",
}
LATENTS = 4  # channels; VAEs of other model families have more
INPAINTING = 2 * LATENTS + 1  # channels: latents, a mask, and the latents of the picture without its masked part

EMBEDDING = "a textual inversion"
CHANGES = "changes a model and is none itself"
AS_LORA = f"{CHANGES} (--lora takes it)"
AS_CONTROL = f"{CHANGES} (--control takes it)"
A_CONTROLNET = "a ControlNet"
OTHER = "fastdiff does not run it yet"
HOLDS = "give a checkpoint of Stable Diffusion 1, 2 or XL"


class Refused(NamedTuple):
    """A kind of file that fastdiff does not load."""

    name: str
    pattern: str  # of one of its keys
    reason: str = OTHER
    alone: bool = True  # whether a checkpoint that also has such keys holds two models


# The first entry with a key in the file counts.
REFUSED = (
    Refused("a LyCORIS (LoHa, LoKr or OFT)", r"\.(?:hada_w[12]|lokr_w[12]|oft_(?:blocks|diag))", AS_LORA),
    Refused("a LoRA", r"(?:^|[._])lora_(?:up|down|A|B|te\d?|unet)[._]|[._]lora\.", AS_LORA),
    Refused(EMBEDDING, r"^(?:emb_params|string_to_param|clip_[lg])$", CHANGES),
    Refused(A_CONTROLNET, r"^control_model\.|input_hint_block\.|controlnet_", AS_CONTROL, alone=False),
    Refused("an IP-Adapter", r"^ip_adapter\.|^image_proj\.", CHANGES),
    Refused("a T2I-Adapter", r"^adapter\.|^body\.\d+\.(?:block|in_conv|resnets)", CHANGES),
    Refused("a motion module of AnimateDiff", r"motion_modules\.", CHANGES, alone=False),
    Refused("a GLIGEN model", r"\.fuser\.|^position_net\.", alone=False),
    Refused("a checkpoint with scaled fp8 weights", r"^scaled_fp8$|\.(?:scale_weight|weight_scale)$", alone=False),
    Refused("a checkpoint with weights of bitsandbytes", r"\.(?:absmax|quant_map)$|bitsandbytes__", alone=False),
    Refused("a checkpoint of Stable Video Diffusion", r"\.time_stack\.|\.time_mix", alone=False),
    Refused("a depth-to-image model", r"^depth_model\.", alone=False),
    Refused("an unCLIP model", r"^noise_augmentor\.|^embedder\.model\.", alone=False),
    Refused("Playground 2.5", r"^edm_(?:mean|std)$", alone=False),
    Refused("Hunyuan Video", r"individual_token_refiner\."),
    Refused("Chroma", r"distilled_guidance_layer\."),
    Refused("Flux 2", r"single_stream_modulation\."),
    Refused("HiDream", r"double_stream_blocks\."),
    Refused("Flux", r"(?:^|\.)double_blocks\.\d"),
    Refused("Stable Diffusion 3", r"joint_blocks\.\d"),
    Refused("AuraFlow", r"double_layers\.\d"),
    Refused("Stable Cascade", r"clip_txt_mapper\.|\.channelwise\."),
    Refused("Sana", r"\.cross_attn\.q_linear\."),
    Refused("PixArt", r"(?:^|\.)blocks\.\d+\.scale_shift_table$"),
    Refused("Wan", r"(?:^|\.)head\.modulation$"),
    Refused("LTX Video", r"patchify_proj\."),
    Refused("Lumina 2 or Z-Image", r"cap_embedder\."),
    Refused("Mochi", r"\.attn\.qkv_x\."),
    Refused("Qwen-Image", r"\.img_mod\.\d|txt_in\.text_norm\."),
    Refused("Cosmos", r"^net\.(?:x_embedder|blocks)\."),
    Refused("a T5 text encoder", r"\.SelfAttention\.[qkvo]\.", "Stable Diffusion has none"),
    Refused("an image encoder", r"(?:^|\.)vision_model\.|^visual\.", "Stable Diffusion has none"),
    Refused("a TAESD", r"^(?:taesd_)?(?:encoder\.|decoder\.)?(?:layers\.)?\d+\.(?:conv\.0\.)?weight$"),
    Refused("an upscaler such as ESRGAN", r"RRDB_trunk|^body\.\d+\.rdb\d|^model\.\d+\.sub\.", "it makes no pictures"),
    Refused(
        "a part of a folder in diffusers' layout",
        r"^(?:(?:unet|vae|encoder|decoder)\.)*(?:down_blocks|up_blocks|mid_block)\.|\.(?:down_blocks|mid_block)\.",
        "its config.json is in the folder",
    ),
)
ADAPTERS = tuple(each.name for each in REFUSED if each.reason == AS_LORA)
ANY_REFUSED = re.compile("|".join(each.pattern for each in REFUSED))

PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
STARTS = {  # the first bytes of files that people mistake for a model, and what they are
    b"PK\x03\x04": "a pickle",
    b"\x80": "a pickle",
    b"GGUF": "a GGUF file",
    b"<!": "a web page, which the download saved instead of the model",
    b"<h": "a web page, which the download saved instead of the model",
    b"version https://git-lfs": "a pointer of Git LFS, and the model itself is missing",
}


def text_width_of(tensors: Mapping[str, Any]) -> int | None:
    """Return the width of the text that the model of a LoRA or LoHa reads, by the shapes of its tensors.

    None if it changes no layer that reads text.
    """
    for key, tensor in tensors.items():
        if _READS_TEXT.search(key) and tensor.shape:
            return tensor.shape[1] if len(tensor.shape) > 1 else 0
    return None


def base_of_lora(tensors: Mapping[str, Any]) -> str | None:
    """Return the base model of a LoRA or LoHa by its keys, and by the width of the text that its model reads.

    None if that cannot be told. tensors: anything with a shape, by the keys of the file.
    """
    if any(map(_OF_Z_IMAGE.search, tensors)):
        return Z_IMAGE
    return BY_CONTEXT.get(text_width_of(tensors) or 0)
