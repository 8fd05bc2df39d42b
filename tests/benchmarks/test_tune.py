"""The tuner: which candidates it refuses, what it keeps, and that operations take it."""

import json
from functools import partial

import pytest
import torch

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.recording import Recorder
from fastdiff.kernels.plans import choices, tuning
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.plans.tuning import read_table, tuned

CPU = torch.device("cpu")
USUAL, FAST, SLOW = ("usual", 4), ("fast", 4), ("slow", 4)
OTHER_BITS, RACING, UNWRITTEN, FAILING = ("other", 4), ("racing", 4), ("unwritten", 4), ("failing", 4)
MILLISECONDS = {USUAL: 2.0, FAST: 1.0, SLOW: 3.0}


class Doubling(Call):
    """2 x by a kernel that does what its candidate is called."""

    runs = 0

    def __init__(self, x):
        self.x, self.device = x, CPU

    device = CPU

    def check(self):
        pass

    def reference(self):
        return 2 * self.x

    def kernel(self):
        candidates = [FAST, SLOW, OTHER_BITS, RACING, UNWRITTEN, FAILING]
        kind, _ = tuned("doubling", CPU, lambda: str(len(self.x)), USUAL, lambda: candidates)
        if kind == "failing":
            raise RuntimeError("out of resources\nand more")
        out = torch.empty_like(self.x)
        if kind != "unwritten":
            out.copy_(2 * self.x)
        Doubling.runs += kind == "racing"
        if kind == "other" or (kind == "racing" and Doubling.runs % 3 == 0):
            out *= 1 + 1e-3
        return out


doubling = Operation("doubling", Doubling)


@pytest.fixture
def tune(harness, load, monkeypatch, tmp_path):
    tune = load("tune")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    monkeypatch.setenv("FASTDIFF_TABLES", str(tmp_path))
    monkeypatch.setattr(tune, "triton", type("triton", (), {"__version__": "3.6.0"}))
    monkeypatch.setattr(tuning, "triton", tune.triton)
    monkeypatch.setattr(tune, "machine", lambda: {"gpu": "NVIDIA Tiny"})
    monkeypatch.setattr(
        tune, "measure", lambda calls, seconds: {name: MILLISECONDS.get(eval(name), 0.1) for name in calls}
    )
    return tune


def shape(tune, x):
    (found,) = tune.shapes_of(lambda: doubling(x))
    return found


def test_only_what_has_the_usual_bits_in_every_repeat_is_timed(tune):
    x = torch.randn(64)
    row = tune.tune(shape(tune, x))
    assert row["refused"] == {
        str(list(OTHER_BITS)): "other bits",
        str(list(RACING)): "other bits",
        str(list(UNWRITTEN)): "other bits",
        str(list(FAILING)): "RuntimeError: out of resources",
    }
    assert (row["usual_ms"], row["best_ms"], row["candidates"]) == (2.0, 1.0, 7)
    assert (row["usual"], row["choice"]) == (list(USUAL), list(FAST))
    json.dumps(row)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_usual_choice_that_is_wrong_is_said_and_not_tuned(tune, monkeypatch, tmp_path):
    found = shape(tune, torch.randn(64))
    wrong = found._replace(run=lambda: torch.full((64,), float("nan")))
    monkeypatch.setattr(tune, "shapes_of", lambda forward: [wrong, found])
    monkeypatch.setattr(tune, "compile_candidates", lambda shapes: None)
    said: list[str] = []
    assert [row["shape"] for row in tune.rows("tiny", lambda: None, said)] == ["64"]
    (line,) = said
    assert line.startswith("doubling 64: the usual choice is off by nan, allowed are ")


def test_less_than_three_per_cent_is_no_gain(tune, monkeypatch):
    monkeypatch.setitem(MILLISECONDS, FAST, 1.95)
    assert tune.tune(shape(tune, torch.randn(64)))["choice"] is None


def test_a_table_is_kept_shape_by_shape_and_read(tune, tmp_path, monkeypatch):
    shapes = {n: shape(tune, torch.randn(n)) for n in (64, 32)}
    for found in shapes.values():
        tune.keep(found, tune.tune(found))
    table = read_table(tmp_path / "nvidia-tiny.json")
    assert table.choices == {"doubling": {"64": list(FAST), "32": list(FAST)}}
    monkeypatch.setitem(MILLISECONDS, FAST, 1.99)
    tune.keep(shapes[32], tune.tune(shapes[32]))
    assert read_table(tmp_path / "nvidia-tiny.json").choices == {"doubling": {"64": list(FAST)}}, "the older one went"
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-tiny.json"]


def test_a_table_of_another_triton_is_not_gone_on_with(tune, tmp_path):
    (tmp_path / "nvidia-tiny.json").write_text(json.dumps({"triton": "1.0", "choices": {"doubling": {"1": [1]}}}))
    found = shape(tune, torch.randn(64))
    tune.keep(found, tune.tune(found))
    assert read_table(tmp_path / "nvidia-tiny.json").choices == {"doubling": {"64": list(FAST)}}


def test_a_shape_belongs_to_the_innermost_call_and_is_met_once(tune):
    x = torch.randn(8)
    asked = tune.Asked()
    assert isinstance(asked, Recorder)
    found = tune.shapes_of(lambda: (doubling(x), doubling(x), doubling(torch.randn(4))))
    assert [(each.operation, each.name) for each in found] == [("doubling", "8"), ("doubling", "4")]
    assert torch.equal(found[0].run(), 2 * x)


def test_the_rows_of_a_forward(tune, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "compile_candidates", lambda shapes: None)
    rows = list(tune.rows("tiny", lambda: partial(doubling, torch.randn(16)), []))
    assert [(row["workload"], row["operation"], row["shape"]) for row in rows] == [("tiny", "doubling", "16")]
    assert (tmp_path / "nvidia-tiny.json").is_file()


@pytest.mark.slow
def test_a_model_of_ones_own_is_drawn(tune, monkeypatch):
    monkeypatch.undo()  # on references
    images = tune.own_model("emoji64", 2)().images
    assert len(images) == 2
