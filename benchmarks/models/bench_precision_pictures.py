"""The cost of 8-bit weights in pictures: errors of the bundled models against float32, in bfloat16 and in 8 bits.

    python benchmarks/models/bench_precision_pictures.py [--save [DIR]]

The same as `fastdiff verify MODEL --precision int8` and `fp8`, on the CPU. `predictions` are the RMS errors of single
predictions on the way, from the least to the largest, relative to the RMS of the float32 output; `pictures` is the PSNR
of whole pictures. `_bfloat16` are the same with whole weights in bfloat16.
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.harness.reports import report
from fastdiff.requests.request import Request
from fastdiff.verification.precisions import compare_precisions

MODELS, PRECISIONS = ("emoji64", "emoji64-dit", "emoji-sd"), ("int8", "fp8")


def main() -> None:
    report("precision_pictures", (row(model, precision) for model in MODELS for precision in PRECISIONS))


def row(model: str, precision: Any) -> dict[str, Any]:
    differences = compare_precisions(Request(model=model, precision=precision), "cpu").differences
    steps = [each for each in differences if each.unit == "%"]
    whole = next(each for each in differences if each.unit == "dB")
    return {
        "workload": f"{model}, {precision}",
        "predictions_bfloat16": _range(each.beside for each in steps),
        "predictions": _range(each.error for each in steps),
        "pictures_bfloat16": f"{whole.beside:.1f} dB",
        "pictures": f"{whole.error:.1f} dB",
        "drawn": whole.what,
    }


def _range(errors: Iterable[float]) -> str:
    sorted_errors = sorted(errors)
    return f"{sorted_errors[0]:.2g} to {sorted_errors[-1]:.2g} %"


if __name__ == "__main__":
    main()
