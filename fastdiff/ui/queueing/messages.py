"""Status lines and error messages of the page. Errors name the field and the remedy."""

import html
import re

from fastdiff.errors import DeviceLostError, InputError, NonFiniteError

PROBLEMS = (InputError, NonFiniteError, MemoryError, DeviceLostError, OSError)  # errors that users can act on

_FIELDS = {  # API names, and their fields on the page
    "model": "Model",
    "label": "Label",
    "seed": "Seed",
    "num_images": "Pictures",
    "steps": "Steps",
    "scheduler": "Scheduler",
    "eta": "Eta",
    "guidance_scale": "Guidance",
    "width": "Width",
    "height": "Height",
    "batch_size": "Batch size",
    "prompt": "Prompt",
    "negative_prompt": "Negative prompt",
    "clip_skip": "Clip skip",
    "precision": "Weights",
    "lora": "LoRAs",
    "init_image": "Start picture",
    "strength": "Strength",
    "prompt_syntax": "Prompt syntax",
    "emphasis": "Emphasis",
    "guidance_start": "Guidance from",
    "guidance_stop": "Guidance until",
    "mask": "Mask",
    "mask_blur": "Mask blur",
    "mask_crop": "Mask crop",
    "control": "ControlNet",
    "control_image": "Control picture",
    "control_preprocessor": "Preprocessor",
    "canny_low": "Low threshold",
    "canny_high": "High threshold",
    "control_scale": "Control scale",
    "control_start": "Control from",
    "control_end": "Control until",
    "guess_mode": "Guess mode",
    "ip_adapter": "IP-Adapter",
    "ip_adapter_image": "Image prompt",
    "ip_adapter_scale": "IP-Adapter scale",
    "upscale": "Upscale",
    "upscale_strength": "Upscale strength",
    "upscale_mode": "Upscale mode",
}
_OTHER_WORDS = {  # words of the command line and of Python, and their replacements on the page and in the API
    "try --dtype float32, or check": "check",
    "cfg-scale": "guidance_scale",
    "num-images": "num_images",
    "negative-prompt": "negative_prompt",
    "clip-skip": "clip_skip",
    "init-image": "init_image",
    "prompt-syntax": "prompt_syntax",
    "guidance-start": "guidance_start",
    "guidance-stop": "guidance_stop",
    "mask-blur": "mask_blur",
    "control-image": "control_image",
    "control-scale": "control_scale",
    "control-start": "control_start",
    "control-end": "control_end",
    "ip-adapter-image": "ip_adapter_image",
    "ip-adapter-scale": "ip_adapter_scale",
    "upscale-strength": "upscale_strength",
    "upscale-mode": "upscale_mode",
    "load it with load_lora_weights": "choose it in the list of LoRAs",
    "`fastdiff models MODEL` lists": "the API's /models lists",
    ": None is not ": " is empty; give ",
}


def explain(error: Exception) -> str:
    """Return one of PROBLEMS as one line."""
    if isinstance(error, MemoryError):
        return "out of memory; reduce Width and Height under More settings, or choose a smaller model"
    if isinstance(error, OSError):
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # ours is for the command line
        return f"the server cannot save the picture ({cause.strerror or cause}); free space on its disk"
    text = str(error)
    for theirs, ours in _OTHER_WORDS.items():
        text = text.replace(theirs, ours)
    return re.sub(r"(?<![\w-])--(?=[a-z])", "", text)  # of flags; a model's name may hold dashes


def field_name(name: str) -> str:
    """Return the page's name for an option of the API."""
    return _FIELDS.get(name, name)


def number_of_pictures(count: int) -> str:
    """Return, for example, "1 picture" or "1,200 pictures"."""
    return "1 picture" if count == 1 else f"{count:,} pictures"


def problem(error: Exception) -> str:
    """Return the HTML of one of PROBLEMS. A screen reader reads it at once."""
    text = re.sub(r"^\w+(?=[: ])", lambda name: field_name(name[0]), explain(error))
    return f'<div role="alert" class="problem">{html.escape(text, quote=False)}</div>'


def note(text: str) -> str:
    """Return the HTML of a status line. A screen reader reads it when it is idle."""
    return f'<div role="status">{html.escape(text, quote=False)}</div>'
