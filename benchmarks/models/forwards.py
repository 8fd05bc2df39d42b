"""The models whose forwards are measured, by workload name, and our forward of each."""

from collections.abc import Callable
from typing import Any

from fastdiff.tuning.forwards import dtype_of, forward
from fastdiff.tuning.models import DDPM32, EMOJI64, EMOJI_SD
from fastdiff.tuning.models import WORKLOADS as TUNED
from fastdiff.tuning.timing import DEVICE

Workload = tuple[dict[str, Any], int, float | None]  # config, batch size, GFLOP of one forward if known

GPU = DEVICE.type == "cuda"
GFLOP = {
    "ddpm32_b1": 12.4,
    "ddpm32_b64": 796,
    "ddpm32_b512": 6371,
    "ddpm256_b1": 497,
    "ddpm256_b8": 3976,
    "emoji64_b1": 7.64,
    "emoji64_b64": 489,
    "dit_b2": 475,
    "dit_b32": 7595,
    "sd15_b2": 1607,
    "sd15_b16": 12852,
    "sdxl_b2": 13522,
}
MODELS_GPU: dict[str, Workload] = {  # Z-Image has a benchmark of its own
    name: (*workload, GFLOP.get(name)) for name, workload in TUNED.items() if not name.startswith("z-image")
}
MODELS_CPU: dict[str, Workload] = {
    "emoji64_b1": (EMOJI64, 1, None),
    "emoji64_b8": (EMOJI64, 8, None),
    "emoji-sd_b1": (EMOJI_SD, 1, None),
    "emoji-sd_b8": (EMOJI_SD, 8, None),
    "ddpm32_b1": (DDPM32, 1, GFLOP["ddpm32_b1"]),
}
WORKLOADS = MODELS_GPU if GPU else MODELS_CPU


def ours(name: str) -> Callable[[], Any]:
    """Return our forward of a workload."""
    config, batch, _ = WORKLOADS[name]
    return forward(config, batch, dtype_of(name))
