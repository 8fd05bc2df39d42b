"""Which candidates of a shape are right, and which of them is the fastest.

The usual choice must hold against torch in a wider dtype, every other candidate must give its bits in each of some
repeats, over poisoned memory.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff.tuning import timing
from fastdiff.tuning.forwards import in_dtype
from fastdiff.tuning.shapes import Shape

REPEATS = 5  # a race shows as bits that move
GAIN = 0.97  # of the usual time, that a choice may take to be worth an entry


def tune(shape: Shape) -> dict[str, Any]:
    """Prove and time the candidates of a shape: a row of the results, of which `choice` is None for the usual.

    Raises ArithmeticError where the usual choice is wrong.
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
    """Return the milliseconds of each candidate, by turns."""

    def call(candidate: tuple) -> Any:
        with shape.choosing(candidate):
            return shape.run()

    calls = {str(candidate): partial(call, candidate) for candidate in candidates}
    times = timing.measure(calls, seconds=seconds)
    return {candidate: times[str(candidate)] for candidate in candidates}


def proven(shape: Shape) -> list[Tensor]:
    """Return the outputs of the usual choice, whose error is at most twice torch's own plus an ulp in every repeat.

    Raises ArithmeticError where it is larger: then no candidate that has the same bits is right.
    """
    eager = tensors(_reference(shape, None))[0]
    truth = tensors(_reference(shape, torch.float64 if eager.dtype == torch.float32 else torch.float32))[0]
    allowed = 2 * (eager - truth).abs().max() + torch.finfo(eager.dtype).eps * truth.abs().max()
    for _ in range(REPEATS):
        outputs = poisoned(shape, shape.candidates[0])
        error = (outputs[0] - truth).abs().max()
        if not error <= allowed:
            raise ArithmeticError(f"the usual choice is off by {error:.3g}, allowed are {allowed:.3g}")
    return outputs


def _reference(shape: Shape, dtype: torch.dtype | None) -> Any:
    """Return what torch makes of the shape's arguments, in a dtype or as they are."""
    args, options = shape.arguments if dtype is None else in_dtype(shape.arguments, dtype)
    return shape.reference(*args, **options)


def fault(shape: Shape, candidate: tuple, expected: list[Tensor]) -> str | None:
    """Return why a candidate must not be chosen, if it must not: it fails, or has other bits in one of some repeats."""
    for _ in range(REPEATS):
        try:
            outputs = poisoned(shape, candidate)
            torch.cuda.synchronize() if timing.DEVICE.type == "cuda" else None
        except Exception as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not all(map(torch.equal, outputs, expected)):
            return "other bits"
    return None


def poisoned(shape: Shape, candidate: tuple) -> list[Tensor]:
    """Return the outputs of a candidate, NaN where it writes nothing."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory
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
