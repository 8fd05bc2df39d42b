"""Check an sm_90 plan: its errors and its bits, compared with the generic kernel.

The truth is the reference in float64. The kernel tests use the same error bound (CONTRIBUTING.md, rule 6). `checking`
runs `python -m fastdiff.doctor.judging` as its child process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastdiff.doctor.child import WrongError, serve
from fastdiff.doctor.trials import Trial, trials_of
from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Shortcut, conv2d
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.weights import FP8, Quantised
from fastdiff.kernels.to_fp8 import to_fp8

RUNS = 3
NORM = {"num_groups": 32, "eps": 1e-5}  # of the norm that reads a convolution's moments
# The largest error of a 16-bit output, relative to the largest value of the truth: two eps.
CAPS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def judge(plan: str, device: str) -> None:
    """Run a plan on the device, at its shapes. Raises WrongError if an output is wrong.

    Errors of the compiler and the card are raised too.
    """
    for trial in trials_of(plan, torch.device(device)):
        if trial.call().hopper_plan() != plan:
            raise WrongError(f"{trial.call().hopper_plan()} runs at its shapes instead")
        with poisoned(), exact_products():
            _judge(trial)


def _judge(trial: Trial) -> None:
    ours = [_outputs(trial, "hopper") for _ in range(RUNS)]
    twins = _outputs(trial, "kernel")
    for what, actual, twin, truth in zip(("", " of its norm"), ours[0], twins, _truths(trial), strict=False):
        problem = error_of(actual, twin, truth)
        if problem is not None:
            raise WrongError(f"in {dtype_of(actual)}{what} {problem}")
    if not all(map(_equal, ours[1:], ours)):
        raise WrongError(f"its bits in {dtype_of(ours[0][0])} change from run to run")
    alone = _outputs(replace(trial, pictures=_last(trial.pictures)), "hopper")
    if not _equal(alone, [each[-1:] for each in ours[0]]):
        raise WrongError(f"a picture in {dtype_of(alone[0])} has different bits alone and in a batch")
    if trial.operation not in (attention, conv2d) and not _equal(ours[0], twins):
        raise WrongError(f"its bits in {dtype_of(ours[0][0])} differ from the generic kernel")


def error_of(actual: Tensor, twin: Tensor, truth: Tensor) -> str | None:
    """Return how an output breaks the error bound; None if it does not.

    Each error may be at most twice the twin's largest error plus an ulp, and at most CAPS. The RMS error may be at most
    1.5 times the twin's plus half an ulp.

    Args:
        actual: the output of the plan.
        twin: the output of the generic kernel in the same dtype, a 16-bit one.
        truth: the output in float64.
    """
    eps, cap = torch.finfo(actual.dtype).eps, CAPS[actual.dtype] * truth.abs().max()
    ulp, error, twins_error = eps * truth.abs(), (actual - truth).abs(), (twin - truth).abs()
    if not error.isfinite().all():
        return "some elements are NaN or infinite, or were not written"
    if (error - ulp).max() > 2 * twins_error.max():
        return f"the error is {error.max():.3g}; the generic kernel has {twins_error.max():.3g}"
    if error.max() > cap:
        return f"the error is {error.max():.3g}, above the allowed {cap:.3g}"
    rms, twins_rms, ulps = (each.square().mean().sqrt() for each in (error, twins_error, ulp))
    if rms > 1.5 * twins_rms + ulps / 2:
        return f"the RMS error is {rms:.3g}; the generic kernel has {twins_rms:.3g}"
    return None


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _outputs(trial: Trial, way: str) -> list[Tensor]:
    """Run the trial in one way and return y; for a convolution also the norm of y, which reads its moments."""
    run, arguments = getattr(trial.operation, way), trial.pictures | trial.shared
    if trial.operation is not conv2d:
        return [run(**arguments)]
    y, moments = run(**arguments, moments=True)
    return [y, _norm("kernel", y, moments=moments)]


def _norm(way: str, y: Tensor, **options: Any) -> Tensor:
    return getattr(group_norm, way)(y, **NORM, **options)


def _truths(trial: Trial) -> Iterator[Tensor]:
    """Yield the same outputs in float64. For an fp8 weight, x is rounded to e4m3 first, as the kernels do."""
    arguments = trial.pictures | trial.shared
    if trial.shared.get("weight") is not None and trial.shared["weight"].dtype == FP8:
        arguments["x"] = to_fp8(arguments["x"])[0].dequantised(torch.float64)
    y = trial.operation.reference(**_double(arguments))
    yield y
    if trial.operation is conv2d:
        yield _norm("reference", y)


def _double(value: Any) -> Any:
    """Return the value with its tensors in float64, including tensors in dicts and tuples."""
    if isinstance(value, dict):
        return {name: _double(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(_double, value))
    if isinstance(value, Quantised):
        return value.dequantised(torch.float64)
    return value.double() if isinstance(value, Tensor) else value


def _last(value: Any) -> Any:
    """Return the arguments of the last picture alone, as copies."""
    if isinstance(value, dict):
        return {name: _last(item) for name, item in value.items()}
    return value._replace(x=_last(value.x)) if isinstance(value, Shortcut) else value[-1:].clone()


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@contextmanager
def poisoned() -> Iterator[None]:
    """Make torch.empty and similar functions return NaN inside the block, to expose elements that are not written."""
    places = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    before = [(owner, name, getattr(owner, name)) for owner, name in places]

    def poison(allocate: Any) -> Any:
        def allocate_nan(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_nan

    try:
        for owner, name, allocate in before:
            setattr(owner, name, poison(allocate))
        yield
    finally:
        for owner, name, allocate in before:
            setattr(owner, name, allocate)


@contextmanager
def exact_products() -> Iterator[None]:
    """Make torch multiply float32 without TF32 inside the block."""
    backends: tuple[Any, ...] = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = False
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


if __name__ == "__main__":
    serve(judge)
