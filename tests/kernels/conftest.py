"""Fixtures of kernel tests: where they run, poisoned outputs, and the allowed error of an output.

The same tests run three times: on the torch references; with TRITON_INTERPRET=1 on the kernels in Triton's interpreter
(in a separate process, because Triton reads the variable once); and with `-m gpu` on a GPU.

The interpreter is slow. A test without the `device` fixture launches nothing, so it is not run again there. In the
interpreter, `make test` covers every pair of a test's parameter values, each with one dtype and one way of loading in
turn. `make test-all` runs the rest.
"""

import functools
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from fastdiff.kernels.host import launching
from fastdiff.kernels.plans.choices import hopper_obstacle
from tests.kernels.plans.by_plan import by_plan
from tests.support import accuracy
from tests.support.pairwise import combinations, cover

FOLDER = Path(__file__).parent
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    is_below = functools.cache(lambda path: FOLDER in path.parents)  # many items have the same path
    ours = [item for item in items if is_below(item.path)]
    left_out = {item for item in ours if not _runs_here(item)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    if not INTERPRETER:
        return
    tests = defaultdict(list)
    for item in ours:
        if hasattr(item, "callspec") and item not in left_out and not item.get_closest_marker("slow"):
            tests[item.function].append(item)
    for several in tests.values():
        kinds = [(_param(item, "dtype"), _param(item, "loads")) for item in several]
        chosen = cover(map(_covered, several), kinds)
        for i in {*range(len(several))} - {*chosen}:
            several[i].add_marker(pytest.mark.slow)


def _param(item, name: str):
    return item.callspec.params.get(name) if hasattr(item, "callspec") else None


def _runs_here(item) -> bool:
    """Whether a test can run here with its parameters, and tests what no other test does."""
    dtype, loads = _param(item, "dtype"), _param(item, "loads")
    if INTERPRETER and (item.get_closest_marker("gpu") or "device" not in item.fixturenames):
        return False
    if INTERPRETER and dtype == torch.bfloat16 and "dot_dtype" in item.fixturenames:
        return False  # Triton's interpreter has no bfloat16 dot
    no_kernel = not INTERPRETER and not torch.cuda.is_available()
    only_one_way = no_kernel or (loads == "pointers" and dtype == torch.float32)
    return loads in (None, "descriptors") or not only_one_way


def _covered(item) -> set:
    """Return what a test covers: its dtype, its way of loading, and pairs of its parameters, compared by identity."""
    params = dict(item.callspec.params)
    dtype, loads = params.pop("dtype", None), params.pop("loads", None)
    values = [id(value) for value in params.values()]
    return combinations(values) | {dtype, loads}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETER else "cpu")


@pytest.fixture
def runs_triton(device) -> bool:
    """Whether operations run on their kernels here, so that a test can require it."""
    return INTERPRETER or device.type == "cuda"


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def dot_dtype(dtype) -> torch.dtype:
    """A dtype that supports matrix products here."""
    return dtype


@pytest.fixture(params=["descriptors", "pointers"])
def loads(request, dot_dtype, monkeypatch, runs_triton) -> str:
    """Both ways of loading; pointers as on a card before sm_90."""
    if request.param == "pointers":
        monkeypatch.setattr(launching, "capability", lambda device: (8, 0))
    return request.param


@pytest.fixture
def randn(device):
    """Normal random numbers around a mean, the same in every test."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32, mean=0.0):
        return (torch.randn(*shape, generator=generator) + mean).to(dtype).to(device)

    return draw


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Make torch.empty and similar functions return NaN, so that elements that are not written fail."""

    def poison(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_nan

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Make Triton's interpreter patch its language once, instead of in every call of a device function."""
    if not INTERPRETER:
        yield
        return
    from triton.runtime import interpreter

    tl, patch = interpreter.tl, interpreter._patch_lang

    @functools.cache
    def languages(function):
        return [lang for lang in (tl, tl.core) if any(value is lang for value in function.__globals__.values())]

    def patch_once(function):
        patched = all(not tl.core.is_builtin(lang.dot) for lang in languages(function))
        return interpreter._LangPatchScope() if patched else patch(function)

    dtype_of = interpreter._get_np_dtype
    dtype_of_name = functools.cache(lambda name: dtype_of(tl.dtype(name)))

    def dtype_once(kind):
        kind = kind.scalar  # of a block
        return dtype_of(kind) if kind.is_ptr() else dtype_of_name(kind.name)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", patch_once)
        patches.setattr(interpreter, "_get_np_dtype", dtype_once)
        yield


@pytest.fixture(autouse=True)
def products_of_any_layout(monkeypatch):
    """Make Triton's interpreter multiply row-major tiles: on some CPUs numpy rounds other layouts differently."""
    if not INTERPRETER:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def in_rows(tile):
        return TensorHandle(np.ascontiguousarray(tile.data), tile.dtype)

    def create_dot(self, a, b, *others):
        return multiply(self, in_rows(a), in_rows(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def e4m3_of_cards(monkeypatch):
    """Make Triton's interpreter convert e4m3 as cards do: its own conversion loses the carry (31.9 -> 16) and NaN."""
    if not INTERPRETER:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    e4m3, convert = tl.float8e4nv, interpreter._convert_float
    kinds = {tl.float32: torch.float32, tl.float16: torch.float16, e4m3: torch.float8_e4m3fn}

    def by_torch(values, kind, wanted, rounding):
        if e4m3 not in (kind, wanted):
            return convert(values, kind, wanted, rounding)
        tensor = torch.from_numpy(values.copy()).view(kinds[kind]).to(kinds[wanted])
        return (tensor.view(torch.uint8) if wanted == e4m3 else tensor).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", by_torch)


@pytest.fixture
def assert_accurate(exact_matmuls):
    """`tests.support.accuracy.assert_accurate`, without TF32 in torch."""
    return accuracy.assert_accurate


@pytest.fixture
def assert_hopper(assert_accurate):
    """Return `check(operation, by_torch, x, *rest)` for the operation's sm_90 kernel.

    It checks that the kernel is accurate and has the bits of the generic kernel: in every repeat, alone, and
    beside NaN. It skips the test where the sm_90 kernel is not launched.
    """

    def check(operation, by_torch, x: torch.Tensor, *rest: torch.Tensor) -> None:
        reason = hopper_obstacle(operation.parse(x, *rest))
        if reason is not None:
            pytest.skip(reason)
        y = operation.hopper(x, *rest)
        assert_accurate(y, *accuracy.peer_and_truth(by_torch, x.dtype, x, *rest))
        assert torch.equal(y, operation.kernel(x, *rest))
        for _ in range(20):
            assert torch.equal(operation.hopper(x, *rest), y)
        assert torch.equal(by_plan(operation, x[-1:], *rest), y[-1:])
        beside = torch.cat([x[:1], torch.full_like(x, torch.nan)])
        assert torch.equal(operation.hopper(beside, *rest)[:1], y[:1])

    return check
