"""The API of the page: /generate and /models, documented on Gradio's API page."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Generator, Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from anyio import to_thread

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.edges import HIGH, LOW
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.requests import defaults
from fastdiff.requests.defaults import STRENGTH, STRENGTH_OF_SDXL, UPSCALE_MODE, UPSCALE_STRENGTH
from fastdiff.requests.syntax import EMPHASIS, SYNTAX
from fastdiff.runs.drawing import Progress, Run
from fastdiff.sampler_names import ETAS
from fastdiff.ui.drawing import Drawn, draw, prepare
from fastdiff.ui.parts.request import PREPROCESSOR, Limits, UncheckedRequest
from fastdiff.ui.progress import View
from fastdiff.ui.queueing.messages import PROBLEMS, explain, field_name
from fastdiff.ui.queueing.queue import Job
from fastdiff.ui.queueing.running import title_of
from fastdiff.ui.serving.owners import shelf_of
from fastdiff.ui.serving.store import Store, new_folder
from fastdiff.ui.shared import Shared, models_of

INTERVAL = 0.02  # seconds between two looks at a run


def add_api(page: gr.Blocks, shared: Shared, limits: Limits, store: Store) -> None:
    """Add the two API functions to `page`, which is being built."""

    async def generate(  # type: ignore[misc]  # Gradio takes the return type as the type of each yielded value
        model: str | None = None,
        label: str | int | None = None,
        seed: int | None = defaults.SEED,
        num_images: int = defaults.PAGE.pictures,
        steps: int | None = None,
        scheduler: str | None = None,
        eta: float | None = None,
        guidance_scale: float | None = None,
        width: int | None = None,
        height: int | None = None,
        batch_size: int | None = None,
        prompt: str | None = None,
        negative_prompt: str | None = None,
        clip_skip: int | None = None,
        precision: str | None = None,
        lora: list[str] | None = None,
        init_image: dict[str, Any] | None = None,
        strength: float | None = None,
        prompt_syntax: str | None = None,
        emphasis: str | None = None,
        guidance_start: float | None = None,
        guidance_stop: float | None = None,
        mask: dict[str, Any] | None = None,
        mask_blur: float | None = None,
        upscale: float | None = None,
        upscale_strength: float | None = None,
        upscale_mode: str | None = None,
        control: str | None = None,
        control_image: dict[str, Any] | None = None,
        control_preprocessor: str | None = None,
        canny_low: int | None = None,
        canny_high: int | None = None,
        control_scale: float | None = None,
        control_start: float | None = None,
        control_end: float | None = None,
        guess_mode: bool | None = None,
        ip_adapter: str | None = None,
        ip_adapter_image: dict[str, Any] | None = None,
        ip_adapter_scale: float | None = None,
        request: gr.Request | None = None,
    ) -> list[dict[str, Any]]:
        """Draw PNG files with their settings embedded. Picture i uses seed + i; the model supplies missing settings.

        A seed of -1 or None is random; the settings in the file have the real one.

        A model draws from a label or from a prompt; /models says which. Without `model`, a bundled model is used.

        The result grows picture by picture while the request runs.
        """
        asked = UncheckedRequest(
            model,
            label,
            seed,
            num_images,
            steps,
            scheduler,
            eta,
            guidance_scale,
            width,
            height,
            batch_size,
            prompt,
            negative_prompt,
            clip_skip,
            precision,
            lora,
            init_image,
            strength,
            prompt_syntax,
            emphasis,
            guidance_start,
            guidance_stop,
            mask,
            mask_blur,
            upscale,
            upscale_strength,
            upscale_mode,
            control,
            control_image,
            control_preprocessor,
            canny_low,
            canny_high,
            control_scale,
            control_start,
            control_end,
            guess_mode,
            ip_adapter,
            ip_adapter_image,
            ip_adapter_scale,
        )
        files, progress = [], gr.Progress()
        try:
            run = await to_thread.run_sync(prepare, asked, shared, limits)
            async for view in _drawn(asked, run, shared, limits, store, request):
                if view.step:
                    progress(view.fraction, desc=view.step)
                files = [gr.FileData(path=str(picture.path)).model_dump() for picture in view.drawn]
                yield files
        except PROBLEMS as error:
            raise gr.Error(explain(error), print_exception=False) from None

    def list_models() -> list[dict[str, Any]]:
        """List the available models: name, size in pixels, labels or prompts, and default settings."""
        return [_description(shared.catalogue, card) for card in shared.catalogue.cards()]

    call = gr.api(generate, api_name="generate", concurrency_limit=None)
    described = zip(inspect.signature(generate).parameters, page.fns[call["id"]].inputs, strict=False)
    _describe(dict(described), shared.catalogue, limits)
    gr.api(list_models, api_name="models", queue=False)


def _describe(parameters: Mapping[str, Any], catalogue: Catalogue, limits: Limits) -> None:
    """Give each parameter of /generate its name on the page, and a description with its range and its default."""
    for name, block in parameters.items():
        what, if_null = _parameters(catalogue)[name]
        block.label = field_name(name)
        default = if_null if block.value is None else block.value
        block._api_info["additional_description"] = f"{what}: {limits.wanted(name)}. Default: {default}."


def _parameters(catalogue: Catalogue) -> dict[str, tuple[str, Any]]:
    """Return for each parameter of /generate what it is, and the default that null stands for."""
    own = "the model's own"
    size = f"{own} training size, or the size of the start picture"
    guidance = "How closely to follow the label or the prompt (1 turns guidance off; with Z-Image 0 does)"
    etas = " and ".join(f"{eta:g} for {name}" for name, eta in ETAS.items())
    return {
        "model": ("A model that /models lists", f"{defaults.MODEL}, or {defaults.MODEL_OF_LABELS} if there is a label"),
        "label": ("A label of the model, by index or name", f"{own} first"),
        "seed": ("The seed of the first picture (picture i has seed + i)", None),
        "num_images": ("How many pictures", None),
        "steps": ("Denoising steps", f"{own}, else {defaults.STEPS}"),
        "scheduler": ("The sampler", own),
        "eta": ("Noise of each step", f"{own}, else {etas}"),
        "guidance_scale": (guidance, f"{own}, else {defaults.GUIDANCE_SCALE:g}"),
        "width": ("In pixels", size),
        "height": ("In pixels", size),
        "batch_size": ("Pictures computed together", catalogue.defaults.batch_size),
        "prompt": ("What to draw, if the model reads text", "none, but such a model needs one"),
        "negative_prompt": ("What to avoid, if the model reads text", "none"),
        "clip_skip": ("How many of the text encoder's last layers to skip", defaults.CLIP_SKIP),
        "precision": ("The model's weights", defaults.PRECISION),
        "lora": ("LoRAs that /models lists for the model", "none"),
        "init_image": ("The picture to start from, such as handle_file of Gradio's client returns", "none"),
        "strength": ("How much of the start picture changes", f"{STRENGTH}, or {STRENGTH_OF_SDXL} for SDXL"),
        "prompt_syntax": ("How the prompt is read", SYNTAX),
        "emphasis": ("How weights count in a weighted prompt", EMPHASIS),
        "guidance_start": ("The part of the run at which guidance starts", "0"),
        "guidance_stop": ("The part of the run at which guidance stops", "1"),
        "mask": ("A picture that is white where the start picture changes, given as init_image", "none"),
        "mask_blur": ("The radius of a blur of the mask, in pixels", "0"),
        "upscale": ("By how much to enlarge the picture", "1"),
        "upscale_strength": ("How much of the enlarged picture changes", f"{UPSCALE_STRENGTH}"),
        "upscale_mode": ("What is enlarged", UPSCALE_MODE),
        "control": ("A ControlNet that /models lists for the model", "none"),
        "control_image": (
            "The picture that the ControlNet reads, given as init_image",
            "none, but a ControlNet needs one",
        ),
        "control_preprocessor": ("What makes the control picture from it", PREPROCESSOR),
        "canny_low": ("The threshold for weak edges of canny", LOW),
        "canny_high": ("The threshold for strong edges of canny", HIGH),
        "control_scale": (
            "How much the ControlNet counts",
            "1; with a start picture 0.8, with a mask 0.5, or 1 for SDXL",
        ),
        "control_start": ("The part of the run at which the ControlNet starts", "0"),
        "control_end": ("The part of the run at which the ControlNet stops", "1"),
        "guess_mode": ("Whether to follow the control picture more than the prompt", "false"),
        "ip_adapter": ("An IP-Adapter that /models lists for the model", "none"),
        "ip_adapter_image": (
            "The picture that the IP-Adapter reads, given as init_image",
            "none, but an IP-Adapter needs one",
        ),
        "ip_adapter_scale": ("How much the IP-Adapter counts", "1"),
    }


async def _drawn(
    asked: UncheckedRequest, run: Run, shared: Shared, limits: Limits, store: Store, request: gr.Request | None
) -> AsyncIterator[View]:
    """Draw a run in its turn. Yields its view after each step. A client that leaves cancels the run."""
    owner = str(store.root) if request is None else str(shelf_of(store, request).folder)
    _folder(store, limits, request)  # raises if the quota is used up
    view, seen = View(has_previews=False), 0.0

    def steps() -> Generator[tuple[Progress, list[Drawn]], None, None]:
        yield from draw(run, shared, _folder(store, limits, request))

    title = title_of(asked.subject, len(run.cells))
    job = Job(owner, "API", title, view.follow(steps()), [view], models_of([run]))
    shared.queue.add(job, limits.waiting, limits.waiting_of_one)
    try:
        while not job.has_ended:
            shared.queue.active(owner)  # the client still listens
            if job.fraction != seen:
                seen = job.fraction
                yield view
            await asyncio.sleep(INTERVAL)
        if job.error is not None:
            raise job.error
        yield view
    finally:
        shared.queue.cancel(owner, job.id)


def _folder(store: Store, limits: Limits, request: gr.Request | None) -> Path:
    """Return the folder for new pictures. Clients of a shared server without a login get one kept for a day at most."""
    if request is None or (store.is_shared and request.username is None):
        return new_folder(limits.kept)
    return shelf_of(store, request).new_folder()


def _description(catalogue: Catalogue, card: ModelCard) -> dict[str, Any]:
    sampling = catalogue.default_sampling(card)
    return {
        "name": card.name,
        "size": list(card.size) if card.size else None,
        "labels": [card.label_name(label) for label in card.labels],
        "label_groups": {group: list(labels) for group, labels in card.info.label_groups.items()},
        "reads_text": card.reads_text,
        "controlnets": [*catalogue.controlnets.offered(card)],
        "ip_adapters": [*catalogue.ip_adapters.offered(card)],
        "loras": [*catalogue.option_files.loras(card)],
        "embeddings": [*catalogue.option_files.embeddings(card)],
        "steps": sampling.num_inference_steps,
        "scheduler": sampling.scheduler,
        "guidance_scale": card.info.guidance_scale,
    }
