"""Measure the error of 8-bit weights: compare a model in 8 bits, and in bfloat16, with the same model in float32.

The comparison covers the text encoders, single predictions on states and prompts of the float32 run, and finished
pictures, in which the errors of all steps add up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import fastdiff
from fastdiff.errors import InputError
from fastdiff.kinds import Precision
from fastdiff.requests.defaults import COMMAND, PRECISION
from fastdiff.requests.request import DtypeName, Request
from fastdiff.runs.drawing import Run, draw, find_model
from fastdiff.verification.comparisons import check_inputs, lone_model, predict
from fastdiff.verification.text_models import NEGATIVE, PROMPT, encoded_prompts

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fastdiff.pipelines import Pipeline

PLACES = 5  # the number of steps whose predictions are compared
BESIDE: DtypeName = "bfloat16"  # the dtype to compare the precision with; the precision also computes in it


@dataclass(frozen=True)
class Difference:
    """The errors of two formats against float32."""

    what: str
    unit: str  # %: RMS error relative to the RMS of the float32 output; dB: peak signal-to-noise ratio
    beside: float  # the error of BESIDE
    error: float  # the error of the precision


@dataclass(frozen=True)
class Precisions:
    """All differences of a model."""

    model: str
    device: str
    precision: str
    differences: Sequence[Difference]

    @property
    def passed(self) -> bool:
        """Whether all errors are numbers. There is no limit: look at the pictures to judge the errors."""
        return all(math.isfinite(each.beside) and not math.isnan(each.error) for each in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values. The infinite ratio of equal pictures is null."""
        differences = [
            {key: None if value == math.inf else value for key, value in vars(each).items()}
            for each in self.differences
        ]
        return vars(self) | {"versions": {"fastdiff": fastdiff.__version__}, "differences": differences}


def compare_precisions(request: Request, device: str) -> Precisions:
    """Measure the error of the precision of `request`. Raises InputError for a folder that is no pipeline."""
    from fastdiff.execution.devices import naming_lost_device
    from fastdiff.execution.memory import or_explain

    if (folder := lone_model(request)) is not None:
        raise InputError(f"precision: {folder} has no model_index.json; give a pipeline folder, which draws pictures")
    card = find_model(request)
    check_inputs("verify --precision", card.name, card.config)
    if card.reads_text:
        request = replace(request, prompt=(PROMPT,))
    if card.config.of_trajectories:
        request = replace(request, horizon=card.config.usual_size[1])
    run = Run.prepare(request, card, COMMAND)
    with naming_lost_device():
        return or_explain(
            partial(_compare, run, device),
            f"out of memory: verify loads {card.name} in float32; free memory on the device or give another one, such "
            "as --device cpu",
        )


def _compare(run: Run, device: str) -> Precisions:
    pipe = _load(run, device, "float32", PRECISION)
    path, pictures = _drawn(pipe, run)
    prompt = _prompts(pipe, run)
    truth, where = dict(_outputs(pipe, run, path, prompt)), str(pipe.device)
    errors: list[dict[str, float]] = []
    ratios: list[float] = []
    for precision in (PRECISION, run.request.precision):
        del pipe  # frees its memory before the next one is loaded
        pipe = _load(run, device, BESIDE, precision)
        errors.append({what: _relative(y, truth[what]) for what, y in _outputs(pipe, run, path, prompt)})
        ratios.append(_ratio(_drawn(pipe, run)[1], pictures))
    differences = [Difference(what, "%", errors[0][what], errors[1][what]) for what in truth]
    whole = f"{run.request.num_inference_steps} steps of {run.request.scheduler}"
    return Precisions(run.card.name, where, run.request.precision, [*differences, Difference(whole, "dB", *ratios)])


def _load(run: Run, device: str, dtype: DtypeName, precision: Precision) -> Any:
    from fastdiff.pipelines import load_pipeline

    return load_pipeline(run.card, replace(run.request, dtype=dtype, precision=precision), device)


def _prompts(pipe: Any, run: Run) -> Mapping[str, Any]:
    """Return the arguments of the denoiser for a prompt and a negative prompt; none for a model without prompts."""
    if run.card.reads_captions:
        return {"cap_feats": tuple(_states(pipe, text)[0] for text in (PROMPT, NEGATIVE))}
    return encoded_prompts(pipe) if pipe.reads_text else {}


def _drawn(pipe: "Pipeline", run: Run) -> tuple[list[tuple[float, "Tensor"]], "np.ndarray"]:
    """Return (timestep, state (N, H, W, C)) before up to PLACES steps of the first batch, and all pictures."""
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
    """Yield (name, output in float32) for each text encoder, and for the denoiser at each state of `path`."""
    import torch

    from fastdiff.tuning.forwards import in_dtype

    if run.card.reads_captions:
        yield pipe.text_encoder.part.name, _states(pipe, PROMPT).float()
    elif pipe.reads_text:
        for model, tokenizer in zip(pipe.encoders.models, pipe.encoders.tokenizers, strict=True):
            yield model.part.name, model(torch.tensor([tokenizer(PROMPT).ids])).last_hidden_state.float()
    denoiser, scheduler = pipe.denoiser, pipe.scheduler
    if not scheduler.follows_flow:  # a flow reads its state as it is
        scheduler.set_timesteps(run.request.num_inference_steps)
    for timestep, x_t in path:
        t = torch.tensor(timestep, dtype=torch.float64)
        x = denoiser.channels_first(x_t)
        x = (x if scheduler.follows_flow else scheduler.scale_model_input(x, timestep)).to(denoiser.dtype)
        labels = [cell.label for cell in run.cells[: len(x)]]
        classes = None if None in labels else torch.tensor(labels, device=x.device)
        x = x.expand(2, *x.shape[1:]) if prompt else x  # for the prompt and the negative prompt
        with torch.inference_mode():
            y = predict(denoiser, x, t.to(x.device), classes, **in_dtype(prompt, denoiser.dtype))
        yield f"{denoiser.part.name} t={timestep:g}", y.float()


def _states(pipe: Any, text: str) -> "Tensor":
    """Return the states (1, L, C) of a text that Z-Image reads."""
    import torch

    return pipe.text_encoder.penultimate_states(torch.tensor([pipe.tokenizer(text).ids]))


def _relative(y: "Tensor", truth: "Tensor") -> float:
    """Return the RMS error, in per cent of the RMS of `truth`."""
    return 100 * ((y.double() - truth.double()).square().mean() / truth.double().square().mean()).sqrt().item()


def _ratio(drawn: "np.ndarray", truth: "np.ndarray") -> float:
    """Return the peak signal-to-noise ratio of 8-bit pictures in dB. For trajectories the peak is their range."""
    error = ((drawn.astype("float64") - truth) ** 2).mean()
    peak = 255.0 if truth.dtype == "uint8" else float(truth.max() - truth.min())
    return math.inf if error == 0 else 10 * math.log10(peak**2 / error)
