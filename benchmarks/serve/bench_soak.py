"""Ten thousand requests to `fastdiff serve` with a tiny model: is memory flat, and are all pictures right?

    python benchmarks/serve/bench_soak.py [--requests N] [--save [DIR]]

USERS clients ask again and again, for pictures of KINDS kinds that differ in prompt, seed, size, steps and guidance.
Each picture is compared with what the pipeline draws.

    pictures_s    pictures per second
    wrong         answers that are an error, or not the picture of their kind
    memory_mb     memory of the server after each tenth of the requests
    growth        the last of them over the first, minus 1
    late_growth   the last over the fifth, minus 1
"""

import io
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

import fastdiff
from benchmarks.harness.reports import PARSER, report
from benchmarks.serve.load import Answer, Body, closed_loop
from benchmarks.serve.servers import serving
from tests.support.text_pipelines import text_pipeline

USERS, KINDS, PARTS = 16, 24, 10
PROMPTS = ("a cat", "the photo of a cat riding", "an astronaut", "a cat 's photo")


def main() -> None:
    PARSER.add_argument("--requests", type=int, default=10_000, help="number of requests (default: 10000)")
    report("serve_soak", [row(PARSER.parse_args().requests)])


def row(requests: int) -> dict[str, Any]:
    """Return the results of so many requests."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        model = Path(root, "tiny-sd")
        text_pipeline("sd1").save_pretrained(model)
        pipe, kinds = fastdiff.Pipeline.from_pretrained(model), bodies(random.Random(0))
        expected = [pixels_of(pipe, kind) for kind in kinds]
        answers, used, start = list[Answer](), list[float](), time.perf_counter()
        with serving(str(model)) as server:
            for _ in range(PARTS):
                answers += asked(server.address, kinds, requests // PARTS)
                used.append(memory(server.process))
        seconds = time.perf_counter() - start
    wrong = sum(not is_right(answer, expected[kinds.index(answer.body)]) for answer in answers)
    row = {"workload": "tiny-sd", "requests": len(answers), "pictures_s": len(answers) / seconds, "wrong": wrong}
    return row | {"growth": used[-1] / used[0] - 1, "late_growth": used[-1] / used[4] - 1, "memory_mb": used}


def bodies(dice: random.Random) -> list[Body]:
    """Return the kinds of requests."""
    return [
        {
            "prompt": dice.choice(PROMPTS),
            "seed": seed,
            "size": dice.choice(["16x16", "24x16"]),
            "num_inference_steps": dice.randint(1, 3),
            "guidance_scale": dice.choice([1.0, 7.5]),
        }
        for seed in range(KINDS)
    ]


def pixels_of(pipe: Any, kind: Body) -> bytes:
    width, height = map(int, kind["size"].split("x"))
    options = {key: kind[key] for key in ("prompt", "seed", "num_inference_steps", "guidance_scale")}
    return pipe(**options, height=height, width=width).images[0].tobytes()


def asked(address: str, kinds: list[Body], count: int) -> list[Answer]:
    return closed_loop(address, lambda number: kinds[number % KINDS], USERS, lambda done: done >= count)


def is_right(answer: Answer, pixels: bytes) -> bool:
    """Whether an answer is the picture with these pixels."""
    return answer.status == 200 and Image.open(io.BytesIO(answer.picture)).tobytes() == pixels


def memory(process: int) -> float:
    """Return the memory of a process in MB, without pages that it shares."""
    return psutil.Process(process).memory_full_info().uss / 1e6


if __name__ == "__main__":
    main()
