"""Pictures as other tools write them: the texts of PNGs, and EXIF comments of JPEG and WebP."""

import io
import json

from PIL import Image
from PIL.PngImagePlugin import PngInfo

A1111 = {
    "parameters": "a cat, (best: 1.2)\non a mat\nNegative prompt: blurry\nSteps: 28, Sampler: DPM++ 2M, "
    "Schedule type: Karras, CFG scale: 7.5, Seed: 123, Size: 512x768, Model hash: abc, Model: dreams, "
    "Denoising strength: 0.4, Clip skip: 2, Version: v1.9"
}
_NODES = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 5,
            "steps": 20,
            "cfg": 8.0,
            "sampler_name": "euler_ancestral",
            "scheduler": "normal",
            "denoise": 1.0,
            "model": ["4", 0],
            "positive": ["6", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        },
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "v1-5.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 640, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red fox", "clip": ["4", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "text", "clip": ["4", 1]}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "ComfyUI", "images": ["3", 0]}},
}
_LINKS = [
    [1, 4, 0, 3, 0, "MODEL"],
    [2, 5, 0, 3, 3, "LATENT"],
    [3, 4, 1, 6, 0, "CLIP"],
    [4, 6, 0, 3, 1, "CONDITIONING"],
    [5, 4, 1, 7, 0, "CLIP"],
    [6, 7, 0, 3, 2, "CONDITIONING"],
]
COMFYUI = {"prompt": json.dumps(_NODES), "workflow": json.dumps({"links": _LINKS})}
INVOKEAI = {
    "invokeai_metadata": json.dumps(
        {
            "app_version": "4.2.0",
            "generation_mode": "txt2img",
            "positive_prompt": "a house",
            "negative_prompt": "blurry",
            "width": 640,
            "height": 512,
            "seed": 11,
            "cfg_scale": 6.5,
            "steps": 30,
            "scheduler": "dpmpp_2m_k",
            "clip_skip": 1,
            "loras": [{"weight": 1}],
            "model": {"model_name": "sd"},
        }
    )
}
FOOOCUS = {
    "parameters": json.dumps(
        {
            "prompt": "a boat",
            "negative_prompt": "",
            "styles": "['Fooocus V2']",
            "steps": 30,
            "resolution": "(832, 1216)",
            "guidance_scale": 4.0,
            "sharpness": 2.0,
            "sampler": "dpmpp_2m_sde_gpu",
            "scheduler": "karras",
            "seed": "77",
            "clip_skip": 2,
            "base_model": "xl",
            "base_model_hash": "0",
            "version": "Fooocus v2.5.5",
        }
    )
}
NOVELAI = {
    "Software": "NovelAI",
    "Source": "Stable Diffusion 1D44365E",
    "Description": "a knight",
    "Comment": json.dumps(
        {
            "steps": 28,
            "sampler": "k_euler_ancestral",
            "seed": 3,
            "strength": 0.7,
            "noise": 0,
            "scale": 11.0,
            "uc": "lowres",
            "width": 512,
            "height": 768,
        }
    ),
}


def png_picture(texts: dict[str, str]) -> bytes:
    info, file = PngInfo(), io.BytesIO()
    for name, text in texts.items():
        info.add_text(name, text)
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=info)
    return file.getvalue()


def exif_picture(comment: str, form: str, size: int = 8) -> bytes:
    """Return a JPEG or WebP with a UserComment."""
    exif, file = Image.Exif(), io.BytesIO()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + comment.encode("utf-16-be")
    Image.new("RGB", (size, size)).save(file, form, exif=exif)
    return file.getvalue()
