"""The script that counts floors, on small graphs and on this package."""

import graphlib

import pytest

from tests.tree import floors

HOUSE = {"roof": {"left", "ground"}, "left": {"right"}, "right": {"left", "cellar"}, "cellar": set(), "ground": set()}


def test_a_folder_is_one_floor_above_the_highest_that_it_imports_from():
    assert floors.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}


def test_a_circle_is_found_and_is_one_floor():
    assert floors.circles(HOUSE) == [{"left", "right"}]
    assert floors.floors(HOUSE) == {"roof": 3, "left": 2, "right": 2, "cellar": 1, "ground": 1}


def test_two_circles_that_touch_are_one():
    assert floors.circles({"a": {"b"}, "b": {"a", "c"}, "c": {"b"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_the_longest_chain():
    assert floors.longest_chain({"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}) == ["a", "b", "c"]
    with pytest.raises(graphlib.CycleError):
        floors.longest_chain({"a": {"b"}, "b": {"a"}})


def test_statements_are_counted_without_docstrings():
    source = '"""One."""\ndef f():\n    """Two."""\n    try:\n        return 1\n    except E:\n        pass\n'
    assert floors.count_statements(source) == 4  # def, try, return, pass


def test_modules_that_one_other_imports():
    """cli.sample is not listed, because its folder is in REGISTRIES."""
    graph = {"cli": {"cli.sample", "schema"}, "cli.sample": {"schema", "extras"}, "schema": set(), "extras": set()}
    assert floors.imported_by_one(graph) == [("extras", "cli.sample")]


def test_imports_inside_functions_and_by_string_count(tmp_path):
    file = tmp_path / "file.py"
    file.write_text('def f():\n    from fastdiff.runs import drawing\n    import_module("fastdiff.errors")\n')
    assert floors.imports_of(file) == {"runs": 2, "runs.drawing": 2}
    assert floors.named_in_strings(file) == {"errors"}


def test_each_file_of_the_package_is_in_a_folder():
    assert floors.folder_of("__init__") is floors.folder_of("__main__") is None
    assert floors.folder_of("schema") == "fastdiff" and floors.folder_of("runs") == "fastdiff/runs"
    assert floors.folder_of("kernels.conv2d") == "kernels"
    assert floors.folder_of("kernels.plans.dispatch") == "kernels/plans"


def test_every_registry_is_there():
    assert [name for name in floors.REGISTRIES if not (floors.ROOT / name).is_dir()] == []


def test_what_is_printed(capsys):
    assert floors.main() == int(bool(floors.circles(floors.folder_graph())))
    first, *_ = out = capsys.readouterr().out.splitlines()
    assert first.split() == [str(max(floors.floors(floors.folder_graph()).values())), "fastdiff/cli"]
    chain = next(line for line in out if line.startswith("the longest chain of imports, "))
    assert chain.split()[5] == str(len(floors.longest_chain(floors.module_graph())))
    assert any(line.split()[1:] == ["fastdiff/tuning"] for line in out if line)
