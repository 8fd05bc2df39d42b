"""The benchmark of whole pictures on the CPU, with a folder of a tiny pipeline."""

import json
import sys
import time

import pytest

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]
PARTS = ("picture", "text", "forward", "decode", "command")


@pytest.fixture
def bench(load, monkeypatch):
    bench = load("bench_text_to_image_cpu")
    for name, value in {"ROUNDS": 1, "PROCESSES": 1, "STEPS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    return bench


def test_a_row_has_every_part_and_the_error(bench, text_folder, monkeypatch, capsys):
    asked = []

    def wait(command):
        asked.append(command)
        time.sleep(1e-4)

    monkeypatch.setattr(bench, "run", wait)  # a process takes seconds
    monkeypatch.setattr(sys, "argv", ["bench", str(text_folder("sd1"))])
    bench.main()
    assert [command[:2] for command in asked] == [[sys.executable, flag] for flag in ("-m", "-c", "-c", "-m")]
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(row[f"{part}{what}"] > 0 for part in PARTS for what in ("_ms", "_diffusers_ms", "_ratio"))
    assert 0 < row["image_err"] < 1e-3 and row["workload"] == str(text_folder("sd1"))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_process_draws_a_picture(bench, text_folder, tmp_path, who):
    getattr(bench.processes(text_folder("sd1"), tmp_path), who)()
    assert [path.suffix for path in tmp_path.rglob("*.png")] == [".png"]


def test_calls_take_turns(bench):
    calls = []
    row = bench.in_turn("x", bench.Pair(lambda: calls.append("ours"), lambda: calls.append("theirs")), 2)
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert set(row) == {"x_ms", "x_diffusers_ms", "x_ratio"}
