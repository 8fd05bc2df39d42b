"""Notices that a run prints before it draws. Imports no torch, so a damaged tokenizer is reported at once."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastdiff.arguments import shown
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.requests.png import Recorded, numerics_notice
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run
from fastdiff.runs.model_files import other_file_notices
from fastdiff.runs.option_files.controlnets import changed_controlnets
from fastdiff.runs.option_files.embeddings import changed_embeddings, tokenizers_of
from fastdiff.runs.option_files.inputs import dropped_mask
from fastdiff.runs.option_files.ip_adapters import changed_ip_adapters
from fastdiff.runs.option_files.loras import changed_loras
from fastdiff.text.loading import Tokenizer

if TYPE_CHECKING:
    import torch

EMPTY = "prompt: empty, so no text says what to draw"
_LORA = re.compile(r"<(?:lora|lyco):[^<>\n]{1,100}>")  # as A1111 writes them into a prompt


def find_notices(run: Run) -> list[str]:
    """Return notices of parts that are not run, LoRA tags, empty and cut prompts, negative prompts without effect.

    InputError for a tokenizer whose files are missing or damaged, and for an embedding whose token it refuses.
    """
    lines = run.card.notices
    if not run.request.prompt:
        return lines
    tokenizers = tokenizers_of(run.request, run.card)
    texts = [("prompt", prompt) for prompt in run.request.prompt]
    if not all(text.strip() for text in run.request.prompt):
        lines.append(EMPTY)
    negative, reason = run.request.negative_prompt, _why_unguided(run)
    if negative and reason:
        lines.append(f"negative prompt: no effect, because {reason}")
    elif negative:
        texts.append(("negative prompt", negative))
    if run.request.prompt_syntax == "weighted":  # the model reads all of it, and its LoRA tags
        return lines
    return [*lines, *_lora_tags([text for _, text in texts], run.card), *_cut(texts, tokenizers)]


def find_source_notices(source: Recorded | None, request: Request) -> list[str]:
    """Return notices if the PNG that `request` repeats has other numerics or other files."""
    if source is None:
        return []
    numerics = numerics_notice(source.settings, source.path)
    files = *other_file_notices(source, request), *changed_embeddings(source, request)
    files = *files, *changed_loras(source, request), *changed_controlnets(source, request)
    files = *files, *changed_ip_adapters(source, request)
    return [*filter(None, [numerics]), *dropped_mask(source, request), *files]


def find_device_notices(device: "torch.device") -> list[str]:
    """Return a notice if the fast kernels of the device are off, with what to do. Imports torch."""
    from fastdiff.kernels.plans import confirmation

    line = confirmation.notice(device)
    return [] if line is None else [line]


def _why_unguided(run: Run) -> str | None:
    config = run.card.config
    if isinstance(config, UNet2DConditionConfig) and config.time_cond_proj_dim is not None:
        return f"{run.card.name} takes the guidance scale as an input and has no unconditional half"
    scale = run.request.guidance_scale
    most = 0 if run.card.reads_captions else 1  # of scales that are no guidance
    return f"cfg-scale {scale:g} is no guidance" if scale is not None and scale <= most else None


def _lora_tags(texts: Sequence[str], card: ModelCard) -> list[str]:
    """Return a line that names the LoRA tags in `texts`, if there are any."""
    tags = list(dict.fromkeys(tag for text in texts for tag in _LORA.findall(text)))
    if not tags:
        return []
    others = f" and {len(tags) - 1} more" if len(tags) > 1 else ""
    remedy = "give its file with --lora" + ("" if card.reads_captions else ", and --prompt-syntax weighted")
    return [f"prompt: {shown(tags[0])}{others}: it is drawn as text; {remedy}"]


def _cut(texts: Sequence[tuple[str, str]], tokenizers: Sequence[Tokenizer]) -> Iterator[str]:
    """Yield a line for each named text that is too long for a tokenizer. The library logs the same line."""
    for name, text in texts:
        warnings = (tokenizer(tokenizer.expand(text)).warning(name) for tokenizer in tokenizers)
        yield from dict.fromkeys(filter(None, warnings))
