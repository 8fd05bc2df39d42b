"""Compare Z-Image in fastdiff with transformers and diffusers: each part, then the whole pipeline."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.extras import import_peft
from fastdiff.requests.completion import check_steps
from fastdiff.requests.defaults import VERIFICATION_STEPS
from fastdiff.requests.request import Request
from fastdiff.verification.comparisons import (
    FORWARD_TOLERANCE,
    SEED,
    Comparison,
    Verification,
    compare,
    compare_ids,
    compare_pictures,
    halves,
    import_verified,
    noise,
    refusals,
)
from fastdiff.verification.loras import add_loras
from fastdiff.verification.text_models import NEGATIVE, PROMPT, TEXTS, import_quiet_transformers, load_theirs

if TYPE_CHECKING:
    from torch import Tensor

    from fastdiff.pipelines import ZImagePipeline

GUIDANCE = 4.0


def compare_caption_pipeline(card: ModelCard, request: Request, device: str) -> Verification:
    """Make all comparisons for a folder of Z-Image; see `compare_with_diffusers`."""
    from fastdiff.pipelines import load_pipeline

    steps = request.num_inference_steps or VERIFICATION_STEPS
    check_steps(steps, card)
    libraries = [import_quiet_transformers(), import_verified()]
    libraries += [import_peft("verify --lora")] if request.lora else []
    pipe = cast("ZImagePipeline", load_pipeline(card, request, device))
    assert pipe.vae is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = load_theirs(card, request, pipe.scheduler_name, *libraries[:2])
        theirs = libraries[1].ZImagePipeline(**theirs.components)  # the folder may name another class of these parts
        theirs.set_progress_bar_config(disable=True)
        loras = add_loras(theirs, request, pipe.denoiser.config) if request.lora else []
        theirs.to(pipe.device)
        comparisons = [
            _tokens(pipe, theirs),
            _states(pipe, theirs),
            *_predictions(pipe, theirs, card),
            *halves(card.name, card.config, pipe.vae, theirs.vae),
            *(_pictures(pipe, theirs, card, steps, guidance) for guidance in (0.0, GUIDANCE)),
        ]
    return Verification.of(card.name, pipe.device, libraries, comparisons, loras)


def _tokens(pipe: "ZImagePipeline", theirs: Any) -> Comparison:
    """Compare the token ids of TEXTS."""
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
    with refusals("transformers cannot run the tokenizer"):
        chats = [theirs.tokenizer.apply_chat_template([{"role": "user", "content": text}], **options) for text in TEXTS]
        expected = [theirs.tokenizer(chat, truncation=True, max_length=512).input_ids for chat in chats]
    return compare_ids(
        "tokenizer ids", [(pipe.tokenizer(text).ids, ids) for text, ids in zip(TEXTS, expected, strict=True)]
    )


def _states(pipe: "ZImagePipeline", theirs: Any) -> Comparison:
    """Compare the states of a text that the transformer reads."""
    import torch

    ids = torch.tensor([pipe.tokenizer(PROMPT).ids])
    with torch.inference_mode(), refusals("transformers cannot run the text encoder"):
        expected = theirs.text_encoder(ids.to(pipe.device), output_hidden_states=True).hidden_states[-2]
    return compare("text_encoder states", pipe.text_encoder.penultimate_states(ids), expected, FORWARD_TOLERANCE)


def _predictions(pipe: "ZImagePipeline", theirs: Any, card: ModelCard) -> Iterator[Comparison]:
    """Compare forward passes of the transformer, for two pictures with captions of different lengths."""
    import torch

    x = [*noise(card.config, 2).to(pipe.device)[:, :, None]]
    texts = (PROMPT, NEGATIVE)
    captions = [pipe.text_encoder.penultimate_states(torch.tensor([pipe.tokenizer(text).ids]))[0] for text in texts]
    for quarter in range(5):
        t = torch.full((2,), quarter / 4, device=pipe.device)
        ours = torch.stack(pipe.transformer(x, t, captions).sample)
        with torch.inference_mode(), refusals(f"diffusers cannot run {card.name}"):
            expected = torch.stack(theirs.transformer(x, t, captions, return_dict=False)[0])
        yield compare(f"transformer t={quarter / 4:g}", ours, expected, FORWARD_TOLERANCE)


def _pictures(pipe: "ZImagePipeline", theirs: Any, card: ModelCard, steps: int, guidance: float) -> Comparison:
    """Compare a picture after a few steps."""
    import torch

    latents = noise(card.config, 1).to(pipe.device)
    height, width = (pipe.scale * side for side in latents.shape[2:])

    def drawn(pipeline: Any) -> "Tensor":
        return pipeline(
            [PROMPT],
            negative_prompt=[NEGATIVE],
            height=height,
            width=width,
            latents=latents.clone(),
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(SEED),
            output_type="pt",
        ).images

    what = f"{steps} steps of {pipe.scheduler_name}, guidance {guidance:g}"
    return compare_pictures(what, card.name, pipe, theirs, drawn)
