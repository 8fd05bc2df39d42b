"""`fastdiff verify`: a model in fastdiff against the same model in diffusers, in float32, number by number.

Two checks on the same inputs: the denoiser alone, at several timesteps and labels, and a few steps of sampling, where
the reference is a loop written out over diffusers' model and scheduler (its pipelines cannot guide a U-Net by labels).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.registry import SCHEDULERS
from fastdiff.errors import InputError
from fastdiff.extras import import_diffusers
from fastdiff.requests.request import ModelCard, Request, complete
from fastdiff.runs.drawing import load_pipeline

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


def run(args: argparse.Namespace) -> int:
    """Print every comparison; 0 where all are within tolerance, else 1. InputError for what cannot be loaded."""
    request = Request.from_flags(vars(args) | {"dtype": "float32", "num_images": 1})
    folder = hub.resolve(request.model, revision=request.revision, variant=request.variant)
    card = ModelCard.read(request.model, folder)
    if card.config.class_embed_type is not None:
        raise InputError(f"{card.name}: verify knows no labels for class_embed_type {card.config.class_embed_type}")
    request, cells = complete(request, card)
    labels = [label for _, label in cells if label is not None]
    diffusers = import_diffusers("verify")
    diffusers.utils.logging.set_verbosity_error()
    reference = Reference(diffusers, card, request)
    pipe = load_pipeline(card, request, args.device)
    comparisons = [*_forwards(pipe, reference, labels), _loop(pipe, reference, labels)]
    report = {
        "model": card.name,
        "device": str(pipe.device),
        "versions": {"fastdiff": fastdiff.__version__, "diffusers": reference.diffusers.__version__},
        "passed": all(comparison.passed for comparison in comparisons),
        "comparisons": [
            vars(comparison) | {"allowed": comparison.allowed, "passed": comparison.passed}
            for comparison in comparisons
        ],
    }
    print(json.dumps(report) if args.json else _as_table(report))
    return 0 if report["passed"] else 1


class Reference:
    """The denoiser and scheduler of a folder as diffusers loads them, float32, on the CPU until `to` is called."""

    def __init__(self, diffusers: ModuleType, card: ModelCard, request: Request):
        import torch

        self.diffusers, self.card, self.request = diffusers, card, request
        self.denoiser = (
            getattr(diffusers, card.denoiser.class_name)
            .from_pretrained(
                hub.component_folder(card.folder, card.denoiser.name),
                variant=request.variant,
                torch_dtype=torch.float32,
                low_cpu_mem_usage=False,
            )
            .eval()
        )
        kind = getattr(diffusers, SCHEDULERS[request.scheduler])
        self.scheduler = kind.from_pretrained(hub.component_folder(card.folder, "scheduler"))

    def sample(self, x_t, labels: Sequence[int], generator):
        """x_0 (N, C, H, W) after all steps from the noise x_t; guided as Ho and Salimans 2022 (arXiv 2207.12598)."""
        import torch

        request, null_label = self.request, self.card.info.null_label
        options = {"eta": request.eta, "use_clipped_model_output": request.use_clipped_model_output}
        options = {} if request.scheduler == "ddpm" else options
        classes = torch.tensor(labels, device=x_t.device) if labels else None
        self.scheduler.set_timesteps(request.num_inference_steps)
        # DDIM keeps the option in its config, and makes nothing of it
        learned = request.scheduler == "ddpm" and self.scheduler.config.variance_type.startswith("learned")
        for t in self.scheduler.timesteps:
            eps, variance = self.predict(x_t, t, classes)
            if request.guidance_scale != 1:
                unguided, _ = self.predict(x_t, t, torch.full_like(classes, null_label))
                eps = unguided + request.guidance_scale * (eps - unguided)
            output = torch.cat([eps, variance], dim=1) if learned else eps
            x_t = self.scheduler.step(output, t, x_t, generator=generator, **options).prev_sample
        return x_t

    def predict(self, x_t, t, classes):
        """The output (N, C, H, W), and the learned variance (N, C, H, W), which has no channels where there is none."""
        output = self.denoiser(x_t, t.to(x_t.device).expand(len(x_t)), classes).sample
        return output[:, : x_t.shape[1]], output[:, x_t.shape[1] :]


def _forwards(pipe, reference: Reference, labels: Sequence[int]) -> Iterator[Comparison]:
    """One call of the denoiser for each of five timesteps and, where there are labels, for one and the null label."""
    import torch

    x_t = _noise(reference, 2).to(pipe.device)
    last = reference.card.num_train_timesteps - 1
    null = reference.card.info.null_label
    choices = [None] if not labels else [labels[0]] if null is None else [labels[0], null]
    reference.denoiser.to(pipe.device)
    for t in sorted({last * quarter // 4 for quarter in range(5)}):
        for label in choices:
            classes = None if label is None else torch.full((2,), label, device=pipe.device)
            given = x_t, torch.full((2,), t, device=pipe.device), classes
            with torch.inference_mode():
                ours, theirs = (model(*given).sample for model in (pipe.denoiser, reference.denoiser))
            name = f"forward t={t}" + ("" if label is None else f" label={label}")
            yield _compare(name, ours, theirs, FORWARD_TOLERANCE)


def _loop(pipe, reference: Reference, labels: Sequence[int]) -> Comparison:
    """A few steps from one starting noise; a generator makes fastdiff draw step noise as diffusers does."""
    import torch

    request = reference.request
    x_T = _noise(reference, max(1, len(labels)))
    ours = pipe(
        num_inference_steps=request.num_inference_steps,
        class_labels=torch.tensor(labels) if labels else None,
        guidance_scale=request.guidance_scale,
        eta=request.eta,
        use_clipped_model_output=request.use_clipped_model_output,
        generator=torch.Generator().manual_seed(_SEED),
        latents=x_T.to(pipe.device),
        output_type="pt",
    ).images
    with torch.inference_mode():
        theirs = reference.sample(x_T.to(pipe.device), labels, torch.Generator().manual_seed(_SEED))
        if pipe.vae is not None:
            theirs = pipe.vae.decode(theirs / pipe.vae.config.scaling_factor).sample
    name = f"{request.num_inference_steps} steps of {request.scheduler}, guidance {request.guidance_scale:g}"
    return _compare(name, 2 * ours - 1, theirs.clamp(-1, 1), FINAL_TOLERANCE)


def _noise(reference: Reference, count: int):
    """(N, C, H, W) float32 on the CPU."""
    import torch

    config = reference.card.config
    shape = (count, config.in_channels, *(config.trained_size or (64, 64)))
    return torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))


def _compare(what: str, ours, theirs, tolerance: float) -> Comparison:
    error = (ours.double() - theirs.to(ours.device).double()).abs().max().item()
    return Comparison(what, error, theirs.abs().max().item(), tolerance)


def _as_table(report: dict[str, Any]) -> str:
    versions = report["versions"]
    lines = [
        f"{report['model']}: fastdiff {versions['fastdiff']} against diffusers {versions['diffusers']}, "
        f"float32 on {report['device']}",
        f"{'':<32}{'max |error|':>12}{'largest':>10}{'allowed':>10}",
    ]
    for row in report["comparisons"]:
        verdict = "ok" if row["passed"] else "FAILED"
        lines.append(f"{row['what']:<32}{row['error']:>12.1e}{row['largest']:>10.2f}{row['allowed']:>10.1e}  {verdict}")
    lines.append("within tolerance" if report["passed"] else "NOT within tolerance")
    return "\n".join(lines)
