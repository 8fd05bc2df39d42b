"""The fuzzer can fail: it reports each kind of planted failure. Its cases depend on their seed alone."""

import functools
import gc
import hashlib
import importlib
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff import cli
from fastdiff.errors import InputError
from fastdiff.pipelines import Pipeline
from tests.fuzz import __main__ as long_run
from tests.fuzz import cases, watch, workers
from tests.fuzz.cases import Case
from tests.fuzz.doors import library
from tests.fuzz.doors.outcomes import Outcome, guarded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the watching of a case needs Linux")
SOUND = Case("plain", (), "library", "pipeline")


@pytest.fixture
def places(tmp_path):
    """A case's folder and the folder beside it."""
    for name in ("case", "beside"):
        (tmp_path / name).mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "beside" / "w.safetensors")
    return tmp_path / "case", tmp_path / "beside"


def planted(monkeypatch, deed):
    """Return the promises that a sound case breaks if loading the pipeline first does `deed`."""
    sound = Pipeline.from_pretrained

    def from_pretrained(folder, **options):
        deed(folder)
        return sound(folder, **options)

    with cases.made(SOUND) as folder:
        assert not cases.run(SOUND, folder).problems  # this also warms up what happens once per process
        monkeypatch.setattr(Pipeline, "from_pretrained", from_pretrained)
        return cases.run(SOUND, folder).problems


def fail(folder):
    raise KeyError(None)


def fail_in_lines(folder):
    raise InputError("one\ntwo")


def grow(folder):
    torch.zeros(2**26)
    del folder


@pytest.mark.parametrize(
    ("deed", "problem"),
    [
        pytest.param(fail, "raised KeyError", id="traceback"),
        pytest.param(fail_in_lines, "a refusal of several lines", id="lines"),
        pytest.param(lambda folder: warnings.warn("odd", stacklevel=1), "raised UserWarning", id="warning"),
        pytest.param(lambda folder: open("/etc/hostname").close(), "read outside: open '/etc/hostname'", id="read"),
        pytest.param(lambda folder: os.listdir("/etc"), "read outside: os.listdir '/etc'", id="list"),
        pytest.param(lambda folder: os.mkdir(folder.parents[1] / "new"), "wrote outside: os.mkdir", id="write"),
        pytest.param(lambda folder: (folder.parents[1] / "beside" / "w").read_text(), "opened 'w' beside", id="beside"),
        pytest.param(lambda folder: os.system("true"), "os.system", id="command"),
        pytest.param(lambda folder: subprocess.run(["true"]), "subprocess.Popen", id="process"),
    ],
)
def test_what_is_planted_is_reported(monkeypatch, deed, problem):
    assert any(each.startswith(problem) for each in planted(monkeypatch, deed))


def test_weights_that_rust_reads_beside_the_folder(places):
    folder, beside = places
    with watch.watching(folder, beside) as problems:
        load_file(beside / "w.safetensors")
    assert problems == ["opened 'w.safetensors' beside the case's folder"]


def test_what_is_allowed(places):
    folder, beside = places
    with watch.watching(folder, beside) as problems:
        (folder / "x").write_text("x")
        assert os.listdir(folder) == ["x"]
        (folder / "x").rename(folder / "y")
    assert problems == []


def test_a_hang_and_a_growth(places, monkeypatch):
    monkeypatch.setattr(watch, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(watch, "MAX_GROWTH", 2**26)
    gc.collect()  # what earlier tests left must not be freed while the growth is measured
    with watch.watching(*places) as problems:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        assert torch.ones(2**26)[0] == 1
    assert [each.split(":")[0] for each in problems] == ["hung", "grew"]


def test_the_report_of_a_failure_reads_no_source(places, tmp_path, monkeypatch):
    (tmp_path / "failing_code.py").write_text("def fail():\n    raise KeyError\n")
    monkeypatch.syspath_prepend(tmp_path)
    failing = importlib.import_module("failing_code")
    with watch.watching(*places) as problems:
        outcome = guarded(failing.fail)()
    assert outcome.problems[0].startswith("raised KeyError") and problems == []


def test_a_picture_that_is_not_whole(monkeypatch):
    class Broken:
        images = torch.full((1, 3, 8, 8), float("nan"))

    cases.prepare(SOUND.door, SOUND.what)
    monkeypatch.setattr(Pipeline, "__call__", lambda self, **options: Broken)
    with cases.made(SOUND) as folder:
        assert cases.run(SOUND, folder).problems == ["a picture that is not finite"]
        Broken.images = torch.zeros(1, 3, 4, 8)
        assert cases.run(SOUND, folder).problems == ["a picture of (4, 8) for [8, 8]"]


@pytest.mark.parametrize(
    ("ends", "problem"),
    [
        pytest.param(lambda: fail(None), "raised KeyError", id="traceback"),
        pytest.param(lambda: 3, "exit code 3", id="code"),
        pytest.param(lambda: 2, "0 lines on stderr", id="no line"),
        pytest.param(lambda: print("x" * 501, file=sys.stderr) or 2, "a line of 501", id="long line"),
    ],
)
def test_a_command_that_breaks_its_promises(monkeypatch, ends, problem):
    case = Case("plain", (), "command", "models")
    with cases.made(case) as folder:
        cases.run(case, folder)
        monkeypatch.setattr(cli, "main", lambda argv: ends())
        (found,) = cases.run(case, folder).problems
    assert found.startswith(problem)


def test_damaged_weights_that_are_drawn_with(monkeypatch):
    case = Case(
        "plain", (("tensor", "unet/diffusion_pytorch_model.safetensors", "missing", "0"),), "library", "pipeline"
    )
    cases.prepare(case.door, case.what)
    monkeypatch.setitem(library.LIBRARY, "pipeline", lambda folder, options: Outcome(True))
    with cases.made(case) as folder:
        assert "drawn in spite of" in cases.run(case, folder).problems[0]


def digest() -> str:
    """Return a digest of some cases of each group without a folder of its own, and of one with a folder."""
    drawn: list[str] = []
    for group in ("png", "command", "call", "plan", "text", "styles", "dropped", "history", "files", "policy"):
        cases.explore(group, 20, 0, lambda case: drawn.append(case.to_json()))
    return hashlib.sha256("".join(drawn).encode()).hexdigest()


def test_cases_do_not_depend_on_the_imported_modules(tmp_path, monkeypatch):
    before = digest()
    (tmp_path / "constants_of_another.py").write_text(f"CONSTANTS = {[*range(101, 500)]}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("constants_of_another")
    assert digest() == before


@pytest.mark.slow
def test_cases_are_the_same_in_another_process():
    code = "import sys; from tests.fuzz.test_watch import digest; sys.stdout.write(digest())"
    env = os.environ | {"PYTHONHASHSEED": "1", "CI": ""}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert other.stdout.endswith(digest())


def test_a_case_is_text():
    case = Case("k", (("flip", "model_index.json", "3", "1"),), "command", "sample", (("--seed", "long"),))
    assert Case.from_json(case.to_json()) == case


class Silent:
    """A connection to a worker that has started a case, and then is silent or gone."""

    def __init__(self, folder, is_gone):
        self.messages, self.is_gone = [(SOUND.to_json(), str(folder))], is_gone

    def poll(self, timeout):
        return bool(self.messages) or self.is_gone

    def recv(self):
        if not self.messages:
            raise EOFError
        return self.messages.pop()

    def send(self, message):
        pass


class Ended:
    """A process that a signal has killed."""

    exitcode, pid = -11, 0

    def join(self):
        pass


@pytest.mark.parametrize(("is_gone", "problem"), [(False, "hung"), (True, "ended the process")], ids=["hung", "ended"])
def test_a_worker_that_hangs_or_ends_is_reported_and_its_case_is_kept(tmp_path, monkeypatch, is_gone, problem):
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    findings, worker = long_run.Findings(tmp_path), workers.Worker.__new__(workers.Worker)
    with cases.made(SOUND) as folder:
        worker._connection, worker._process, worker._before = Silent(folder, is_gone), Ended(), 0
        assert not worker.run_round("plain", time.monotonic() + 60, functools.partial(findings.add, "plain"))
        assert not folder.exists()
    (found,) = findings.failures
    assert found.startswith(problem) and "1 promises broken" in str(findings)
    (kept,) = tmp_path.iterdir()
    assert (kept / "case" / "model" / "model_index.json").is_file()
    assert long_run.again(kept) == 0
