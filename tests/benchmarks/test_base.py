"""`--base REV`: the alternation of the two sides, and the exit code."""

import io
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLEEPING = """
import time
from pathlib import Path

def ours(name):
    slower = name == "slower" and Path.cwd() == Path({root!r})
    return lambda: time.sleep(0.004 if slower else 0.002)
"""


@pytest.fixture
def base(harness, load, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench"])
    return load("base")


class Side:
    """A stand-in for a process that answers with these numbers, and then repeats the last."""

    def __init__(self, *numbers):
        self.numbers, self.stdin, self.stdout = list(numbers), io.StringIO(), self

    def readline(self):
        if not self.numbers:
            return ""
        return json.dumps(self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0])


@pytest.mark.parametrize(
    ("tree", "verdict", "code"),
    [
        (Side(1.0), "equal or faster", 0),
        (Side(1.02), "equal or faster", 0),
        (Side(*[1.5] * 11, 1.0), "equal or faster", 0),
        (Side(1.04), "LOSS", 1),
        (Side(), "a side failed", 1),
    ],
    ids=["equal", "within", "a-passing-load", "loss", "failed"],
)
def test_a_loss_is_one_that_lasts(base, monkeypatch, capsys, tmp_path, tree, verdict, code):
    @contextmanager
    def side(root, module, name):
        yield tree if root == base.ROOT else Side(1.0)

    monkeypatch.setattr(base, "side", side)
    (tmp_path / "fastdiff").mkdir()
    (tmp_path / "fastdiff" / "__init__.py").touch()
    assert base.compare("any", ["tiny"], str(tmp_path)) == code
    out, said = capsys.readouterr()
    (row,) = json.loads(out.splitlines()[-1])
    assert (row["workload"], row["verdict"]) == ("tiny", verdict)
    assert said.startswith("nothing is slower" if code == 0 else "slower than")


@pytest.mark.slow
def test_both_sides_take_turns_in_processes_of_their_own(base, monkeypatch, capsys, tmp_path):
    """The base is a checkout without `fastdiff.tuning` and with other benchmarks."""
    for name in ("fastdiff", "benchmarks"):
        (tmp_path / name).mkdir()
    for path in (ROOT / "fastdiff").iterdir():
        if path.name != "tuning":
            (tmp_path / "fastdiff" / path.name).symlink_to(path)
    (tmp_path / "benchmarks" / "harness.py").write_text("raise ImportError('of the base')\n")
    (tmp_path / "sleeping.py").write_text(SLEEPING.format(root=str(ROOT)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert base.compare("sleeping", ["slower"], str(tmp_path)) == 1
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["verdict"] == "LOSS" and 2 <= row["base_ms"] < row["fastdiff_ms"]


@pytest.mark.parametrize("module", ["bench_linear", "bench_conv2d"])
def test_the_call_of_an_operation(base, load, module):
    bench = load(module)
    bench.LINEARS = {"tiny": (1, 4, 8, 8, {"residual": True})}
    bench.CONVOLUTIONS = {"tiny": (1, 4, (8,), 8, 3, {"temb": True})}
    assert base.call_of(f"benchmarks.kernels.{module}", "tiny")().shape[-1] == 8


def test_what_is_no_commit_is_said(base, capsys):
    assert base.compare("any", ["tiny"], "no-such-commit") == 2
    assert "--base no-such-commit is neither a folder of a checkout nor a commit; git says: " in capsys.readouterr().err


def test_a_benchmark_compares_where_it_is_asked_to(base, monkeypatch):
    asked = []
    monkeypatch.setattr(sys, "argv", ["bench", "b", "--base", "HEAD"])
    monkeypatch.setattr(base, "compare", lambda *given: asked.append(given) or 1)
    with pytest.raises(SystemExit) as ended:
        base.compare_if_asked("any", ["a", "b"])
    assert ended.value.code == 1 and asked == [("any", ["b"], "HEAD")]


def test_else_it_goes_on(base):
    base.compare_if_asked("any", ["a"])


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history here")
def test_a_commit_is_checked_out_beside_and_goes_afterwards(load, tmp_path):
    checkouts = load("checkouts")
    with checkouts.checkout("HEAD", tmp_path / "base") as folder:
        assert (folder / "fastdiff" / "__init__.py").is_file()
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        assert head.startswith(checkouts.commit(folder))
    assert not folder.exists()
