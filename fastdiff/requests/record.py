"""The types of the settings in a PNG, which may come from anywhere.

`Request` checks the ranges and the choices of the settings that a run repeats.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Len

from fastdiff.errors import InputError
from fastdiff.schema import Wanted, checked

_Text = str | None
_Count = int | None
_Number = float | None
_Subject = str | int | None
_TYPES: dict[str, Any] = {
    "model": str,
    **dict.fromkeys(("revision", "variant", "config", "vae", "prediction_type"), _Text),
    **dict.fromkeys(("scheduler", "dtype", "precision", "device", "negative_prompt", "model_hash", "vae_hash"), _Text),
    **dict.fromkeys(("init_image", "init_image_hash", "prompt_syntax", "emphasis"), _Text),
    **dict.fromkeys(("mask", "mask_hash", "upscale_mode", "image_encoder", "image_encoder_hash"), _Text),
    **dict.fromkeys(("mask_blur", "upscale", "upscale_strength"), _Number),
    **dict.fromkeys(("mask_crop", "base_width", "base_height"), _Count),
    **dict.fromkeys(("num_inference_steps", "clip_skip", "horizon", "num_images"), _Count),
    **dict.fromkeys(("width", "height", "picture_width", "picture_height"), _Count),
    **dict.fromkeys(("guidance_scale", "guidance_start", "guidance_stop", "eta", "strength"), _Number),
    "use_clipped_model_output": bool | None,
    "seed": Annotated[int | Annotated[tuple[int, ...], Len(1)], Wanted("a whole number, or a list of them")],
    "label": Annotated[_Subject | tuple[_Subject, ...], Wanted("the name or index of a label, or a list of them")],
    "prompt": Annotated[_Text | tuple[str, ...], Wanted("a string, or a list of them")],
    **dict.fromkeys(
        (
            *("embedding", "embedding_hashes", "lora", "lora_hashes"),
            *("control", "control_hashes", "control_image", "control_image_hashes"),
            *("ip_adapter", "ip_adapter_hashes", "ip_adapter_image", "ip_adapter_image_hashes"),
        ),
        Annotated[tuple[str, ...], Wanted("a list of strings")],
    ),
    **dict.fromkeys(
        ("control_scale", "control_start", "control_end", "ip_adapter_scale"),
        Annotated[tuple[float, ...], Wanted("a list of numbers")],
    ),
    "guess_mode": bool | None,
    "versions": dict[str, str],
}


def check_types(record: Mapping[str, Any], source: object) -> None:
    """Raise InputError, which names `source`, for a setting of another type. A record may lack any setting."""
    try:
        for name, kind in _TYPES.items():
            if name in record:
                checked(name, record[name], kind)
    except InputError as error:
        raise InputError(f"{source} holds settings that cannot be used: {error}") from None
