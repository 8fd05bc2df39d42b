"""The speed of products and copies, measured in about a second, compared with the card's data sheet."""

import time
from collections.abc import Callable

import torch

from fastdiff.doctor.finding import Finding
from fastdiff.execution.memory import is_out_of_memory

# Words of a card's name -> TFLOP/s of dense bfloat16 products with float32 sums, and TB/s of its memory. The sources
# are NVIDIA's data sheets of H200, H100, A100, L40S, L4 and A10 (half of the numbers with sparsity); for RTX cards, its
# white papers on the Blackwell, Ada and Ampere (GA102) architectures.
REACHES = {
    "B200": (2250.0, 8.0),
    "H200": (989.0, 4.8),
    "H200 NVL": (835.0, 4.8),
    "H100": (989.0, 3.35),
    "H100 PCIe": (756.0, 2.0),
    "H100 NVL": (835.0, 3.9),
    "A100 SXM4 80GB": (312.0, 2.039),
    "A100 PCIe 80GB": (312.0, 1.935),
    "A100": (312.0, 1.555),
    "L40S": (362.0, 0.864),
    "L4": (121.0, 0.3),
    "A10": (125.0, 0.6),
    "RTX 5090": (209.5, 1.792),
    "RTX 4090": (165.2, 1.008),
    "RTX 3090": (71.0, 0.936),
}
SECONDS = 0.25  # of each measurement
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices
BYTES = {"cuda": 2**30, "cpu": 2**27}  # of a copy


def findings(device: torch.device) -> list[Finding]:
    """Return findings about products and copies on the device."""
    if torch.version.hip is not None:
        return []
    try:
        tflops, terabytes = _products(device), _copies(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return [Finding("speed", "not measured: other processes use the card's memory")]
    reached = reach(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    format = "bfloat16" if device.type == "cuda" else "float32"
    return [
        _finding(f"products in {format}", tflops, "TFLOP/s", reached and reached[0]),
        _finding("copies", terabytes, "TB/s, read and written", reached and reached[1]),
    ]


def reach(card: str) -> tuple[float, float] | None:
    """Return the TFLOP/s and TB/s of a card's data sheet; None if the card is not in REACHES."""
    words = set(card.lower().replace("-", " ").split())
    fitting = [name for name in REACHES if words.issuperset(name.lower().split())]
    return REACHES[max(fitting, key=lambda name: len(name.split()))] if fitting else None


def _finding(what: str, measured: float, unit: str, reached: float | None) -> Finding:
    text = f"{what}: {measured:.3g} {unit}"
    if reached is not None:
        text += f", {measured / reached:.0%} of the data sheet's {reached:g}; other work on the card lowers it"
    return Finding("speed", text, values={"what": what, "measured": measured, "unit": unit, "data sheet": reached})


def _products(device: torch.device) -> float:
    side, dtype = SIDE[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2e-12 * side**3 / _seconds(lambda: a @ b, device)


def _copies(device: torch.device) -> float:
    source = torch.ones(BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e-12 * source.numel() / _seconds(lambda: target.copy_(source), device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of a run, after a warm-up."""

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    timed(2)
    count = max(1, int(SECONDS / max(timed(1), 1e-6)))
    return timed(count) / count
