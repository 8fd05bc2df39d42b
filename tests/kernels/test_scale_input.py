"""The model's input has the bits of a division, a cast and a copy, and each picture reads its own row."""

import os

import pytest
import torch

from fastdiff.kernels.denoise import COLUMNS
from fastdiff.kernels.scale_input import INPUT_DIV, scale_input

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = {
    "N2-H8-C3": (2, 8, 8, 3),
    "N1-H1-C1-smallest": (1, 1, 1, 1),
    "N3-H19-C3-odd-several-programs": (3, 19, 19, 3),
    "N2-L31-C2-one-dimension": (2, 31, 2),
    "N64-H64-C3": pytest.param((64, 64, 64, 3), marks=pytest.mark.gpu),
}


@pytest.fixture
def run(runs_triton):
    return scale_input.kernel if runs_triton else scale_input


def table(like, divisors=(1.0, 14.6146, 0.37)):
    rows = torch.rand(len(divisors), len(COLUMNS)).to(like)
    rows[:, INPUT_DIV] = torch.tensor(divisors).to(like)
    return rows


def steps(n, like):
    return (torch.arange(n, device=like.device) % 3).int()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output(shape, copies, dtype, randn, run):
    x_t = randn(*shape, dtype=torch.float32) * 7
    rows, step = table(x_t), steps(len(x_t), x_t)
    made = run(x_t, rows, step, dtype, copies)
    expected = torch.cat([(x / rows[i, INPUT_DIV]).to(dtype)[None] for x, i in zip(x_t, step.tolist(), strict=True)])
    assert (made.dtype, made.shape) == (dtype, (copies * shape[0], *shape[1:]))
    assert made.is_contiguous()
    rounding = 2**-7 if INTERPRETER and dtype == torch.bfloat16 else 0  # the interpreter rounds bfloat16 down
    for half in made.split(shape[0]):
        torch.testing.assert_close(half, expected, rtol=rounding, atol=0)


def test_a_divisor_of_one_changes_nothing(randn, run):
    x_t = randn(2, 5, 5, 3, dtype=torch.float32)
    x_t[0, 0, 0, 0], x_t[1, 2, 3, 1] = float("nan"), float("-inf")
    made = run(x_t, table(x_t, (1.0,) * 3), steps(2, x_t), torch.float32)
    torch.testing.assert_close(made, x_t, rtol=0, atol=0, equal_nan=True)


def test_a_table_for_each_picture(randn, run):
    x_t = randn(3, 5, 5, 3, dtype=torch.float32)
    tables = torch.stack([table(x_t, divisors) for divisors in ((2.0, 3.0), (5.0, 7.0), (11.0, 13.0))])
    step = torch.tensor([1, 0, 1], dtype=torch.int32, device=x_t.device)
    made = run(x_t, tables, step, torch.float32, 2)
    expected = torch.cat([run(x_t[i : i + 1], tables[i], step[i : i + 1], torch.float32) for i in range(3)])
    assert all(torch.equal(half, expected) for half in made.split(3))


def test_strided_pictures(randn, run):
    x_t = randn(2, 3, 6, 5, dtype=torch.float32).permute(0, 2, 3, 1)
    rows, step = table(x_t), steps(2, x_t)
    found = run(x_t, rows, step, torch.float32)
    assert torch.equal(found, run(x_t.contiguous(), rows, step, torch.float32))


X, ROWS, STEP = torch.zeros(2, 4, 4, 3), torch.zeros(5, len(COLUMNS)), torch.zeros(2, dtype=torch.int32)
REFUSED = {
    "half-precision-picture": ((X.half(), ROWS, STEP, torch.float32), "x_t: expected float32"),
    "one-row": ((X, ROWS[0], STEP, torch.float32), "rows: expected float32"),
    "float64-rows": ((X, ROWS.double(), STEP, torch.float32), "rows: expected float32"),
    "one-step": ((X, ROWS, STEP[:1], torch.float32), r"step: expected int32 \(2,\)"),
    "long-steps": ((X, ROWS, STEP.long(), torch.float32), "step: expected int32"),
    "rows-elsewhere": ((X, ROWS.to("meta"), STEP, torch.float32), "rows is on meta"),
    "whole-numbers": ((X, ROWS, STEP, torch.int32), "dtype is torch.int32"),
    "no-copies": ((X, ROWS, STEP, torch.float32, 0), "copies is 0"),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, message):
    with pytest.raises(ValueError, match=message):
        scale_input(*args)
