"""The denoising loop: x_t -> x_{t-1}, row by row of the schedule, for a batch whose every picture stands for itself.

The same seed gives the same bits alone, in any batch and at any place in it. On the CPU a batched convolution does not
keep that promise, so there each picture is a lane of its own, run by a fixed number of threads; lanes run side by side.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.kernels.denoise import denoise_step, philox_normal
from fastdiff.models.unet import Conditioning, UNet2DModel
from fastdiff.schedule import Schedule

# Of the noise added in a step: each picture's seed (N,) int64 for Philox, or what draws the next (N, H, W, C).
NoiseSource = Tensor | Callable[[], Tensor]


@dataclass(frozen=True)
class Table:
    """The conditioning of all steps, made before the loop."""

    temb: Tensor  # (labels, steps, width)
    timesteps: Tensor  # (steps,) on the model's device

    def rows(self, labels: Tensor, step: int) -> Conditioning:
        """The rows of the table's `labels` (N,) at a step."""
        return Conditioning(self.temb[labels, step], self.timesteps[step].expand(len(labels)))


def make_table(unet: UNet2DModel, timesteps: Tensor, labels: Tensor | None) -> Table:
    """Embeddings and projections for `timesteps` (steps,) under each of the `labels` (rows, ...), or under none.

    One label at a time, so that the shape of every product, and with it every bit, is the same in any company.
    """
    timesteps = timesteps.to(unet.device)
    each = [None] if labels is None else [label.expand(len(timesteps), *label.shape) for label in labels]
    return Table(torch.stack([unet.conditioning(timesteps, label).temb for label in each]), timesteps)


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, Ho and Salimans 2022 (arXiv 2207.12598)."""

    scale: float
    null_row: int  # of the table


@dataclass
class Lane:
    """Pictures that are computed together."""

    x_t: Tensor  # (n, H, W, C) float32
    labels: Tensor  # (n,) rows of the table
    places: slice  # of the batch


def denoise(
    unet: UNet2DModel,
    x_t: Tensor,
    schedule: Schedule,
    table: Table,
    labels: Tensor,
    *,
    noise: NoiseSource,
    guidance: Guidance | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x_{t-1} and x0, each (N, H, W, C) float32, after every step.

    Args:
        x_t: (N, H, W, C) float32 on the model's device, the starting noise.
        labels: (N,) int64, each picture's row of `table`.
        noise: where the noise of a step comes from.
    """
    size = 1 if unet.device.type == "cpu" else len(x_t)
    places = [slice(start, start + size) for start in range(0, len(x_t), size)]
    lanes = [Lane(x_t[place], labels[place], place) for place in places]
    for step in range(len(schedule)):
        step_noise = _step_noise(noise, lanes, step) if schedule.draws_noise[step] else [None] * len(lanes)
        outputs = _predict(unet, lanes, table, step, guidance)
        x0 = []
        for lane, (output, unguided), z in zip(lanes, outputs, step_noise, strict=True):
            lane.x_t, lane_x0 = denoise_step(
                output,
                lane.x_t,
                schedule.rows[step],
                schedule.options,
                noise=z,
                unguided=unguided,
                guidance_scale=guidance.scale if guidance else 1.0,
            )
            x0.append(lane_x0)
        yield torch.cat([lane.x_t for lane in lanes]), torch.cat(x0)


def _step_noise(noise: NoiseSource, lanes: list[Lane], step: int) -> list[Tensor]:
    if isinstance(noise, Tensor):
        return [philox_normal(noise[lane.places], step, lane.x_t.shape[1:]) for lane in lanes]
    batch = noise()
    return [batch[lane.places] for lane in lanes]


def _predict(
    unet: UNet2DModel, lanes: list[Lane], table: Table, step: int, guidance: Guidance | None
) -> list[tuple[Tensor, Tensor | None]]:
    """For each lane the model's output and, where it is guided, the output under the null label."""

    def run(x_t: Tensor, labels: Tensor) -> Tensor:
        return unet.predict(x_t.to(unet.dtype), table.rows(labels, step))

    halves = [(lane.x_t, lane.labels) for lane in lanes]
    if guidance is None:
        return [(output, None) for output in _run_all(run, halves, unet.device)]
    halves += [(x_t, torch.full_like(labels, guidance.null_row)) for x_t, labels in halves]
    if unet.device.type == "cpu":
        outputs = _run_all(run, halves, unet.device)
        return list(zip(outputs[: len(lanes)], outputs[len(lanes) :], strict=True))
    x_t, labels = (torch.cat(parts) for parts in zip(*halves, strict=True))
    return [run(x_t, labels).chunk(2)]


def _run_all(run: Callable[..., Tensor], arguments: list[tuple], device: torch.device) -> list[Tensor]:
    if device.type != "cpu":
        return [run(*each) for each in arguments]
    return list(_cpu_workers().map(lambda each: run(*each), arguments))


@functools.cache
def _cpu_workers() -> ThreadPoolExecutor:
    """Python threads that each run torch with the same number of threads, whatever there is to do.

    The number decides how oneDNN splits a sum, so it depends on the machine alone: one thread each up to four cores.
    """
    cores = torch.get_num_threads()
    workers = min(cores, 4)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fastdiff")
    all_started = threading.Barrier(workers)

    def set_up() -> None:
        all_started.wait()  # every worker takes one of these tasks
        torch.get_num_threads()  # a thread's first call copies the process's setting over its own
        torch.set_num_threads(cores // workers)

    wait([pool.submit(set_up) for _ in range(workers)])
    torch.set_num_threads(cores)  # the setting of this thread, and of threads to come
    return pool
