"""The tables of mutations fit the current code, and the runner distinguishes caught mutations from survivors."""

import ast
import functools
import json
import subprocess
from pathlib import Path

import pytest

from tests.mutations import runner
from tests.mutations.__main__ import error_of, main
from tests.mutations.mutation import Mutation, named
from tests.mutations.tables import read_rooms

ROOT = Path(__file__).parents[2]
ROOMS = read_rooms()
LEAST = 3  # mutations per room


def places() -> dict[str, tuple[str, ...]]:
    """Return the rooms that need mutations, and the prefixes of their files."""
    folders = [path for path in (ROOT / "fastdiff").iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    files = [path for path in (ROOT / "fastdiff").glob("*.py") if not path.stem.startswith("__")]
    found = {path.stem: (f"fastdiff/{path.name}",) for path in files}
    found |= {path.name: (f"fastdiff/{path.name}/",) for path in folders if path.name not in ("kernels", "bundled")}
    found["models.blocks"] = ("fastdiff/models/blocks/",)
    for path in (ROOT / "kernels").glob("*.py"):
        found[f"kernels.{path.stem}"] = ("kernels/",)
    return found | {
        "kernels.host": ("kernels/host/",),
        "kernels.hopper": ("kernels/device/hopper/",),
        "kernels.plans": ("kernels/plans/",),
        "single_files": ("fastdiff/checkpoints/",),
        "training": ("training/",),
        "benchmarks": ("benchmarks/pictures_in/", "benchmarks/serve/", "benchmarks/z_image/"),
        "documents": ("benchmarks/documents/", "benchmarks/harness/code.py"),
        "package": ("pyproject.toml", "fastdiff/__init__.pyi", ".ci/", ".github/"),
        "sampler_names": ("fastdiff/sampler_names.py", "fastdiff/__init__.py"),
    }


@functools.cache
def names_in(file: str) -> set[str]:
    """Return the functions and classes that a file defines."""
    tree = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_old_text_is_there_once():
    assert not [error for mutation in named(ROOMS).values() if (error := error_of(mutation, ROOT))]


def test_every_test_is_there():
    missing = []
    for test in {test for mutation in named(ROOMS).values() for test in mutation.tests.split()}:
        file, *names = test.split("::")
        if not (ROOT / file).is_file() or not {name.partition("[")[0] for name in names} <= names_in(file):
            missing.append(test)
    assert not missing


def test_every_room_has_mutations_of_its_own_files():
    expected = places()
    assert ROOMS.keys() == expected.keys()
    assert not {room: len(mutations) for room, mutations in ROOMS.items() if len(mutations) < LEAST}
    assert not [m for room, mutations in ROOMS.items() for m in mutations if not m.file.startswith(expected[room])]


def test_no_mutation_is_there_twice():
    seen = [(mutation.file, mutation.old) for mutation in named(ROOMS).values()]
    assert len(set(seen)) == len(seen)


PRODUCT = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
TESTS = """
import pytest
from fastdiff.sums import add, double

def test_add():
    assert add(1, 2) == 3

@pytest.mark.slow
def test_double():
    assert double(3) == 6
"""
CAUGHT = Mutation("fastdiff/sums.py", "a + b", "a - b", "tests/test_sums.py")
CAUGHT_BY_A_SLOW_ONE = Mutation("fastdiff/sums.py", "2 * a", "a", "tests/test_sums.py")
SURVIVOR = Mutation("fastdiff/sums.py", "2 * a", "a + a", "tests/test_sums.py")
FAILS_ANYWAY = Mutation("fastdiff/sums.py", "a + b", "b + a", "tests/test_wrong.py")
NO_TEST = Mutation("fastdiff/sums.py", "a + b", "b + a", "tests/test_none.py")
NOT_THERE = Mutation("fastdiff/sums.py", "a * b", "a / b", "tests/test_sums.py")
TWICE = Mutation("fastdiff/sums.py", "return", "yield", "tests/test_sums.py")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with two functions and their tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # plugins and torch would take most of the time
    monkeypatch.setattr(runner, "SHARED", ["pytest"])
    files = {
        "fastdiff/__init__.py": "",
        "fastdiff/sums.py": PRODUCT,
        "tests/test_sums.py": TESTS,
        "tests/test_wrong.py": "def test_wrong():\n    assert False\n",
        "tests/test_none.py": "",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow"]\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def test_what_is_caught_and_what_survives(tree, capsys):
    rooms = {"sums": (CAUGHT, SURVIVOR, CAUGHT_BY_A_SLOW_ONE), "unclear": (FAILS_ANYWAY, NO_TEST)}
    assert main(["--jobs", "1", "--json", str(tree / "results.json"), "--tree", str(tree)], rooms) == 1
    results = {entry["name"]: entry for entry in json.loads((tree / "results.json").read_text())}
    ends = {name: (entry["outcome"], entry["tier"], entry["by"]) for name, entry in results.items()}
    assert ends.pop("unclear-1")[0] == ends.pop("unclear-2")[0] == "error"
    assert ends == {
        "sums-1": ("caught", "not slow", "tests/test_sums.py::test_add"),
        "sums-2": ("SURVIVED", "", ""),
        "sums-3": ("caught", "slow", "tests/test_sums.py::test_double"),
    }
    assert "fails without the mutation" in results["unclear-1"]["by"]
    assert "no tests" in results["unclear-2"]["by"]
    assert (tree / "fastdiff/sums.py").read_text() == PRODUCT
    shown = capsys.readouterr().out
    assert "sums                     2 / 3" in shown and "all                      2 / 5" in shown


@pytest.mark.parametrize("mutation", [NOT_THERE, TWICE], ids=["not there", "twice"])
def test_a_text_that_is_not_there_once_is_an_error(mutation, tree, capsys):
    assert main(["--tree", str(tree)], {"sums": (CAUGHT, mutation)}) == 2
    assert "fastdiff/sums.py has" in capsys.readouterr().err


def test_a_room_that_is_not_there_is_an_error(capsys):
    assert main(["sum"], {"sums": (CAUGHT,)}) == 2
    assert "no room sum; there are sums" in capsys.readouterr().err


def test_a_room_and_a_mutation_are_chosen_by_name(tree, capsys):
    assert (
        main(["--list", "sums-1", "others", "--tree", str(tree)], {"sums": (CAUGHT, SURVIVOR), "others": (CAUGHT,)})
        == 0
    )
    shown = capsys.readouterr().out
    assert "sums-1" in shown and "others-1" in shown and "sums-2" not in shown
