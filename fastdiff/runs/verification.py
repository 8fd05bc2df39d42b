"""A model in fastdiff against the same model in diffusers, in float32, number by number.

Two checks on the same inputs: the denoiser alone, at several timesteps and labels, and a few steps of sampling, where
the reference is a loop written out over diffusers' model and scheduler (its pipelines cannot guide a U-Net by labels).
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.errors import InputError, in_one_line
from fastdiff.extras import import_diffusers
from fastdiff.requests.completion import complete
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model, load_pipeline

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch import device as Device

    from fastdiff.pipeline import Pipeline

FORWARD_TOLERANCE = 1e-4  # of one call of the denoiser
FINAL_TOLERANCE = 1e-3  # of the picture after the steps, in [-1, 1]
_SEED = 0


@dataclass(frozen=True)
class Comparison:
    """One check: max |fastdiff - diffusers|, and how much of it is allowed."""

    what: str
    error: float
    largest: float  # max |diffusers|
    tolerance: float  # absolute, and relative to `largest` where that is over 1

    @property
    def allowed(self) -> float:
        return self.tolerance * max(1.0, self.largest)

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # NaN does not pass


@dataclass(frozen=True)
class Verification:
    """All comparisons of a model."""

    model: str
    device: str
    versions: Mapping[str, str]  # of fastdiff and diffusers
    comparisons: Sequence[Comparison]

    @property
    def passed(self) -> bool:
        return all(comparison.passed for comparison in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        comparisons = [
            vars(comparison) | {"allowed": comparison.allowed, "passed": comparison.passed}
            for comparison in self.comparisons
        ]
        return {
            "model": self.model,
            "device": self.device,
            "versions": self.versions,
            "passed": self.passed,
            "comparisons": comparisons,
        }


def compare_with_diffusers(request: Request, device: str) -> Verification:
    """Make every comparison for the model, labels and sampling of `request`, in float32 whatever its dtype.

    What fastdiff cannot load it refuses first, as it does when it samples. InputError also for what diffusers cannot
    load or run, and where diffusers is not installed.
    """
    request = replace(request, dtype="float32")
    card = find_model(request)
    if card.config.class_embed_type is not None:
        raise InputError(f"{card.name}: verify knows no labels for class_embed_type {card.config.class_embed_type}")
    request, cells = complete(request, card, COMMAND)
    labels = [cell.label for cell in cells if cell.label is not None]
    diffusers = import_diffusers("verify")
    diffusers.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs of an error, the error says too
    diffusers.utils.logging.disable_progress_bar()
    pipe = load_pipeline(card, request, device)
    reference = Reference(diffusers, card, request, pipe.scheduler_name)
    return Verification(
        model=card.name,
        device=str(pipe.device),
        versions={"fastdiff": fastdiff.__version__, "diffusers": diffusers.__version__},
        comparisons=[*_forwards(pipe, reference, labels), _loop(pipe, reference, labels)],
    )


class Reference:
    """The parts of a folder as diffusers' own loaders make them, float32, on the CPU until `to` is called."""

    def __init__(self, diffusers: ModuleType, card: ModelCard, request: Request, scheduler: str) -> None:
        """InputError for what diffusers refuses."""
        self.card, self.request = card, request
        denoiser = hub.component_folder(card.folder, card.denoiser.name)
        self.denoiser = self._load(getattr(diffusers, card.denoiser.class_name), denoiser)
        self.vae = self._load(diffusers.AutoencoderKL, card.folder / "vae") if "vae" in card.classes else None
        folder = hub.component_folder(card.folder, "scheduler")
        with _refusals(f"diffusers cannot load {folder}"):
            self.scheduler = getattr(diffusers, SCHEDULERS[scheduler]).from_pretrained(folder)

    def _load(self, kind: Any, folder: Path) -> Any:
        """A model of diffusers' class `kind`."""
        import torch

        options = {"variant": self.request.variant, "torch_dtype": torch.float32}
        with _refusals(f"diffusers cannot load {folder}"):
            model = kind.from_pretrained(folder, low_cpu_mem_usage=False, local_files_only=True, **options)
            return model.float().eval()  # of shards each tensor has kept its own dtype

    def to(self, device: "Device") -> None:
        for model in filter(None, (self.denoiser, self.vae)):
            model.to(device)

    def sample(self, x_t: "Tensor", labels: Sequence[int], generator: "Generator") -> "Tensor":
        """x_0 (N, C, H, W) after all steps from the noise x_t; guided as Ho and Salimans 2022 (arXiv 2207.12598)."""
        import torch

        request, null_label = self.request, self.card.info.null_label
        scale = 1.0 if request.guidance_scale is None else request.guidance_scale
        options = {"eta": request.eta, "use_clipped_model_output": request.use_clipped_model_output}
        options = {} if request.scheduler == "ddpm" else options
        classes = torch.tensor(labels, device=x_t.device) if labels else None
        null_classes = None if classes is None or null_label is None else torch.full_like(classes, null_label)
        self.scheduler.set_timesteps(request.num_inference_steps)
        # DDIM keeps the option in its config, and makes nothing of it
        learned = request.scheduler == "ddpm" and self.scheduler.config.variance_type.startswith("learned")
        for t in self.scheduler.timesteps:
            eps, variance = self.predict(x_t, t, classes)
            if scale != 1:
                unguided, _ = self.predict(x_t, t, null_classes)
                eps = unguided + scale * (eps - unguided)
            output = torch.cat([eps, variance], dim=1) if learned else eps
            x_t = self.scheduler.step(output, t, x_t, generator=generator, **options).prev_sample
        return x_t

    def predict(self, x_t: "Tensor", t: "Tensor", classes: "Tensor | None") -> tuple["Tensor", "Tensor"]:
        """The output (N, C, H, W), and the learned variance (N, C, H, W), which has no channels where there is none."""
        output = self.denoiser(x_t, t.to(x_t.device).expand(len(x_t)), classes).sample
        return output[:, : x_t.shape[1]], output[:, x_t.shape[1] :]


def _forwards(pipe: "Pipeline", reference: Reference, labels: Sequence[int]) -> Iterator[Comparison]:
    """One call of the denoiser for each of five timesteps and, where there are labels, for one and the null label."""
    import torch

    x_t = _noise(reference, 2).to(pipe.device)
    last = reference.card.num_train_timesteps - 1
    null = reference.card.info.null_label
    choices = [None] if not labels else [labels[0]] if null is None else [labels[0], null]
    reference.to(pipe.device)
    for t in sorted({last * quarter // 4 for quarter in range(5)}):
        for label in choices:
            classes = None if label is None else torch.full((2,), label, device=pipe.device)
            given = x_t, torch.full((2,), t, device=pipe.device), classes
            with torch.inference_mode():
                ours = pipe.denoiser(*given).sample
                with _refusals(f"diffusers cannot run {reference.card.name}"):
                    theirs = reference.denoiser(*given).sample
            name = f"forward t={t}" + ("" if label is None else f" label={label}")
            yield _compare(name, ours, theirs, FORWARD_TOLERANCE)


def _loop(pipe: "Pipeline", reference: Reference, labels: Sequence[int]) -> Comparison:
    """A few steps from one starting noise; a generator makes fastdiff draw step noise as diffusers does."""
    import torch

    request = reference.request
    x_T = _noise(reference, max(1, len(labels)))
    *_, last = pipe.stream(
        num_inference_steps=request.num_inference_steps,
        class_labels=torch.tensor(labels) if labels else None,
        guidance_scale=request.guidance_scale,
        eta=request.eta,
        use_clipped_model_output=request.use_clipped_model_output,
        generator=torch.Generator().manual_seed(_SEED),
        latents=x_T.to(pipe.device),
        output_type="pt",
    )
    with torch.inference_mode(), _refusals(f"diffusers cannot run {reference.card.name}"):
        theirs = reference.sample(x_T.to(pipe.device), labels, torch.Generator().manual_seed(_SEED))
        if reference.vae is not None:
            theirs = reference.vae.decode(theirs / reference.vae.config.scaling_factor).sample
    name = f"{request.num_inference_steps} steps of {request.scheduler}, guidance {request.guidance_scale:g}"
    return _compare(name, 2 * last.images - 1, theirs.clamp(-1, 1), FINAL_TOLERANCE)


@contextlib.contextmanager
def _refusals(problem: str) -> Iterator[None]:
    """Turn whatever diffusers raises, which is of any kind, into an InputError of one line, opening with `problem`."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"{problem} ({in_one_line(error)}); save the model again with diffusers") from None


def _noise(reference: Reference, count: int) -> "Tensor":
    """Starting noise (N, C, H, W), float32 on the CPU."""
    import torch

    config = reference.card.config
    shape = (count, config.in_channels, *(config.trained_size or (64, 64)))
    return torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))


def _compare(what: str, ours: "Tensor", theirs: "Tensor", tolerance: float) -> Comparison:
    error = (ours.double() - theirs.to(ours.device).double()).abs().max().item()
    return Comparison(what, error, theirs.abs().max().item(), tolerance)
