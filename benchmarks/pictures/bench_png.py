"""Writing a PNG: fastdiff's bands of rows on threads, beside PIL.

    python benchmarks/pictures/bench_png.py [WORKLOAD ...] [--save [DIR]]

A photograph is made of smooth noise at eight scales and of the grain of a sensor, whose deviation the workload names.
Other workloads are bundled pictures. Times are in milliseconds, the least of ROUNDS calls that alternate:

    pil        PIL's `save`, as fastdiff wrote PNGs before
    threads1   fastdiff with one thread, and with 2, 4, 8 and 16 if the machine has the cores
    ratio      fastdiff with the most threads / PIL
    size       bytes of fastdiff's file / bytes of PIL's
"""

import functools
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness.reports import chosen, report
from fastdiff.checkpoints.hub import bundled_models
from fastdiff.execution.cores import num_cores
from fastdiff.requests.png_pixels import encode_pixels

ROUNDS = 20
GRAIN = (0.0, 0.5, 1.5, 4.0)  # standard deviation, of 255 levels
BUNDLED = ("emoji-sd/grid", "emoji64/grid", "emoji64/examples/1-fluent-3d-smiling-faces")


def main() -> None:
    made: dict[str, Callable[[], Image.Image]] = {
        f"photograph-1024-grain-{grain}": functools.partial(photograph, 1024, grain) for grain in GRAIN
    }
    made |= {name: functools.partial(bundled, name) for name in BUNDLED}
    report("png", rows({name: made[name] for name in chosen(made)}))


def photograph(size: int, grain: float, seed: int = 0) -> Image.Image:
    """Return a square RGB picture with the statistics of a photograph: noise at eight scales, an edge, and grain."""
    random = np.random.default_rng(seed)
    levels = np.zeros((size, size, 3))
    for octave in range(1, 9):
        noise = random.standard_normal((2**octave, 2**octave, 1)) + 0.35 * random.standard_normal(
            (2**octave,) * 2 + (3,)
        )
        planes = [Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(noise * 0.55**octave, -1, 0)]
        levels += np.stack([np.asarray(plane.resize((size, size), Image.Resampling.BICUBIC)) for plane in planes], -1)
    y, x = np.mgrid[:size, :size] / size
    levels += 0.8 * ((x - 0.6) ** 2 + (y - 0.4) ** 2 < 0.2**2)[..., None]
    levels = 127 + 55 * (levels - levels.mean()) / levels.std() + grain * random.standard_normal(levels.shape)
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))


def bundled(name: str) -> Image.Image:
    model, _, path = name.partition("/")
    with Image.open(bundled_models()[model] / f"{path}.png") as image:
        return image.copy()


def rows(workloads: dict[str, Callable[[], Image.Image]]) -> Iterator[dict[str, Any]]:
    for name, make in workloads.items():
        image = make()
        counts = [count for count in (1, 2, 4, 8, 16) if count <= num_cores()]
        calls = {"pil": functools.partial(save, image)}
        calls |= {f"threads{count}": functools.partial(encode, image, count) for count in counts}
        times, sizes = measure(calls)
        ours = times[f"threads{counts[-1]}"]
        size = sizes["threads1"] / sizes["pil"]
        yield {"workload": name, "cores": num_cores(), **times, "ratio": ours / times["pil"], "size": size}


def measure(calls: dict[str, Callable[[], int]]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the least time of each call in milliseconds, and what each returns."""
    times: dict[str, float] = dict.fromkeys(calls, float("inf"))
    returned: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            returned[name] = call()
            times[name] = min(times[name], 1000 * (time.perf_counter() - start))
    return times, returned


def save(image: Image.Image) -> int:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.tell()


def encode(image: Image.Image, threads: int) -> int:
    header, data = encode_pixels(image, threads)
    return len(header) + sum(map(len, data))


if __name__ == "__main__":
    main()
