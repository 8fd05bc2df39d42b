"""The error of weights in 8 bits: a model of such a precision, and of bfloat16, against the same in float32.

Measured are the text encoders, single predictions at places that the float32 run came through, given the texts that it
was given, and whole pictures, which differ by all that the steps add up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.kinds import Precision
from fastdiff.requests.defaults import COMMAND, PRECISION
from fastdiff.requests.request import DtypeName, Request
from fastdiff.runs.drawing import Run, draw
from fastdiff.verification.comparisons import predict
from fastdiff.verification.text_models import PROMPT, encoded_prompts

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fastdiff.pipelines import Pipeline

PLACES = 5  # on the way from noise to pictures, where predictions are compared
BESIDE: DtypeName = "bfloat16"  # the dtype that the precision is compared with, and is computed in


@dataclass(frozen=True)
class Difference:
    """The errors of two formats against float32."""

    what: str
    unit: str  # %: RMS error, of the RMS of what float32 makes; dB: peak signal-to-noise ratio
    beside: float  # of BESIDE
    error: float  # of the precision


@dataclass(frozen=True)
class Precisions:
    """All differences of a model."""

    model: str
    device: str
    precision: str
    differences: Sequence[Difference]

    @property
    def passed(self) -> bool:
        """Whether all is a number: how large an error may be is for whoever looks at the pictures."""
        return all(math.isfinite(each.beside) and not math.isnan(each.error) for each in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """JSON values; an infinite ratio, of equal pictures, is null."""
        differences = [
            {key: None if value == math.inf else value for key, value in vars(each).items()}
            for each in self.differences
        ]
        return vars(self) | {"versions": {"fastdiff": fastdiff.__version__}, "differences": differences}


def compare_precisions(request: Request, device: str) -> Precisions:
    """Measure what the precision of `request` costs. InputError for a folder that draws nothing."""
    from fastdiff.execution.devices import naming_lost_device
    from fastdiff.execution.memory import or_explain

    folder = hub.resolve(request.model, revision=request.revision, variant=request.variant)
    if not (folder / "model_index.json").is_file():
        raise InputError(f"precision: {folder} has no model_index.json, and pictures are what it is measured by")
    card = ModelCard.read(request.model, folder)
    if card.reads_text:
        request = replace(request, prompt=(PROMPT,))
    if card.config.of_trajectories:
        request = replace(request, horizon=card.config.usual_size[1])
    run = Run.prepare(request, card, COMMAND)
    with naming_lost_device():
        return or_explain(
            partial(_compare, run, device),
            f"out of memory: verify holds {card.name} in float32; end what else runs on the device or give another "
            "one, such as --device cpu",
        )


def _compare(run: Run, device: str) -> Precisions:
    pipe = _load(run, device, "float32", PRECISION)
    path, pictures = _drawn(pipe, run)
    prompt = encoded_prompts(pipe) if pipe.reads_text else {}
    truth, where = dict(_outputs(pipe, run, path, prompt)), str(pipe.device)
    errors: list[dict[str, float]] = []
    ratios: list[float] = []
    for precision in (PRECISION, run.request.precision):
        del pipe  # one at a time
        pipe = _load(run, device, BESIDE, precision)
        errors.append({what: _relative(y, truth[what]) for what, y in _outputs(pipe, run, path, prompt)})
        ratios.append(_ratio(_drawn(pipe, run)[1], pictures))
    differences = [Difference(what, "%", errors[0][what], errors[1][what]) for what in truth]
    whole = f"{run.request.num_inference_steps} steps of {run.request.scheduler}"
    return Precisions(run.card.name, where, run.request.precision, [*differences, Difference(whole, "dB", *ratios)])


def _load(run: Run, device: str, dtype: DtypeName, precision: Precision) -> Any:
    from fastdiff.pipelines import load_pipeline

    return load_pipeline(run.card, replace(run.request, dtype=dtype, precision=precision), device)


def _drawn(pipe: "Pipeline", run: Run) -> tuple[list[tuple[float, "Tensor"]], "np.ndarray"]:
    """Timestep and state (N, H, W, C) before some steps of the first batch, and all that was drawn."""
    import numpy as np

    states: list[tuple[float, Tensor]] = []
    finished: list[np.ndarray] = []
    for progress in draw(run, pipe):
        if progress.places.start == 0:
            states.append((progress.step.timestep, progress.step.x_t.clone()))
        drawn = (each.image if each.trajectory is None else each.trajectory for each in progress.finished)
        finished += map(np.asarray, drawn)
    before = [(timestep, x_t) for (timestep, _), (_, x_t) in zip(states[1:], states, strict=False)]
    chosen = sorted({(len(before) - 1) * i // (PLACES - 1) for i in range(PLACES)}) if before else []
    return [before[i] for i in chosen], np.stack(finished)


def _outputs(
    pipe: Any, run: Run, path: Sequence[tuple[float, "Tensor"]], prompt: Mapping[str, Any]
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield by name, in float32, a text encoder's states and predictions on the path, all of the same inputs."""
    import torch

    if pipe.reads_text:
        for model, tokenizer in zip(pipe.encoders.models, pipe.encoders.tokenizers, strict=True):
            yield model.part.name, model(torch.tensor([tokenizer(PROMPT).ids])).last_hidden_state.float()
    denoiser, scheduler = pipe.denoiser, pipe.scheduler
    scheduler.set_timesteps(run.request.num_inference_steps)
    for timestep, x_t in path:
        t = torch.tensor(timestep, dtype=torch.float64)
        x = scheduler.scale_model_input(denoiser.channels_first(x_t), timestep).to(denoiser.dtype)
        labels = [cell.label for cell in run.cells[: len(x)]]
        classes = None if None in labels else torch.tensor(labels, device=x.device)
        x = x.expand(2, *x.shape[1:]) if prompt else x  # a prompt, and a negative one
        with torch.inference_mode():
            y = predict(denoiser, x, t.to(x.device), classes, **_in_dtype(prompt, denoiser.dtype))
        yield f"{denoiser.part.name} t={timestep:g}", y.float()


def _in_dtype(prompt: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Arguments of a call with their tensors in a dtype."""
    return {
        name: _in_dtype(value, dtype) if isinstance(value, Mapping) else value.to(dtype)
        for name, value in prompt.items()
    }


def _relative(y: "Tensor", truth: "Tensor") -> float:
    """RMS error, in per cent of the truth's RMS."""
    return 100 * ((y.double() - truth.double()).square().mean() / truth.double().square().mean()).sqrt().item()


def _ratio(drawn: "np.ndarray", truth: "np.ndarray") -> float:
    """Peak signal-to-noise ratio of pictures of 8 bits, in dB; of trajectories the peak is their range."""
    error = ((drawn.astype("float64") - truth) ** 2).mean()
    peak = 255.0 if truth.dtype == "uint8" else float(truth.max() - truth.min())
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error)
