"""Tuning tables: which table is read, what it may choose, and that no choice changes a bit."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from torch import Tensor

from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Norm, Shortcut, conv2d
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.geglu import geglu
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices, tuning
from fastdiff.kernels.plans.tuning import NO_TABLE, Table, card_table, file_name, named, read_table, tuned, using
from fastdiff.kernels.swiglu import swiglu
from fastdiff.tuning import judging, timing, tuner
from tests.kernels import test_attention, test_conv2d, test_geglu, test_linear, test_swiglu
from tests.support.accuracy import peer_and_truth

VERSION = getattr(triton, "__version__", "3.6.0")
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The user's folder of tables, empty."""
    monkeypatch.setattr(tuning, "triton", type("triton", (), {"__version__": VERSION}))
    monkeypatch.setenv("FASTDIFF_TABLES", str(tmp_path / "user"))
    return tmp_path / "user"


def write(folder, choices, version=VERSION):
    folder.mkdir(exist_ok=True)
    file = folder / "nvidia-h200.json"
    file.write_text(json.dumps({"triton": version, "kernels": tuning.kernels_digest(), "choices": choices}))
    return file


def test_a_card_has_the_table_of_its_name(folder):
    assert card_table("NVIDIA H200") is NO_TABLE
    file = write(folder, {"linear": {"1": [2]}})
    assert card_table("NVIDIA H200") == Table(str(file), {"linear": {"1": [2]}})
    assert card_table("NVIDIA A100-SXM4-80GB") is NO_TABLE


def test_tables_are_in_the_users_cache_unless_the_environment_says_where(monkeypatch):
    monkeypatch.delenv("FASTDIFF_TABLES")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tuning.user_folder().as_posix() == "/cache/fastdiff/tables"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert tuning.user_folder().as_posix() == "/home/me/.cache/fastdiff/tables"


def test_a_file_is_named_after_its_card():
    assert file_name("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090.json"
    assert file_name("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb.json"


def test_a_table_of_another_triton_is_not_used(folder):
    file = write(folder, {"linear": {"1": [1]}}, version="2.0")
    assert read_table(file) == Table(f"the built-in rules; {file} was made with Triton 2.0, not {VERSION}")


def test_a_table_of_other_kernels_is_not_used(folder, monkeypatch):
    file = write(folder, {"linear": {"1": [1]}})
    monkeypatch.setattr(tuning, "kernels_digest", lambda: "another")
    assert read_table(file) == Table(f"the built-in rules; {file} was made with other kernels")


def test_the_digest_of_the_kernels_changes_with_their_code(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "plans" / "tuning.py"))
    (tmp_path / "linear.py").write_text("a = 1")
    first = tuning.kernels_digest.__wrapped__()
    (tmp_path / "linear.py").write_text("a = 2")
    assert tuning.kernels_digest.__wrapped__() != first != tuning.kernels_digest()


def test_a_table_without_choices_is_none(folder):
    write(folder, {"linear": {}})
    assert card_table("NVIDIA H200") is NO_TABLE


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"triton": "3.6.0"}', '{"triton": "3.6.0", "choices": [1]}', '{"triton": 1, "choices": {"a": 1}}'],
)
def test_a_broken_table_is_not_used(folder, text):
    file = write(folder, {})
    file.write_text(text)
    assert read_table(file) == Table(f"the built-in rules; {file} is not a tuning table")


def test_a_table_chooses_among_the_candidates_alone():
    def choose(shape: str, table: dict[str, list]) -> tuple:
        with using(Table("test", {"op": table})):
            return tuned("op", torch.device("cpu"), lambda: shape, (1, 1), lambda: [(1, 2), (1, 3)])

    assert choose("a", {"a": [1, 3]}) == (1, 3)
    assert choose("a", {"b": [1, 3]}) == (1, 1), "another shape"
    for wrong in ([2, 3], [1], [1, 3, 4], ["1", 3], []):
        assert choose("a", {"a": wrong}) == (1, 1), "no candidate"


def test_without_a_table_no_shape_is_named():
    assert tuned("op", torch.device("cpu"), pytest.fail, (1,), pytest.fail) == (1,)


def test_shapes_are_named_by_all_that_is_given():
    assert named(2, "3x3", torch.float16, None, bias=1, gate=None, norm=()) == "2 3x3 float16 bias norm"


def conv(n, side, channels, out_channels, *, draw, kernel=3, **options):
    x = draw(n, side if kernel == 3 else 1, side, channels)
    weight = draw(out_channels, channels, min(3, x.shape[1]), kernel) / (channels * kernel * kernel) ** 0.5
    x_padding = 1 if kernel == 3 else (2, 2, 0, 0)
    return conv2d, (x, weight, draw(out_channels)), {"padding": x_padding, "moments": "norm" not in options} | options


def tokens(n, count, channels, out_channels, *, draw, **options):
    given = draw(n, count, channels), draw(out_channels, channels) / channels**0.5, draw(out_channels)
    return linear, given, options


# name -> a call with n pictures; the calls have different kinds of candidates
CALLS: dict[str, Callable] = {
    "conv2d": lambda n, draw: conv(n, 8, 64, 64, draw=draw, temb=draw(n, 64)),
    "conv2d-blocks": lambda n, draw: conv(n, 4, 128, 128, draw=draw, residual=draw(n, 4, 4, 128)),
    "conv2d-norm": lambda n, draw: conv(n, 8, 32, 64, draw=draw, norm=Norm(8)),
    "conv2d-shortcut": lambda n, draw: conv(
        n, 8, 64, 32, draw=draw, shortcut=Shortcut(draw(n, 8, 8, 32), draw(32, 32, 1, 1))
    ),
    "conv2d-chunks": lambda n, draw: conv(n, 4, 1024, 32, draw=draw),
    "conv2d-row-norm": lambda n, draw: conv(n, 16, 32, 32, draw=draw, kernel=5, norm=Norm(8)),
    "conv2d-first": lambda n, draw: conv(n, 8, 3, 32, draw=draw),
    "conv2d-last": lambda n, draw: conv(n, 8, 64, 3, draw=draw),
    "linear": lambda n, draw: tokens(n, 32, 64, 96, draw=draw, gate=draw(n, 96), residual=draw(n, 32, 96)),
    "geglu": lambda n, draw: (geglu, tokens(n, 32, 64, 64, draw=draw)[1], {}),
    "swiglu": lambda n, draw: (swiglu, tokens(n, 32, 64, 64, draw=draw)[1], {}),
    "attention": lambda n, draw: (attention, tuple(draw(n, 80, 80) for _ in "qkv"), {"heads": 2}),
    "attention-causal": lambda n, draw: (
        attention,
        tuple(draw(n, 80, 80) for _ in "qkv"),
        {"heads": 2, "causal": True},
    ),
}
BY_TORCH = {
    conv2d: test_conv2d.by_torch,
    linear: test_linear.by_torch,
    geglu: test_geglu.by_torch,
    swiglu: test_swiglu.by_torch,
    attention: test_attention.by_torch,
}
ON_GPU: dict[str, Callable] = {
    "conv2d-C320-H64": lambda n, draw: conv(n, 64, 320, 320, draw=draw),
    "conv2d-C256-H16": lambda n, draw: conv(n, 16, 256, 256, draw=draw, temb=draw(n, 256)),
    "conv2d-C256-H8-norm": lambda n, draw: conv(n, 8, 256, 256, draw=draw, norm=Norm(32)),
    "conv2d-C256-H4-norm": lambda n, draw: conv(n, 4, 256, 256, draw=draw, norm=Norm(32)),
    "conv2d-C512-H4-norm": lambda n, draw: conv(n, 4, 512, 256, draw=draw, norm=Norm(32)),
    "conv2d-C256-H8-shortcut": lambda n, draw: conv(
        n, 8, 256, 256, draw=draw, shortcut=Shortcut(draw(n, 8, 8, 512), draw(256, 512, 1, 1) / 16)
    ),
    "conv2d-C1280-H8": lambda n, draw: conv(n, 8, 1280, 1280, draw=draw),
    "conv2d-C256-H16-up": lambda n, draw: conv(n, 16, 256, 256, draw=draw, upsample=True),
    "conv2d-row-C256": lambda n, draw: conv(n, 32, 256, 256, draw=draw, kernel=5, norm=Norm(8)),
    "linear-dit": lambda n, draw: tokens(
        n, 256, 1152, 1152, draw=draw, gate=draw(n, 1152), residual=draw(n, 256, 1152)
    ),
    "attention-d40": lambda n, draw: (attention, tuple(draw(n, 1024, 320) for _ in "qkv"), {"heads": 8}),
    "attention-d160": lambda n, draw: (attention, tuple(draw(n, 256, 1280) for _ in "qkv"), {"heads": 8}),
}
QUICK = {"conv2d-first", "conv2d-last", "linear", "geglu"}  # quick in the interpreter
EVERYWHERE = [
    pytest.param(call, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, call in CALLS.items()
]
EVERYWHERE += [pytest.param(call, id=name, marks=gpu) for name, call in ON_GPU.items()]


class Asked:
    """A stand-in for a table: records an operation's candidates, and returns a given candidate."""

    def __init__(self, candidate=None):
        self.candidate, self.candidates = candidate, []

    def choose(self, operation, shape, usual, candidates):
        self.candidates = list(candidates())
        return usual if self.candidate is None else self.candidate


def drawing(dtype, device) -> Callable[..., Tensor]:
    """Return `draw(n, *shape)`, whose random numbers for the first picture are the same in any batch."""
    seeds = count()

    def draw(n: int, *shape: int) -> Tensor:
        seed = next(seeds)
        each = [torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + i)) for i in range(n)]
        return torch.stack(each).to(device, dtype)

    return draw


def all_of(output) -> list[Tensor]:
    """Return the tensors of an output: a tensor, or a tuple of tensors, tuples and sizes."""
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in all_of(part)]
    return [output] if isinstance(output, Tensor) else []


@contextmanager
def asking(candidate=None):
    asked = Asked(candidate)
    with using(asked):
        yield asked


@pytest.mark.parametrize("call", EVERYWHERE)
def test_every_candidate_is_right_and_has_the_usual_bits(
    call, dot_dtype, device, runs_triton, loads, assert_accurate, exact_matmuls
):
    if not runs_triton:
        pytest.skip("no kernel runs here")
    operation, args, options = call(1 if device.type == "cpu" else 2, drawing(dot_dtype, device))
    if device.type == "cpu" and dot_dtype == torch.float32 and args[1].numel() > 10**5:
        pytest.skip("too slow in the interpreter")
    with asking() as asked:
        usual = all_of(operation.kernel(*args, **options))
    assert asked.candidates
    given = {name: value for name, value in options.items() if name != "moments"}
    torchs, truth = peer_and_truth(BY_TORCH[operation], dot_dtype, *args, **given)
    candidates = asked.candidates if device.type == "cuda" else smallest_and_largest(asked.candidates)
    for candidate in candidates:
        with asking(candidate):
            try:
                outputs = all_of(operation.kernel(*args, **options))
            except triton.runtime.errors.OutOfResources:  # the tuner refuses it too
                continue
        assert_accurate(outputs[0], torchs, truth)
        if device.type == "cuda":  # numpy's bits depend on the tile
            assert all(map(torch.equal, outputs, usual)), candidate


def test_the_tuner_keeps_what_these_operations_choose(device, runs_triton, monkeypatch):
    """On a GPU with its times; in the interpreter with set times, in which another candidate is faster."""
    if not runs_triton:
        pytest.skip("no kernel runs here")
    if device.type == "cpu":
        monkeypatch.setattr(choices, "unavailable", lambda device: None)
        monkeypatch.setattr(judging, "REPEATS", 1)
        monkeypatch.setattr(tuner, "compile_candidates", lambda shapes: None)
        monkeypatch.setattr(timing, "measure", lambda calls, **_: {name: 1 / (1 + i) for i, name in enumerate(calls)})
    draw = drawing(torch.float32, device)
    x, weight, weight2 = draw(1, 16, 32), draw(32, 32) / 6, draw(64, 32) / 6

    def forward() -> Tensor:
        y = swiglu(linear(x, weight), weight2)
        return attention(y, y, y, heads=2)

    *rows, whole = tuner.Tuning({"a model": lambda: forward}, "a card").rows()
    assert sorted(row["operation"] for row in rows) == ["attention", "linear", "linear"]
    assert all(row["candidates"] > 1 for row in rows) and whole["measured"] == 3
    found = card_table("a card").choices
    if device.type == "cpu":
        assert {row["shape"]: row["choice"] for row in rows} == found["linear"] | found["attention"]
    assert list(tuner.Tuning({"a model": lambda: forward}, "a card").rows()) == [whole]


def smallest_and_largest(candidates: list) -> list:
    """Return two candidates for the interpreter, which is slow and has no warps or stages."""
    sizes = list({tuple(candidate._replace(warps=0, stages=0)): candidate for candidate in candidates}.values())
    return [*{sizes[0], sizes[-1]}]


@gpu
@pytest.mark.parametrize("call", EVERYWHERE)
def test_a_candidate_has_the_bits_of_a_picture_alone(call, dot_dtype, device, loads):
    """Compare every candidate at batch 3 with the usual choice at batch 1."""

    def first(n: int, candidate=None) -> tuple[list[Tensor], list]:
        operation, args, options = call(n, drawing(dot_dtype, device))
        with asking(candidate) as asked:
            return [tensor[0] for tensor in all_of(operation.kernel(*args, **options))], asked.candidates

    alone, _ = first(1)
    for candidate in first(3)[1]:
        try:
            assert all(map(torch.equal, first(3, candidate)[0], alone)), candidate
        except triton.runtime.errors.OutOfResources:
            continue
