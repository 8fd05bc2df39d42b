"""`fastdiff.report(model)`: the kernel that each operation of a step runs on and why, launches, our share of the FLOPs.

print(fastdiff.report(pipe, batch_size=8))

The step runs once while `kernels.host.recording` listens; here its calls become the lines of a table.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.arguments import instance
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.diffusion.pictures import checked_side, completed_size
from fastdiff.diffusion.trajectories import trajectory_shape
from fastdiff.errors import InputError
from fastdiff.execution.devices import device_name, dtype_name
from fastdiff.kernels.host.recording import TORCH, Recorder, record, shape_text
from fastdiff.kernels.plans import confirmation
from fastdiff.kernels.plans.tuning import current
from fastdiff.kinds import Pictures
from fastdiff.models.classes import DENOISERS
from fastdiff.models.denoiser import Denoiser
from fastdiff.pipelines import Pipeline
from fastdiff.schema import checked


@dataclass(frozen=True)
class Row:
    """A line of a report: the calls of an operation that were alike."""

    operation: str
    shape: str  # of its tensors, and its options
    count: int
    flop: int  # of one call's matrix products
    kernels: tuple[str, ...]  # launched by one call, in order
    torch: tuple[str, ...]  # operations of torch in one call
    why: str

    @property
    def runs_on(self) -> str:
        """Our kernels and torch, each with how often a call launches it."""
        names = [*self.kernels, *(["torch"] * len(self.torch))]
        counts = ((name, names.count(name)) for name in dict.fromkeys(names))
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts)


@dataclass(frozen=True)
class Report:
    """The operations of one step of a model, and what they run on. An operation of torch counts as one launch."""

    what: str  # the model, its input, dtype and device
    rows: tuple[Row, ...]
    variants: int | None  # compiled kernels; None where nothing compiles them
    tiles: str = ""  # by what they are chosen: a GPU's table, or rules; "" where no kernel is launched
    notice: str = ""  # that the fast kernels of the GPU are off, and what to do; "" where they are not

    @property
    def launches(self) -> int:
        """Launches of our kernels and operations of torch."""
        return self.kernel_launches + sum(row.count * len(row.torch) for row in self.rows)

    @property
    def kernel_launches(self) -> int:
        """Launches of our kernels."""
        return sum(row.count * len(row.kernels) for row in self.rows)

    @property
    def flop(self) -> int:
        """Floating-point operations of all convolutions and linear layers: all matrix products, but attention's."""
        return sum(row.count * row.flop for row in self.rows if row.operation != "attention")

    @property
    def share(self) -> float:
        """The fraction of `flop` that runs on our kernels."""
        on_torch = sum(row.count * row.flop for row in self.rows if row.operation != "attention" and not row.kernels)
        return 1 - on_torch / self.flop if self.flop else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The rows and the totals, for JSON."""
        totals = ("launches", "kernel_launches", "flop", "share")
        rows = [vars(row) | {"runs_on": row.runs_on} for row in self.rows]
        return vars(self) | {"rows": rows} | {name: getattr(self, name) for name in totals}

    def __str__(self) -> str:
        compiled = "" if self.variants is None else f" in {self.variants} compiled variants"
        return "\n".join(
            [
                self.what,
                *self._table(),
                *([f"tiles by {self.tiles}"] if self.tiles else []),
                *([self.notice] if self.notice else []),
                f"{self.launches} launches: {self.kernel_launches} of our kernels{compiled}, "
                f"{self.launches - self.kernel_launches} of torch",
                f"{self.share:.1%} of {self.flop / 1e9:.4g} GFLOP of convolutions and linear layers on our kernels",
            ]
        )

    def _table(self) -> list[str]:
        cells = [("operation", "tensors", "times", "GFLOP", "runs on", "why")]
        for row in self.rows:
            gflop = f"{row.count * row.flop / 1e9:.3g}" if row.flop else ""
            cells.append((row.operation, row.shape, str(row.count), gflop, row.runs_on, row.why))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numbers = (2, 3)
        return [
            "  ".join(
                cell.rjust(width) if i in numbers else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]


def report(
    model: Pipeline | Denoiser,
    *,
    batch_size: int = 1,
    height: int | None = None,
    width: int | None = None,
    **options: Any,
) -> Report:
    """Return what one step of `model` runs on, seen as it runs: without CUDA graphs, which change no kernel.

    Args:
        model: a pipeline, for one denoising step; or a denoiser, for one prediction. What is made once for all steps,
            before their loop, is left out: text encoders among it.
        height, width: of the pictures or latents; default: the model's sample_size.
        options: of a pipeline those of its `stream`, a prompt where it reads one is "" by default; of a denoiser
            `class_labels` as its `conditioning` takes them, by default the first, and the `horizon` of trajectories,
            by default the model's sample_size.

    Raises InputError naming what the model cannot do.
    """
    batch_size = checked("batch_size", batch_size, Pictures)
    height, width = checked_side("height", height), checked_side("width", width)
    if isinstance(model, Denoiser):
        recorded, x = _prediction(model, batch_size, height, width, **options)
    else:
        kind: Any = Pipeline  # abstract, which mypy takes for no class of an object
        instance("model", model, kind, f"a Pipeline, {' or '.join(DENOISERS)}")
        recorded, x = _denoising_step(model, batch_size, height, width, **options)
    what = f"{type(model).__name__}, {shape_text(x)}, {dtype_name(model.dtype)}, {device_name(model.device)}"
    rows = _rows(recorded)
    tiles = current(model.device).source if any(row.kernels for row in rows) else ""
    return Report(what, rows, len(recorded.variants) or None, tiles, confirmation.notice(model.device) or "")


def _rows(recorded: Recorder) -> tuple[Row, ...]:
    """Return a row for calls that were alike, in the order of their operations; torch's own come last."""
    alike = Counter(
        (call.operation, call.shape, call.flop, tuple(call.kernels), tuple(call.torch), call.why)
        for call in recorded.calls
    )
    order = sorted(dict.fromkeys(call.operation for call in recorded.calls), key=lambda name: name.startswith(TORCH))
    rows = [
        Row(operation, shape, count, flop, kernels, torch_operations, why)
        for (operation, shape, flop, kernels, torch_operations, why), count in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: order.index(row.operation)))


def _denoising_step(
    pipe: Pipeline, batch_size: int, height: int | None, width: int | None, **options: Any
) -> tuple[Recorder, Tensor]:
    size: dict[str, Any] = {"batch_size": batch_size, "height": height, "width": width}
    usual: dict[str, Any] = {"num_inference_steps": min(3, len(pipe.scheduler))}
    if pipe.reads_text and options.get("prompt_embeds") is None:
        usual["prompt"] = ""  # all prompts cost the same
    steps = pipe.stream(**usual | size | options)
    if next(steps).num_steps == 1:  # the first, and what comes before the loop
        raise InputError("num_inference_steps: a report shows the second step of a run; give at least 2")
    with record(pipe.device) as recorded:
        step = next(steps)
    return recorded, step.x_t


def _prediction(
    model: Denoiser,
    batch_size: int,
    height: int | None,
    width: int | None,
    horizon: int | None = None,
    class_labels: Tensor | None = None,
) -> tuple[Recorder, Tensor]:
    height, width = _size(model.config, height, width, horizon)
    if class_labels is None and model.config.num_class_embeds is not None:
        class_labels = torch.zeros(batch_size, dtype=torch.int64, device=model.device)
    x = torch.randn(batch_size, height, width, model.config.sample_channels, device=model.device, dtype=model.dtype)
    conditioning = model.usual_conditioning(torch.ones(batch_size, device=model.device), class_labels)
    with record(model.device) as recorded:
        model.predict(x, conditioning)
    return recorded, x


def _size(config: DenoiserConfig, height: int | None, width: int | None, horizon: int | None) -> tuple[int, int]:
    """Height and width of a denoiser's input: those asked for, else those of its config."""
    if config.of_trajectories:
        if height is not None or width is not None:
            raise InputError("height, width: a trajectory has none; give its horizon")
        _, *size = trajectory_shape(config, horizon, None)
        return size[0], size[1]
    if horizon is not None:
        raise InputError("horizon: this model makes pictures; give height and width")
    return completed_size(config, height, width)
