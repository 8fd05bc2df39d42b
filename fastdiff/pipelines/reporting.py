"""`fastdiff.report(model)`: which kernel runs each operation of a step and why, the launches, and our share of FLOPs.

`kernels.host.recording` records one step; this module turns the recorded calls into a table.
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
    """A row of a report: all calls of an operation with the same shapes, options, kernels and reason."""

    operation: str
    shape: str  # the shapes of the tensors, and the options
    count: int  # calls
    flop: int  # in the matrix products of one call
    kernels: tuple[str, ...]  # launched by one call, in order
    torch: tuple[str, ...]  # torch operations in one call
    why: str  # why these kernels run

    @property
    def runs_on(self) -> str:
        """The kernels of one call, and torch, each with its number of launches."""
        names = [*self.kernels, *(["torch"] * len(self.torch))]
        counts = ((name, names.count(name)) for name in dict.fromkeys(names))
        return " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts)


@dataclass(frozen=True)
class Report:
    """The operations of one step of a model, and the kernels that run them. `print` shows it as a table.

    A torch operation counts as one launch.
    """

    what: str  # the model, its input, dtype and device
    rows: tuple[Row, ...]
    variants: int | None  # the number of compiled kernel variants; None if nothing is compiled
    tiles: str = ""  # how the tiles are chosen: by a GPU's table, or by rules; "" if no kernel is launched
    notice: str = ""  # says that the GPU's fast kernels are off, and what to do; "" if they are on

    @property
    def launches(self) -> int:
        """The number of launches of our kernels and of torch operations."""
        return self.kernel_launches + sum(row.count * len(row.torch) for row in self.rows)

    @property
    def kernel_launches(self) -> int:
        """The number of launches of our kernels."""
        return sum(row.count * len(row.kernels) for row in self.rows)

    @property
    def flop(self) -> int:
        """Floating-point operations of all convolutions and linear layers, but not of attention."""
        return sum(row.count * row.flop for row in self.rows if row.operation != "attention")

    @property
    def share(self) -> float:
        """The fraction of `flop` that runs on our kernels."""
        on_torch = sum(row.count * row.flop for row in self.rows if row.operation != "attention" and not row.kernels)
        return 1 - on_torch / self.flop if self.flop else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the rows and the totals as JSON values."""
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
    """Run one step of a model and report the kernels that run each operation.

    `print` shows the report as a table::

        print(fastdiff.report(pipe, batch_size=8))

    The step runs without CUDA graphs, which do not change the kernels.

    Args:
        model: a pipeline, to report a denoising step; or a denoiser, to report a forward pass. Work that a pipeline
            does once, before its loop, is not in the report: the text encoders, for example.
        batch_size: the number of pictures.
        height: of the pictures, or of a denoiser's input. Default: the model's sample_size.
        width: of the pictures, or of a denoiser's input. Default: the model's sample_size.
        options: for a pipeline, the arguments of its `stream`; a text-to-image pipeline's `prompt` defaults to `""`.
            For a denoiser, `class_labels` as its `conditioning` takes them (default: the first label), and the
            `horizon` of trajectories (default: the model's sample_size).

    Raises InputError, which names the argument that the model cannot run with.
    """
    batch_size = checked("batch_size", batch_size, Pictures)
    height, width = checked_side("height", height), checked_side("width", width)
    if isinstance(model, Denoiser):
        recorded, x = _prediction(model, batch_size, height, width, **options)
    else:
        kind: Any = Pipeline  # mypy refuses an abstract class here
        instance("model", model, kind, f"a Pipeline, {' or '.join(DENOISERS)}")
        recorded, x = _denoising_step(model, batch_size, height, width, **options)
    what = f"{type(model).__name__}, {shape_text(x)}, {dtype_name(model.dtype)}, {device_name(model.device)}"
    rows = _rows(recorded)
    tiles = current(model.device).source if any(row.kernels for row in rows) else ""
    return Report(what, rows, len(recorded.variants) or None, tiles, confirmation.notice(model.device) or "")


def _rows(recorded: Recorder) -> tuple[Row, ...]:
    """Group equal calls into rows, in the order in which their operations first run. torch's operations come last."""
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
    if next(steps).num_steps == 1:  # the first step also runs the work before the loop, so the second is recorded
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
    """Return the height and width of a denoiser's input. Default: those of its config."""
    if config.of_trajectories:
        if height is not None or width is not None:
            raise InputError("height, width: this model makes trajectories; give horizon instead")
        _, *size = trajectory_shape(config, horizon, None)
        return size[0], size[1]
    if horizon is not None:
        raise InputError("horizon: this model makes pictures; give height and width instead")
    return completed_size(config, height, width)
