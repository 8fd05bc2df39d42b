"""The tables of the documents: each is what the script writes, and rows of older kernels are marked."""

import json

import pytest

from benchmarks import write_tables
from benchmarks.documents import table as tables
from benchmarks.documents.marks import filled, names
from benchmarks.documents.table import STALE, Column, Table, shown
from benchmarks.documents.tables import TABLES, of
from benchmarks.harness import code

MACHINE = {"gpu": "a card", "torch": "2", "triton": "3", "diffusers": "0", "commit": "abc"}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Save rows as the results file of `linear`."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def save(*rows: dict) -> None:
        (tmp_path / "linear.json").write_text(json.dumps([MACHINE | row for row in rows]))

    return save


def test_every_table_of_the_documents_is_what_the_script_writes():
    outdated = [path.name for path, text in write_tables.written() if text != path.read_text()]
    assert not outdated, "run python benchmarks/write_tables.py"


def test_every_table_is_in_a_document():
    shown_ones = [name for path in write_tables.documents() for name in names(path.read_text())]
    assert sorted(shown_ones) == sorted(TABLES)


def test_a_row_of_other_code_is_marked(saved):
    now = code.code_hash("linear")
    saved(
        {"workload": "new", "ms": 1.0, "code": now}, {"workload": "old", "ms": 2.0, "code": "0"}, {"workload": "none"}
    )
    lines = Table("linear", [Column("ms", of("ms"))]).markdown().splitlines()
    assert lines[2:5] == ["| `new` | 1.00 |", f"| `old` {STALE} | 2.00 |", f"| `none` {STALE} |  |"]
    assert lines[6:] == [
        "*a card, torch 2, Triton 3, diffusers 0, commit abc.*",
        f"*{STALE} The kernel code has changed since this row was measured.*",
    ]


def test_without_such_a_row_there_is_no_mark(saved):
    saved({"workload": "new", "ms": 1.0, "code": code.code_hash("linear")})
    assert STALE not in Table("linear", [Column("ms", of("ms"))]).markdown()


def test_the_least_time_is_bold_and_a_missing_one_is_blank(saved):
    saved({"workload": "a", "ours_ms": 2.0, "theirs_ms": 1.5}, {"workload": "b", "ours_ms": 2.0})
    columns = [Column(who, of(f"{who}_ms"), least_is_bold=True) for who in ("ours", "theirs")]
    lines = Table("linear", columns, {"b": "B", "a": "A", "gone": "C"}).markdown().splitlines()
    assert [line.replace(f" {STALE}", "") for line in lines[2:4]] == ["| B | **2.00** |  |", "| A | 2.00 | **1.50** |"]


def test_rows_of_several_versions_are_joined(saved):
    saved({"workload": "a", "ms": 1.0}, {"workload": "a", "ms": 2.0, "triton": "4"})
    columns = [Column(version, lambda row, version=version: row["of"][version]["ms"]) for version in ("3", "4")]
    lines = Table("linear", columns, joined_by="triton").markdown().splitlines()
    assert lines[2] == f"| `a` {STALE} | 1.00 | 2.00 |"
    assert [line.split(",")[2] for line in lines[4:6]] == [" Triton 3", " Triton 4"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.58943, "0.589"),
        (7.994, "7.99"),
        (9.996, "10.0"),
        (26.85, "26.9"),
        (1234.5, "1,230"),
        (12, "12"),
        (0.0, "0"),
        (0.00746, "0.00746"),
        (None, ""),
        ("text", "text"),
    ],
)
def test_numbers_have_three_significant_digits(value, text):
    assert shown(value) == text


def test_only_blocks_between_markers_change():
    text = "before\n<!-- table: a -->\nold\n<!-- end -->\nafter <!-- a comment -->\n"
    assert filled(text, str.upper) == "before\n<!-- table: a -->\n\nA\n\n<!-- end -->\nafter <!-- a comment -->\n"
    assert filled(filled(text, str.upper), str.upper) == filled(text, str.upper)


class TestCode:
    """The hash of the code behind a result."""

    def hashed(self, source: str, result: str = "linear", name: str = "kernels/device/linear.py") -> str | None:
        return code.hash_of(result, [name], lambda path: source)

    @pytest.mark.parametrize(
        "same",
        [
            'def f(x):\n    """Add one."""\n    return x + 1',
            "import torch\ndef f(x):\n    return x + 1  # why",
            "def f(x):\n\n    return (x + 1)",
        ],
        ids=["docstring", "import-and-comment", "layout"],
    )
    def test_words_do_not_count(self, same):
        assert self.hashed(same) == self.hashed("def f(x):\n    return x + 1")

    def test_code_counts(self):
        assert self.hashed("def f(x):\n    return x + 1") != self.hashed("def f(x):\n    return x + 2")

    def test_a_result_depends_on_its_operations_device_code(self):
        def with_another(name: str, result: str) -> bool:
            files = {path: "a = 1" for path in ("kernels/device/linear.py", "kernels/device/denoise.py")}
            changed = files | {name: "a = 2"}
            return code.hash_of(result, files, files.get) != code.hash_of(result, changed, changed.get)

        linear, denoise = "kernels/device/linear.py", "kernels/device/denoise.py"
        assert with_another(linear, "linear_8bit") and with_another(linear, "geglu") and with_another(linear, "models")
        assert with_another(denoise, "models") and not with_another(denoise, "linear")

    def test_no_kernel_runs_on_a_cpu(self):
        assert code.code_hash("models_cpu") is None
