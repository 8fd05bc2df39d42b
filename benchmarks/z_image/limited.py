"""Draw with 8-bit weights in a process whose GPU memory is limited.

    python benchmarks/z_image/limited.py FOLDER SIDE STEPS LIMIT

Prints JSON: seconds of the third picture, and the peaks of the bytes that torch reserved until the weights were loaded
and until the end. An allocation beyond LIMIT bytes ends the process.
"""

import json
import sys
import time

import torch

import fastdiff

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    folder, *numbers = sys.argv[1:]
    print(json.dumps(measure_limited(folder, *map(int, numbers))))


def measure_limited(folder: str, side: int, steps: int, limit: int) -> dict[str, float]:
    """Return the results of a pipeline's folder."""
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(DEVICE).total_memory)
    peak = torch.cuda.max_memory_reserved if on_gpu else lambda: 0
    pipe = fastdiff.Pipeline.from_pretrained(folder, device=DEVICE, dtype=torch.bfloat16, precision="int8")
    loaded = peak()
    for _ in range(3):  # run, captured, replayed
        start = time.perf_counter()
        pipe("a cat", height=side, width=side, num_inference_steps=steps, guidance_scale=0.0, seed=0)
        seconds = time.perf_counter() - start
    return {"limit_bytes": limit, "loaded_bytes": loaded, "peak_bytes": peak(), "picture_s": seconds}


if __name__ == "__main__":
    main()
