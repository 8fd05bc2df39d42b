"""`fastdiff tune`: its rows, its exit codes, and what it refuses."""

import json
from functools import partial

import pytest
import torch

from fastdiff import cli
from fastdiff.checkpoints.single_files import cards
from fastdiff.tuning import judging, timing, tuner
from tests.checkpoints.single_files import ldm
from tests.tuning.doubling import FAST, doubling

CARD = "NVIDIA Tiny"


@pytest.fixture
def card(tunes, monkeypatch):
    """A machine with a card, and a forward with one shape."""
    monkeypatch.setattr(tuner, "find_card", lambda: CARD)
    monkeypatch.setattr(tuner, "compile_candidates", lambda shapes: None)
    monkeypatch.setattr(tuner, "forward", lambda config, batch, dtype: partial(doubling, torch.randn(batch)))


def test_a_row_for_each_shape_then_the_table(card, capsys, tmp_path):
    assert cli.main(["tune", "emoji64_b64", "dit_b2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "emoji64_b64  doubling 64: 2000.0 us, best 1000.0 us; ['fast', 4] instead of ['usual', 4], 4 of 7 refused",
        "dit_b2  doubling 2: 2000.0 us, best 1000.0 us; ['fast', 4] instead of ['usual', 4], 4 of 7 refused",
        f"saved in {tmp_path / 'nvidia-tiny.json'}",
    ]
    choices = json.loads((tmp_path / "nvidia-tiny.json").read_text())["choices"]
    assert choices == {"doubling": {"64": list(FAST), "2": list(FAST)}}


def test_rows_as_json(card, tunes, capsys):
    tunes[FAST] = 2.0
    assert cli.main(["tune", "emoji64_b64", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert (row["workload"], row["operation"], row["shape"], row["choice"]) == ("emoji64_b64", "doubling", "64", None)


def test_all_workloads_where_none_is_named(card, monkeypatch):
    asked = []
    monkeypatch.setattr(tuner, "rows", lambda forwards, card, wrong: asked.extend(forwards) or [])
    assert cli.main(["tune"]) == 0
    assert asked == list(tuner.WORKLOADS)


def test_what_cannot_be_proven_is_said_and_the_rest_is_tuned(card, monkeypatch, capsys, tmp_path):
    def tune(shape, real=judging.tune):
        if shape.name == "2":
            raise ArithmeticError("the usual choice has an error of 3")
        return real(shape)

    def forward(config, batch, dtype):
        if batch == 512:
            raise torch.OutOfMemoryError("out of memory")
        return partial(doubling, torch.randn(batch))

    monkeypatch.setattr(tuner, "tune", tune)
    monkeypatch.setattr(tuner, "forward", forward)
    assert cli.main(["tune", "ddpm32_b512", "dit_b2", "emoji64_b64"]) == 1
    out, said = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["emoji64_b64"]
    assert said.splitlines()[1:] == ["ddpm32_b512: out of memory", "doubling 2: the usual choice has an error of 3"]


def test_a_model_of_ones_own(card, monkeypatch):
    made = []
    monkeypatch.setattr(tuner, "rows", lambda forwards, card, wrong: made.extend(forwards.items()) or [])
    assert cli.main(["tune", "--model", "emoji64", "--batch-size", "3"]) == 0
    ((name, make),) = made
    assert name == "emoji64" and make.args == ("emoji64", 3)


@pytest.mark.slow
def test_a_model_of_ones_own_is_drawn():
    ((_, make),) = tuner.of_model("emoji64", 2).items()
    assert len(make()().images) == 2


def test_a_single_file_is_drawn(tmp_path, monkeypatch):
    _, _, folder, file = ldm.save_pipeline("sd1", tmp_path)
    (tmp_path / "sd1").symlink_to(folder)
    monkeypatch.setattr(cards, "CONFIGS", tmp_path)
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    ((name, make),) = tuner.of_model(str(file), 2).items()
    assert name == str(file) and len(make()().images) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["emoji63_b1"], "unknown WORKLOAD 'emoji63_b1'; use ddpm32_b1, "),
        (["dit_b2", "--model", "emoji64"], "--model and WORKLOAD exclude each other; give only one"),
        (["--batch-size", "0"], "argument --batch-size: 0 is not a whole number of at least 1; see fastdiff tune "),
    ],
    ids=["workload", "both", "batch-size"],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert cli.main(["tune", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"fastdiff: error: {message}")


@pytest.mark.parametrize(
    ("triton", "message"),
    [
        (True, "tune: no GPU was found; only GPU kernels can be tuned"),
        (False, "tune: Triton is not installed; pip install triton"),
    ],
)
def test_a_machine_that_has_nothing_to_tune_is_one_line(triton, message, monkeypatch, capsys):
    monkeypatch.setattr(tuner, "find_spec", lambda name: triton or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2
    assert capsys.readouterr() == ("", f"fastdiff: error: {message}\n")


def test_a_model_that_is_not_there_is_one_line(card, capsys):
    assert cli.main(["tune", "--model", "no-such-model"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
