"""Check the candidates of a shape, and find the fastest correct one.

The usual choice must agree with torch in a wider dtype. Every other candidate must give the usual choice's bits in each
of several repeats, in poisoned memory.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff.execution.devices import is_lost
from fastdiff.kernels.host.weights import Scaled
from fastdiff.tuning import timing
from fastdiff.tuning.forwards import in_dtype
from fastdiff.tuning.shapes import Shape

REPEATS = 5  # a race shows as bits that change between repeats
GAIN = 0.97  # a choice gets an entry if it takes at most this share of the usual time


def tune(shape: Shape) -> dict[str, Any]:
    """Check and time the candidates of a shape. Return a row of results, whose `choice` is None to keep the usual one.

    Raises ArithmeticError if the usual choice is wrong, and RuntimeError if the GPU fails.
    """
    expected = proven(shape)
    refused = {candidate: why for candidate in shape.candidates[1:] if (why := fault(shape, candidate, expected))}
    sound = [candidate for candidate in shape.candidates if candidate not in refused]
    times = timed(shape, sound)
    best = min(sound, key=times.__getitem__)
    if best != shape.candidates[0]:
        times = timed(shape, [shape.candidates[0], best], seconds=0.05)
    usual_ms, best_ms = times[shape.candidates[0]], times[best]
    return {
        "operation": shape.operation,
        "shape": shape.name,
        "usual_ms": usual_ms,
        "best_ms": best_ms,
        "usual": list(shape.candidates[0]),
        "choice": list(best) if best_ms <= GAIN * usual_ms else None,
        "candidates": len(shape.candidates),
        "refused": {str(list(candidate)): why for candidate, why in refused.items()},
    }


def timed(shape: Shape, candidates: list[tuple], seconds: float = 0.01) -> dict[tuple, float]:
    """Return the milliseconds of each candidate, measured in turns."""

    def call(candidate: tuple) -> Any:
        with shape.choosing(candidate):
            return shape.run()

    calls = {str(candidate): partial(call, candidate) for candidate in candidates}
    times = timing.measure(calls, seconds=seconds)
    return {candidate: times[str(candidate)] for candidate in candidates}


def proven(shape: Shape) -> list[Tensor]:
    """Return the outputs of the usual choice, after checking them.

    In every repeat its error must be at most twice torch's own error plus an ulp. Raises ArithmeticError if it is
    larger: then a candidate with the same bits is wrong too.
    """
    eager = tensors(_reference(shape, None))[0]
    truth = tensors(_reference(shape, torch.float64 if eager.dtype == torch.float32 else torch.float32))[0]
    allowed = 2 * (eager - truth).abs().max() + torch.finfo(eager.dtype).eps * truth.abs().max()
    for _ in range(REPEATS):
        outputs = poisoned(shape, shape.candidates[0])
        error = (outputs[0] - truth).abs().max()
        if not error <= allowed:
            raise ArithmeticError(f"the usual choice has an error of {error:.3g}, above the allowed {allowed:.3g}")
    return outputs


def _reference(shape: Shape, dtype: torch.dtype | None) -> Any:
    """Return the reference's output for the shape's arguments, in `dtype` or as they are."""
    args, options = shape.arguments
    if dtype is not None:
        args = tuple(replace(each, dtype=dtype) if isinstance(each, Scaled) else in_dtype(each, dtype) for each in args)
        options = in_dtype(options, dtype)
    return shape.reference(*args, **options)


def fault(shape: Shape, candidate: tuple, expected: list[Tensor]) -> str | None:
    """Return why a candidate must not be chosen: it fails, or a repeat gives other bits. None if it may be chosen."""
    for _ in range(REPEATS):
        try:
            outputs = poisoned(shape, candidate)
            torch.cuda.synchronize() if timing.DEVICE.type == "cuda" else None
        except Exception as error:
            if is_lost(error):  # everything after it would fail too
                raise
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not all(map(torch.equal, outputs, expected)):
            return "other bits"
    return None


def poisoned(shape: Shape, candidate: tuple) -> list[Tensor]:
    """Return the outputs of a candidate, with NaN in elements that it does not write."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory
    try:
        with shape.choosing(candidate):
            return tensors(shape.run())
    finally:
        torch.use_deterministic_algorithms(False)


def tensors(output: Any) -> list[Tensor]:
    """Return all tensors of an output."""
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in tensors(part)]
    return [output] if isinstance(output, Tensor) else []
