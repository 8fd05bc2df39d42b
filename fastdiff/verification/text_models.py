"""Compare a text-to-image model in fastdiff with transformers and diffusers: each part, then the whole pipeline."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import SCHEDULER, ModelPart
from fastdiff.extras import import_peft, import_transformers
from fastdiff.requests.completion import check_steps
from fastdiff.requests.defaults import (
    LIBRARY,
    VERIFICATION_STEPS,
    ModelFacts,
    SamplingOptions,
    complete_sampling,
)
from fastdiff.requests.request import Request
from fastdiff.sampler_names import SCHEDULER_OPTIONS, SCHEDULERS
from fastdiff.verification.comparisons import (
    FORWARD_TOLERANCE,
    SEED,
    Comparison,
    Verification,
    compare,
    compare_ids,
    compare_pictures,
    forwards,
    halves,
    import_verified,
    load,
    load_single_file,
    noise,
    random_prompt,
    refusals,
)
from fastdiff.verification.loras import add_loras

if TYPE_CHECKING:
    from torch import Tensor

    from fastdiff.pipelines import TextToImagePipeline

PROMPT, NEGATIVE = "a photo of an astronaut riding a horse", "blurry"
TEXTS = (  # texts on which tokenizers are likely to differ
    "",
    PROMPT,
    "  Two   SPACES,\ttabs\nand lines ",
    "it's, we'll, I'D; rock'n'roll (1:2) [x] {y} <z> 3.14 50%",
    "naïve café, Straße, ÅNGSTRÖM, İstanbul, ﬁne e\u0301",
    "日本の富士山 и русский лес 한국어 العربية हिन्दी",
    "👩‍🚀🏳️‍🌈 emoji ✨️ and ☕",
    "<|startoftext|>special<|endoftext|> tokens",
    "0123456789 supercalifragilisticexpialidocious aaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!",
    "the end of a long text is cut: " + "cats and dogs, " * 60,
)


def compare_text_pipeline(card: ModelCard, request: Request, device: str) -> Verification:
    """Make all comparisons for a folder or a file of Stable Diffusion or SDXL; see `compare_with_diffusers`."""
    from fastdiff.pipelines import load_pipeline

    steps = request.num_inference_steps or VERIFICATION_STEPS
    check_steps(steps, card)
    libraries = [import_quiet_transformers(), import_verified()]
    libraries += [import_peft("verify --lora")] if request.lora else []
    pipe = cast("TextToImagePipeline", load_pipeline(card, request, device))
    assert pipe.vae is not None
    with warnings.catch_warnings():  # diffusers warns about old scheduler options that it changes
        warnings.simplefilter("ignore")
        theirs = load_theirs(card, request, pipe.scheduler_name, *libraries[:2])
        loras = add_loras(theirs, request, pipe.denoiser.config) if request.lora else []
        theirs.to(pipe.device)
        comparisons = [
            *_tokens(pipe, theirs),
            *_encoders(pipe, theirs),
            *_predictions(card, pipe, theirs),
            *halves(card.name, card.config, pipe.vae, theirs.vae),
            _pictures(pipe, theirs, card, steps),
        ]
    return Verification.of(card.name, pipe.device, libraries, comparisons, loras)


def import_quiet_transformers() -> ModuleType:
    """Return transformers without its messages. Raises InputError if it is not installed."""
    transformers = import_transformers("verify of a model that reads prompts")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    return transformers


def load_theirs(
    card: ModelCard, request: Request, scheduler: str, transformers: ModuleType, diffusers: ModuleType
) -> Any:
    """Load diffusers' pipeline of the model in float32 on the CPU. Raises InputError if diffusers cannot load it.

    Each part is loaded in a class from the registry, so that no other code that the folder names runs.
    """
    pipeline, libraries = card.pipeline, {"transformers": transformers, "diffusers": diffusers}
    options = {"requires_safety_checker": False, "add_watermarker": False}
    options |= {"force_zeros_for_empty_prompt": card.zeros_for_no_prompt}
    options |= {"requires_aesthetics_score": card.options.get("requires_aesthetics_score", False)}
    parts: dict[str, Any] = dict.fromkeys([*(part.name for part in pipeline.parts), *pipeline.unused])
    parts |= {name: value for name, value in options.items() if name in pipeline.options}
    for part in (*pipeline.denoisers, *pipeline.companions):
        if isinstance(part, ModelPart) and part.name in card.classes:
            kind = part.of_class(card.classes[part.name])
            parts[part.name] = _load_part(card, part.name, getattr(libraries[kind.library], kind.class_name), request)
    for part in card.tokenizers:
        with refusals(f"transformers cannot load {card.folder / part.name}"):
            kind = getattr(transformers, part.class_name)
            parts[part.name] = kind.from_pretrained(card.folder / part.name)
    folder = hub.component_folder(card.folder, SCHEDULER.name)
    with refusals(f"diffusers cannot load {folder}"):
        changes = dict(card.scheduler_changes)
        kind = getattr(diffusers, changes.pop("_class_name", card.classes[SCHEDULER.name]))
        parts[SCHEDULER.name] = kind.from_pretrained(folder, **changes)
        made = _assembled(getattr(diffusers, pipeline.name), card, parts)
        if scheduler != card.scheduler:
            kind, options = getattr(diffusers, SCHEDULERS[scheduler]), SCHEDULER_OPTIONS[scheduler]
            made.scheduler = kind.from_config(made.scheduler.config, **options)
    made.set_progress_bar_config(disable=True)
    return made


def _load_part(card: ModelCard, name: str, kind: Any, request: Request) -> Any:
    """Return a part in diffusers' or transformers' class. None for an encoder that `_assembled` reads from the file."""
    inside = card.weights.get(name)
    if inside is None:
        return load(kind, hub.component_folder(card.folder, name), request.variant)
    if not hasattr(kind, "from_single_file"):
        return None
    return load_single_file(kind, inside.path, card.folder, subfolder=name).eval()


def _assembled(kind: Any, card: ModelCard, parts: dict[str, Any]) -> Any:
    """Return diffusers' pipeline of these parts, with the text encoders of a single file."""
    if card.file is None:
        return kind(**parts)
    inside = [name for name in card.weights if parts[name] is None]
    parts = {name: part for name, part in parts.items() if name not in inside}
    made = load_single_file(kind, card.file, card.folder, **parts)
    for name in inside:
        getattr(made, name).eval()
    return made


def _tokens(pipe: "TextToImagePipeline", theirs: Any) -> Iterator[Comparison]:
    """Compare the token ids of TEXTS."""
    for name, ours in _named(pipe, pipe.encoders.tokenizers, "tokenizer"):
        pairs = [(ours(text).ids, _their_ids(getattr(theirs, name), [text])[0].tolist()) for text in TEXTS]
        yield compare_ids(f"{name} ids", pairs)


def _their_ids(tokenizer: Any, texts: Sequence[str]) -> "Tensor":
    """Return the ids (N, L) as diffusers' pipelines make them."""
    options = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    with refusals("transformers cannot run the tokenizer"):
        return tokenizer(list(texts), return_tensors="pt", **options).input_ids


def _encoders(pipe: "TextToImagePipeline", theirs: Any) -> Iterator[Comparison]:
    """Compare all outputs of each text encoder for a few texts."""
    import torch

    for name, ours in _named(pipe, pipe.encoders.models, "text_encoder"):
        ids = _their_ids(getattr(theirs, name.replace("text_encoder", "tokenizer")), TEXTS[:4]).to(pipe.device)
        output = ours(ids, output_hidden_states=True)
        with torch.inference_mode(), refusals(f"transformers cannot run the {name}"):
            expected = getattr(theirs, name)(ids, output_hidden_states=True)
        pooled = "text_embeds" if hasattr(output, "text_embeds") else "pooler_output"
        for what in ("hidden_states", "last_hidden_state", pooled):
            mine, other = getattr(output, what), getattr(expected, what)
            if what == "hidden_states":
                mine, other = torch.stack(mine), torch.stack(other)
            yield compare(f"{name} {what}", mine, other, FORWARD_TOLERANCE)


def _named(pipe: "TextToImagePipeline", parts: Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, part) for each text encoder or each tokenizer: `name` for the first, with _2 for the second."""
    for model, part in zip(pipe.encoders.models, parts, strict=True):
        yield model.part.name.replace("text_encoder", name), part


def _predictions(card: ModelCard, pipe: "TextToImagePipeline", theirs: Any) -> Iterator[Comparison]:
    """Compare forward passes of the U-Nets, with a prompt and a negative prompt."""
    steps, prompt = card.num_train_timesteps, encoded_prompts(pipe)
    return forwards(card.name, pipe.denoiser, theirs.unet, steps, what="U-Net", prompt=prompt)


def encoded_prompts(pipe: "TextToImagePipeline") -> dict[str, Any]:
    """Return arguments of a U-Net call: an encoded prompt and an encoded negative prompt."""
    import torch

    from fastdiff.pipelines.sizes import SCORES

    given = random_prompt(pipe.denoiser.config, 2, pipe.device)
    if not pipe.encoders.models:
        return given
    encoded = [pipe.encoders.encode([text] * len(pipe.encoders.models)) for text in (PROMPT, NEGATIVE)]
    given["encoder_hidden_states"] = torch.stack([each.text for each in encoded])
    if pipe.encoders.of_sdxl:
        added = given["added_cond_kwargs"]
        added["text_embeds"] = torch.stack([each.pooled for each in encoded if each.pooled is not None])
        last = (SCORES["aesthetic_score"],) if pipe.encoders.of_refiner else (512, 512)
        added["time_ids"] = torch.tensor([[512.0, 512, 0, 0, *last]] * 2, device=pipe.device)
    return given


def _pictures(pipe: "TextToImagePipeline", theirs: Any, card: ModelCard, steps: int) -> Comparison:
    """Compare a picture after a few guided steps. With a generator fastdiff draws the step noise as diffusers does."""
    import torch

    sampling = complete_sampling(
        SamplingOptions(pipe.scheduler_name, steps), ModelFacts.of(card), LIBRARY, labelled=False
    )
    begins = _begins(pipe, card)

    def drawn(pipeline: Any) -> "Tensor":
        return pipeline(
            **_prompts(pipe),
            **{name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in begins.items()},
            num_inference_steps=steps,
            guidance_scale=sampling.guidance_scale,
            eta=sampling.eta or 0.0,
            generator=torch.Generator().manual_seed(SEED),
            output_type="pt",
        ).images

    what = f"{steps} steps of {pipe.scheduler_name}, guidance {sampling.guidance_scale:g}"
    return compare_pictures(what, card.name, pipe, theirs, drawn)


def _begins(pipe: "TextToImagePipeline", card: ModelCard) -> dict[str, Any]:
    """Return the arguments of a pipeline call that it begins with: noise, and a picture and a mask if it needs them."""
    import torch

    x_T = noise(card.config, 1)[:, : card.config.state_channels].to(pipe.device)
    inpaints = card.pipeline.name.endswith("InpaintPipeline")
    if not inpaints and not card.pipeline.name.endswith("Img2ImgPipeline"):
        return {"latents": x_T}
    height, width = (pipe.scale * side for side in x_T.shape[2:])
    image = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(SEED))
    if not inpaints:
        return {"image": image, "strength": 1.0}
    mask = torch.zeros(1, 1, height, width)
    mask[..., : width // 2] = 1
    sizes = {"height": height, "width": width}
    return {"image": image, "mask_image": mask, "strength": 1.0, "latents": x_T} | sizes


def _prompts(pipe: "TextToImagePipeline") -> dict[str, Any]:
    """Return arguments of a pipeline call: a prompt and a negative prompt, as embeddings without text encoders."""
    if pipe.encoders.models:
        return {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    given = random_prompt(pipe.denoiser.config, 2, pipe.device)
    text, pooled = given["encoder_hidden_states"], given["added_cond_kwargs"]["text_embeds"]
    embeds = {"prompt_embeds": text[:1], "negative_prompt_embeds": text[1:]}
    return embeds | {"pooled_prompt_embeds": pooled[:1], "negative_pooled_prompt_embeds": pooled[1:]}
