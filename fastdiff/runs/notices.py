"""Lines that a run says before it draws. Imports no torch: tokenizers are read, and so found wanting, at once."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.runs.drawing import Run
from fastdiff.text.tokenizer import CLIPTokenizer

if TYPE_CHECKING:
    import torch


def find_notices(run: Run) -> list[str]:
    """Name the model's parts that are not run, a negative prompt without effect, and the ends of prompts that are cut.

    InputError for a tokenizer whose files are missing or damaged.
    """
    lines = [run.card.notice] if run.card.notice else []
    if not run.request.prompt:
        return lines
    tokenizers = [CLIPTokenizer(run.card.folder / part.name) for part in run.card.tokenizers]
    texts = [("prompt", prompt) for prompt in run.request.prompt]
    negative, reason = run.request.negative_prompt, _why_unguided(run)
    if negative and reason:
        lines.append(f"negative prompt: without effect, as {reason}")
    elif negative:
        texts.append(("negative prompt", negative))
    return [*lines, *_cut(texts, tokenizers)]


def find_device_notices(device: "torch.device") -> list[str]:
    """Say that the fast kernels of the device are off, and what to do, where they are off. Imports torch."""
    from fastdiff.kernels.plans import confirmation

    line = confirmation.notice(device)
    return [] if line is None else [line]


def _why_unguided(run: Run) -> str | None:
    config = run.card.config
    if isinstance(config, UNet2DConditionConfig) and config.time_cond_proj_dim is not None:
        return f"{run.card.name} is told the guidance scale, and guided by nothing else"
    scale = run.request.guidance_scale
    return f"nothing is guided at cfg-scale {scale:g}" if scale is not None and scale <= 1 else None


def _cut(texts: Sequence[tuple[str, str]], tokenizers: Sequence[CLIPTokenizer]) -> Iterator[str]:
    """Yield the line of each named text that is too long for a tokenizer; the library logs the same."""
    for name, text in texts:
        warnings = (tokenizer(text).warning(name) for tokenizer in tokenizers)
        yield from dict.fromkeys(filter(None, warnings))
