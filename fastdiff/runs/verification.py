"""A model in fastdiff against the same model in diffusers, in float32, number by number.

Checks on the same inputs: the denoiser alone, at several timesteps and labels, a VAE alone, and, of a folder that has a
scheduler too, a few steps of sampling, where the reference is a loop written out over diffusers' model and scheduler
(its pipelines cannot guide a U-Net by labels).
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import fastdiff
from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import SCHEDULER_OPTIONS, SCHEDULERS, VALUE_FUNCTION
from fastdiff.errors import InputError, in_one_line
from fastdiff.extras import import_diffusers
from fastdiff.requests.completion import Cell, complete
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import load_pipeline

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch import device as Device

    from fastdiff.models.autoencoder import AutoencoderKL
    from fastdiff.models.denoiser import Denoiser
    from fastdiff.pipelines import Pipeline

FORWARD_TOLERANCE = 1e-4  # of one call of the denoiser
FINAL_TOLERANCE = 1e-3  # of the picture after the steps, in [-1, 1], or of the trajectory
TRAIN_STEPS = 1000  # of a model without a scheduler
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
    """Make every comparison for the model and sampling of `request`, in float32 whatever its dtype.

    The folder of a model without a scheduler is compared by its predictions alone. What fastdiff cannot load it refuses
    first, as it does when it samples. InputError also for what diffusers cannot load or run, and where diffusers is not
    installed; OutOfMemoryError, DeviceLostError.
    """
    request = replace(request, dtype="float32")
    folder = hub.resolve(request.model, revision=request.revision, variant=request.variant)
    if not (folder / "model_index.json").is_file():
        part = registry.read_denoiser_part(folder / "config.json")
        _check_labels(request.model, part.config.from_mapping(read_json(folder / "config.json"), folder))
        return _explained(request.model, functools.partial(_compare_model, request, folder, part, device))
    card = ModelCard.read(request.model, folder)
    _check_labels(card.name, card.config)
    if card.config.of_trajectories:
        request = replace(request, horizon=card.config.usual_size[1])
    request, cells = complete(request, card, COMMAND)
    return _explained(card.name, functools.partial(_compare_pipeline, card, request, cells, device))


def _explained(name: str, compare: Callable[[], Verification]) -> Verification:
    """Return what `compare` does; where the device fails, an error of one line."""
    from fastdiff.execution.devices import naming_lost_device
    from fastdiff.execution.memory import or_explain

    with naming_lost_device():
        return or_explain(
            compare,
            f"out of memory: verify holds {name} twice, for fastdiff and for diffusers, in float32; end what else "
            "runs on the device or give another one, such as --device cpu",
        )


def _compare_pipeline(card: ModelCard, request: Request, cells: Sequence[Cell], device: str) -> Verification:
    labels = [cell.label for cell in cells if cell.label is not None]
    diffusers = _import_diffusers()
    pipe = load_pipeline(card, request, device)
    reference = Reference(diffusers, card, request, pipe.scheduler_name)
    reference.to(pipe.device)
    models = card.name, pipe.denoiser, reference.denoiser
    choices = labels[:1] + [label for label in [card.info.null_label] if labels and label is not None]
    comparisons = [*_forwards(*models, card.num_train_timesteps, choices), _loop(pipe, reference, labels)]
    if pipe.value_function is not None:
        values = card.name, pipe.value_function, reference.value_function
        comparisons += _forwards(*values, card.num_train_timesteps, (), what="value")
    if pipe.vae is not None:
        comparisons += _halves(card, pipe.vae, reference.vae)
    return _verified(diffusers, card.name, pipe.device, comparisons)


def _compare_model(request: Request, folder: Path, part: registry.DenoiserPart, device: str) -> Verification:
    """Compare a model alone: a denoiser, or a value function."""
    from fastdiff.execution.devices import resolve_device
    from fastdiff.models.classes import DENOISERS

    diffusers = _import_diffusers()
    ours = DENOISERS[part.class_name].from_pretrained(folder, variant=request.variant, device=resolve_device(device))
    theirs = _load(getattr(diffusers, part.class_name), folder, request.variant).to(ours.device)
    choices = [0] if ours.config.takes_labels else []
    choices += [label for label in [ours.config.null_label] if label is not None]
    comparisons = list(_forwards(request.model, ours, theirs, TRAIN_STEPS, choices))
    return _verified(diffusers, request.model, ours.device, comparisons)


def _check_labels(name: str, config: DenoiserConfig) -> None:
    if config.class_embed_type is not None:
        raise InputError(f"{name}: verify knows no labels for class_embed_type {config.class_embed_type}")


def _import_diffusers() -> ModuleType:
    diffusers = import_diffusers("verify")
    diffusers.utils.logging.set_verbosity(logging.CRITICAL)  # what it logs of an error, the error says too
    diffusers.utils.logging.disable_progress_bar()
    return diffusers


def _verified(diffusers: ModuleType, name: str, device: "Device", comparisons: Sequence[Comparison]) -> Verification:
    versions = {"fastdiff": fastdiff.__version__, "diffusers": diffusers.__version__}
    return Verification(name, str(device), versions, comparisons)


class Reference:
    """The parts of a folder as diffusers' own loaders make them, float32, on the CPU until `to` is called."""

    def __init__(self, diffusers: ModuleType, card: ModelCard, request: Request, scheduler: str) -> None:
        """InputError for what diffusers refuses."""
        self.card, self.request = card, request
        denoiser = hub.component_folder(card.folder, card.denoiser.name)
        self.denoiser = _load(getattr(diffusers, card.denoiser.class_name), denoiser, request.variant)
        self.vae = self.value_function = None
        if "vae" in card.classes:
            self.vae = _load(diffusers.AutoencoderKL, card.folder / "vae", request.variant)
        if VALUE_FUNCTION.name in card.classes:
            self.value_function = _load(diffusers.UNet1DModel, card.folder / VALUE_FUNCTION.name, request.variant)
        folder = hub.component_folder(card.folder, "scheduler")
        with _refusals(f"diffusers cannot load {folder}"):
            kind, options = getattr(diffusers, SCHEDULERS[scheduler]), SCHEDULER_OPTIONS.get(scheduler, {})
            self.scheduler = kind.from_pretrained(folder, **options)

    def to(self, device: "Device") -> None:
        for model in filter(None, (self.denoiser, self.vae, self.value_function)):
            model.to(device)

    def sample(self, x_t: "Tensor", labels: Sequence[int], generator: "Generator") -> "Tensor":
        """x_0 after all steps from the noise x_t, of its shape; guided as Ho and Salimans 2022 (arXiv 2207.12598)."""
        import torch

        request, null_label = self.request, self.card.info.null_label
        scale = 1.0 if request.guidance_scale is None else request.guidance_scale
        options = {"eta": request.eta, "use_clipped_model_output": request.use_clipped_model_output}
        options = options if request.scheduler == "ddim" else {}
        classes = torch.tensor(labels, device=x_t.device) if labels else None
        null_classes = None if classes is None or null_label is None else torch.full_like(classes, null_label)
        self.scheduler.set_timesteps(request.num_inference_steps)
        # DDIM keeps the option in its config, and makes nothing of it
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
        """The output, of the shape of x_t, and the learned variance, which has no channels where there is none."""
        output = _predict(self.denoiser, x_t, t.to(x_t.device).expand(len(x_t)), classes)
        return output[:, : x_t.shape[1]], output[:, x_t.shape[1] :]


def _load(kind: Any, folder: Path, variant: str | None) -> Any:
    """A model of diffusers' class `kind`, float32. InputError for what diffusers refuses."""
    import torch

    options = {"variant": variant, "torch_dtype": torch.float32}
    with _refusals(f"diffusers cannot load {folder}"):
        model = kind.from_pretrained(folder, low_cpu_mem_usage=False, local_files_only=True, **options)
        return model.float().eval()  # of shards each tensor has kept its own dtype


def _predict(model: Any, x_t: "Tensor", t: "Tensor", classes: "Tensor | None", **prompt: Any) -> "Tensor":
    """The output of a model of either side, of which some take no labels."""
    labels = {} if classes is None else {"class_labels": classes}
    return model(x_t, t, **labels, **prompt).sample


def _prompt(ours: "Denoiser", count: int) -> dict[str, Any]:
    """A random text, and what goes with it, where the model is told one: arguments of its call."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    shapes = ours.config.prompt_shapes.items()
    given = {name: torch.randn(count, *shape, generator=generator).to(ours.device) for name, shape in shapes}
    text = {name: given.pop(name) for name in ("encoder_hidden_states",) if name in given}
    return text | ({"added_cond_kwargs": given} if given else {})


def _forwards(
    name: str, ours: "Denoiser", theirs: Any, steps: int, choices: Sequence[int], what: str = "forward"
) -> Iterator[Comparison]:
    """One call for each of five of the `steps` of training and, where there are labels, for each of these."""
    import torch

    x_t, prompt = _noise(ours.config, 2).to(ours.device), _prompt(ours, 2)
    for t in sorted({(steps - 1) * quarter // 4 for quarter in range(5)}):
        for label in choices or (None,):
            classes = None if label is None else torch.full((2,), label, device=ours.device)
            given = x_t, torch.full((2,), t, device=ours.device), classes
            with torch.inference_mode():
                output = _predict(ours, *given, **prompt)
                with _refusals(f"diffusers cannot run {name}"):
                    expected = _predict(theirs, *given, **prompt)
            of_label = "" if label is None else f" label={label}"
            yield _compare(f"{what} t={t}{of_label}", output, expected, FORWARD_TOLERANCE)


def _halves(card: ModelCard, ours: "AutoencoderKL", theirs: Any) -> Iterator[Comparison]:
    """Compare one decoding and one encoding, both of noise."""
    import torch

    z = _noise(card.config, 2).to(ours.device)
    sides = (ours.config.scale * side for side in z.shape[2:])
    x = torch.randn(2, ours.config.in_channels, *sides, generator=torch.Generator().manual_seed(_SEED)).to(ours.device)
    with torch.inference_mode(), _refusals(f"diffusers cannot run the VAE of {card.name}"):
        expected, moments = theirs.decode(z).sample, theirs.encode(x).latent_dist.parameters
    (sample,), (distribution,) = ours.decode(z), ours.encode(x)
    yield _compare("VAE decode", sample, expected, FORWARD_TOLERANCE)
    yield _compare("VAE encode", distribution.parameters, moments, FORWARD_TOLERANCE)


def _loop(pipe: "Pipeline", reference: Reference, labels: Sequence[int]) -> Comparison:
    """A few steps from one starting noise; a generator makes fastdiff draw step noise as diffusers does."""
    import torch

    request = reference.request
    x_T = _noise(reference.card.config, max(1, len(labels)))
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
    if last.trajectories is not None:
        return _compare(name, last.trajectories.trajectories, theirs, FINAL_TOLERANCE)
    return _compare(name, 2 * last.images - 1, theirs.clamp(-1, 1), FINAL_TOLERANCE)


@contextlib.contextmanager
def _refusals(problem: str) -> Iterator[None]:
    """Turn whatever diffusers raises, which is of any kind, into an InputError of one line, opening with `problem`.

    Not so where memory runs out or a GPU fails, which is not for the model's files to mend.
    """
    from fastdiff.execution.devices import is_lost
    from fastdiff.execution.memory import is_out_of_memory

    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or is_lost(error):
            raise
        raise InputError(f"{problem} ({in_one_line(error)}); save the model again with diffusers") from None


def _noise(config: DenoiserConfig, count: int) -> "Tensor":
    """Starting noise as diffusers has it, (N, C, H, W) or (N, C, L), float32 on the CPU."""
    import torch

    size = config.usual_size[-len(config.AXES) :]
    return torch.randn(count, config.sample_channels, *size, generator=torch.Generator().manual_seed(_SEED))


def _compare(what: str, ours: "Tensor", theirs: "Tensor", tolerance: float) -> Comparison:
    error = (ours.double() - theirs.to(ours.device).double()).abs().max().item()
    return Comparison(what, error, theirs.abs().max().item(), tolerance)
