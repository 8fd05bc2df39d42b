"""`fastdiff verify`: compare a model in fastdiff with the same model in diffusers, in float32, on the same inputs.

It compares the denoiser at several timesteps and labels, the VAE, and, if the folder has a scheduler, a few steps of
sampling. The reference for sampling is a loop over diffusers' model and scheduler, because no diffusers pipeline guides
a U-Net by labels. `text_models` compares text-to-image models.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import VALUE_FUNCTION
from fastdiff.errors import InputError
from fastdiff.requests.completion import Cell, complete
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from fastdiff.sampler_names import ETAS, SCHEDULER_OPTIONS, SCHEDULERS
from fastdiff.verification.caption_models import compare_caption_pipeline
from fastdiff.verification.comparisons import (
    FINAL_TOLERANCE,
    SEED,
    TRAIN_STEPS,
    Comparison,
    Verification,
    check_inputs,
    compare,
    explained,
    forwards,
    halves,
    import_verified,
    load,
    lone_model,
    noise,
    predict,
    refusals,
)
from fastdiff.verification.text_models import compare_text_pipeline

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch import device as Device

    from fastdiff.pipelines import Pipeline


def compare_with_diffusers(request: Request, device: str) -> Verification:
    """Make all comparisons for the model and the sampling options of `request`, in float32 whatever its dtype.

    A model without a scheduler is compared by its forward passes alone. A model that fastdiff cannot load is refused
    first, with the same error as in sampling.

    Raises:
        InputError: fastdiff or diffusers cannot load or run the model, or diffusers is not installed.
        OutOfMemoryError: the models do not fit in memory.
        DeviceLostError: the GPU fails.
    """
    request = replace(request, dtype="float32")
    if (folder := lone_model(request)) is not None:
        if request.lora:
            raise InputError(f"lora: {request.model} is a model alone; give the folder of its pipeline")
        part = registry.read_denoiser_part(folder / "config.json")
        check_inputs("verify", request.model, part.config.from_mapping(read_json(folder / "config.json"), folder))
        return explained(request.model, functools.partial(_compare_model, request, folder, part, device))
    card = find_model(request)
    if card.reads_captions:
        return explained(card.name, functools.partial(compare_caption_pipeline, card, request, device))
    check_inputs("verify", card.name, card.config)
    if card.reads_text:
        return explained(card.name, functools.partial(compare_text_pipeline, card, request, device))
    if card.config.of_trajectories:
        request = replace(request, horizon=card.config.usual_size[1])
    request, cells = complete(request, card, COMMAND)
    return explained(card.name, functools.partial(_compare_pipeline, card, request, cells, device))


def _compare_pipeline(card: ModelCard, request: Request, cells: Sequence[Cell], device: str) -> Verification:
    from fastdiff.pipelines import TrajectoryPipeline, load_pipeline

    labels = [cell.label for cell in cells if cell.label is not None]
    diffusers = import_verified()
    pipe = load_pipeline(card, request, device)
    reference = Reference(diffusers, card, request, pipe.scheduler_name)
    reference.to(pipe.device)
    models = card.name, pipe.denoiser, reference.denoiser
    choices = labels[:1] + [label for label in [card.info.null_label] if labels and label is not None]
    comparisons = [*forwards(*models, card.num_train_timesteps, choices), _loop(pipe, reference, labels)]
    if isinstance(pipe, TrajectoryPipeline) and pipe.value_function is not None:
        values = card.name, pipe.value_function, reference.value_function
        comparisons += forwards(*values, card.num_train_timesteps, (), what="value")
    if (vae := pipe.components.get(registry.VAE.name)) is not None:
        comparisons += halves(card.name, card.config, vae, reference.vae)
    return Verification.of(card.name, pipe.device, [diffusers], comparisons)


def _compare_model(request: Request, folder: Path, part: registry.DenoiserPart, device: str) -> Verification:
    """Compare a single model: a denoiser or a value function."""
    from fastdiff.execution.devices import resolve_device
    from fastdiff.models.classes import model_class
    from fastdiff.models.denoiser import Denoiser

    diffusers = import_verified()
    kind = model_class(part, Denoiser)
    ours = kind.from_pretrained(folder, variant=request.variant, device=resolve_device(device))
    theirs = load(getattr(diffusers, part.class_name), folder, request.variant).to(ours.device)
    choices = [0] if ours.config.takes_labels else []
    choices += [label for label in [ours.config.null_label] if label is not None]
    comparisons = list(forwards(request.model, ours, theirs, TRAIN_STEPS, choices))
    return Verification.of(request.model, ours.device, [diffusers], comparisons)


class Reference:
    """The parts of a folder in diffusers' classes, loaded by diffusers, in float32, on the CPU until `to` is called."""

    def __init__(self, diffusers: ModuleType, card: ModelCard, request: Request, scheduler: str) -> None:
        """Load the parts. Raises InputError if diffusers cannot load one."""
        self.card, self.request = card, request
        denoiser = hub.component_folder(card.folder, card.denoiser.name)
        self.denoiser = load(getattr(diffusers, card.denoiser.class_name), denoiser, request.variant)
        self.vae = self.value_function = None
        if "vae" in card.classes:
            self.vae = load(getattr(diffusers, card.classes["vae"]), card.folder / "vae", request.variant)
        if VALUE_FUNCTION.name in card.classes:
            self.value_function = load(diffusers.UNet1DModel, card.folder / VALUE_FUNCTION.name, request.variant)
        folder = hub.component_folder(card.folder, "scheduler")
        with refusals(f"diffusers cannot load {folder}"):
            kind, options = getattr(diffusers, SCHEDULERS[scheduler]), SCHEDULER_OPTIONS[scheduler]
            self.scheduler = kind.from_pretrained(folder, **options)

    def to(self, device: "Device") -> None:
        for model in filter(None, (self.denoiser, self.vae, self.value_function)):
            model.to(device)

    def sample(self, x_t: "Tensor", labels: Sequence[int], generator: "Generator") -> "Tensor":
        """Return x_0, with the shape of the noise x_t; guided as in Ho and Salimans 2022 (arXiv 2207.12598)."""
        import torch

        request, null_label = self.request, self.card.info.null_label
        scale = 1.0 if request.guidance_scale is None else request.guidance_scale
        options = {"eta": request.eta} if request.scheduler in ETAS else {}
        if request.scheduler == "ddim":
            options["use_clipped_model_output"] = request.use_clipped_model_output
        classes = torch.tensor(labels, device=x_t.device) if labels else None
        null_classes = None if classes is None or null_label is None else torch.full_like(classes, null_label)
        self.scheduler.set_timesteps(request.num_inference_steps)
        # DDIM has variance_type in its config, but ignores it.
        learned = request.scheduler == "ddpm" and self.scheduler.config.variance_type.startswith("learned")
        x_t = x_t * self.scheduler.init_noise_sigma
        for t in self.scheduler.timesteps:
            x = self.scheduler.scale_model_input(x_t, t)
            eps, variance = self.predict(x, t, classes)
            if scale != 1:
                unguided, _ = self.predict(x, t, null_classes)
                eps = unguided + scale * (eps - unguided)
            output = torch.cat([eps, variance], dim=1) if learned else eps
            x_t = self.scheduler.step(output, t, x_t, generator=generator, **options).prev_sample
        return x_t

    def predict(self, x_t: "Tensor", t: "Tensor", classes: "Tensor | None") -> tuple["Tensor", "Tensor"]:
        """Return the output, with the shape of x_t, and the learned variance, with no channels if there is none."""
        output = predict(self.denoiser, x_t, t.to(x_t.device).expand(len(x_t)), classes)
        return output[:, : x_t.shape[1]], output[:, x_t.shape[1] :]


def _loop(pipe: "Pipeline", reference: Reference, labels: Sequence[int]) -> Comparison:
    """Compare a few steps from the same noise. With a generator fastdiff draws the step noise as diffusers does."""
    import torch

    request = reference.request
    x_T = noise(reference.card.config, max(1, len(labels)))
    *_, last = pipe.stream(
        num_inference_steps=request.num_inference_steps,
        class_labels=torch.tensor(labels) if labels else None,
        guidance_scale=request.guidance_scale,
        eta=request.eta,
        use_clipped_model_output=request.use_clipped_model_output,
        generator=torch.Generator().manual_seed(SEED),
        latents=x_T.to(pipe.device),
        output_type="pt",
    )
    with torch.inference_mode(), refusals(f"diffusers cannot run {reference.card.name}"):
        theirs = reference.sample(x_T.to(pipe.device), labels, torch.Generator().manual_seed(SEED))
        if reference.vae is not None:
            theirs = reference.vae.decode(theirs / reference.vae.config.scaling_factor).sample
    name = f"{request.num_inference_steps} steps of {request.scheduler}, guidance {request.guidance_scale:g}"
    if last.trajectories is not None:
        return compare(name, last.trajectories.trajectories, theirs, FINAL_TOLERANCE)
    return compare(name, 2 * last.images - 1, theirs.clamp(-1, 1), FINAL_TOLERANCE)
