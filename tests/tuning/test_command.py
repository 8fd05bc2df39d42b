"""`fastdiff tune`: its rows, its exit codes, and what it refuses."""

import json
from functools import partial

import pytest
import torch

from fastdiff import cli
from fastdiff.cli.interruption import CTRL_C
from fastdiff.tuning import judging, tuner
from tests.tuning.doubling import FAST, doubling

CARD = "NVIDIA Tiny"
FOUND = "2000.0 us, best 1000.0 us; ['fast', 4] instead of ['usual', 4], 4 of 7 refused"
GAIN = "10.000 ms, with the table 9.000 ms (1.111 times as fast)"


@pytest.fixture
def card(tunes, monkeypatch):
    """A machine with a card, and a forward with one shape."""
    monkeypatch.setattr(tuner, "find_card", lambda: CARD)
    monkeypatch.setattr(tuner, "compile_candidates", lambda shapes: None)
    monkeypatch.setattr(tuner, "forward", lambda config, batch, dtype: partial(doubling, torch.randn(batch)))


def test_a_row_for_each_shape_then_the_table(card, capsys, tmp_path):
    assert cli.main(["tune", "emoji64_b64", "dit_b2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"emoji64_b64  [1/1, 0.0 min left]  doubling 64: {FOUND}",
        f"emoji64_b64: 1 of 1 shapes measured, 1 with a faster choice; {GAIN}",
        f"dit_b2  [1/1, 0.0 min left]  doubling 2: {FOUND}",
        f"dit_b2: 1 of 1 shapes measured, 1 with a faster choice; {GAIN}",
        f"saved in {tmp_path / 'nvidia-tiny.json'}",
    ]
    choices = json.loads((tmp_path / "nvidia-tiny.json").read_text())["choices"]
    assert choices == {"doubling": {"64": list(FAST), "2": list(FAST)}}


def test_rows_as_json(card, tunes, capsys):
    tunes[FAST] = 2.0
    assert cli.main(["tune", "emoji64_b64", "--json"]) == 0
    row, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["workload"], row["operation"], row["shape"], row["choice"]) == ("emoji64_b64", "doubling", "64", None)
    assert whole == {"workload": "emoji64_b64", "measured": 1, "shapes": 1, "choices": 0, "dropped": 0}


def test_what_gains_nothing_is_said(card, tunes, capsys, tmp_path):
    tunes["tuned"] = 10.0
    assert cli.main(["tune", "emoji64_b64"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "emoji64_b64: 1 of 1 shapes measured, 1 with a faster choice; 10.000 ms, with the table 10.000 ms "
        "(1.000 times as fast); no gain, so 1 choices were dropped",
        f"saved in {tmp_path / 'nvidia-tiny.json'}, which has no choices",
    ]
    tunes[FAST] = 2.0
    assert cli.main(["tune", "dit_b2"]) == 0
    assert "dit_b2: 1 of 1 shapes measured; the defaults are the fastest\n" in capsys.readouterr().out


def test_the_time_that_is_over(card, monkeypatch, capsys):
    now = iter(range(0, 10**6, 20))  # seconds
    monkeypatch.setattr(tuner, "clock", lambda: next(now))
    assert cli.main(["tune", "emoji64_b64", "dit_b2", "--minutes", "1"]) == 0
    out, said = capsys.readouterr()
    assert "doubling" not in out
    assert said.splitlines() == [
        "fastdiff: the time is over, and the same command goes on; not tuned yet:",
        "emoji64_b64: 1 of 1 shapes",
        "dit_b2: not begun",
    ]


def test_ctrl_c_says_that_the_work_is_kept(card, monkeypatch):
    said = []
    monkeypatch.setattr(tuner.Tuning, "rows", lambda tuning: said.append(CTRL_C.describe()) or [])
    assert cli.main(["tune", "dit_b2"]) == 0
    assert said == ["fastdiff: interrupted; the table has all finished shapes, and the same command goes on"]
    assert CTRL_C.describe() == "fastdiff: interrupted"


def test_a_table_that_cannot_be_gone_on_with_is_said(card, capsys, tmp_path):
    file = tmp_path / "nvidia-tiny.json"
    file.write_text(json.dumps({"triton": "1.0", "choices": {}}))
    assert cli.main(["tune", "emoji64_b64"]) == 0
    assert capsys.readouterr().err == f"fastdiff: starting anew: {file} was made with Triton 1.0, not 3.6.0\n"
    assert cli.main(["tune", "emoji64_b64"]) == 0
    assert capsys.readouterr().err == ""


def test_all_workloads_where_none_is_named(card, monkeypatch):
    asked = []
    monkeypatch.setattr(tuner.Tuning, "rows", lambda tuning: asked.extend(tuning.forwards) or [])
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
    assert [line.split()[0] for line in out.splitlines()] == ["emoji64_b64", "emoji64_b64:"]
    assert said.splitlines()[1:] == ["ddpm32_b512: out of memory", "doubling 2: the usual choice has an error of 3"]


def test_a_model_of_ones_own(card, monkeypatch):
    made = []
    monkeypatch.setattr(tuner.Tuning, "rows", lambda tuning: made.extend(tuning.forwards) or [])
    assert cli.main(["tune", "--model", "emoji64", "--batch-size", "1,3", "--size", "64x64,128x96"]) == 0
    sizes = [f"{size}, batch {batch}" for size in ("64x64", "128x96") for batch in (1, 3)]
    assert made == [f"emoji64, {each}" for each in sizes]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["emoji63_b1"], "unknown WORKLOAD 'emoji63_b1'; use ddpm32_b1, "),
        (["dit_b2", "--model", "emoji64"], "--model and WORKLOAD exclude each other; give only one"),
        (["--batch-size", "0"], "argument -b/--batch-size: 0 is not a whole number of at least 1; see fastdiff tune "),
        (["--minutes", "0"], "argument --minutes: 0 is not a number of minutes above 0; see fastdiff tune "),
        (["--minutes", "nan"], "argument --minutes: nan is not a number of minutes above 0; see fastdiff tune "),
        (["--size", "64x64"], "--size needs --model"),
        (["dit_b2", "--batch-size", "2"], "--batch-size needs --model"),
        (["--control", "emoji-edges"], "--control needs --model"),
    ],
    ids=["workload", "both", "batch-size", "minutes", "nan", "size", "batches", "control"],
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
