"""The table that the tuner keeps."""

import json

import pytest
import torch

from fastdiff.kernels.plans.tuning import read_table
from fastdiff.tuning import judging, tables
from tests.tuning.doubling import FAST, shape_of

CARD = "NVIDIA Tiny"


def test_a_table_is_kept_shape_by_shape_and_read(tunes, tmp_path):
    rows = {n: judging.tune(shape_of(torch.randn(n))) for n in (64, 32)}
    for row in rows.values():
        tables.keep(CARD, row)
    table = read_table(tmp_path / "nvidia-tiny.json")
    assert table.choices == {"doubling": {"64": list(FAST), "32": list(FAST)}}
    tables.keep(CARD, rows[32] | {"choice": None})
    assert read_table(tmp_path / "nvidia-tiny.json").choices == {"doubling": {"64": list(FAST)}}, "removed"
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-tiny.json"]
    assert json.loads((tmp_path / "nvidia-tiny.json").read_text()).keys() == {"gpu", "torch", "triton", "choices"}


def test_a_table_of_another_triton_is_not_gone_on_with(tunes, tmp_path):
    (tmp_path / "nvidia-tiny.json").write_text(json.dumps({"triton": "1.0", "choices": {"doubling": {"1": [1]}}}))
    tables.keep(CARD, judging.tune(shape_of(torch.randn(64))))
    assert read_table(tmp_path / "nvidia-tiny.json").choices == {"doubling": {"64": list(FAST)}}


def test_a_folder_that_cannot_be_written_is_one_line(tunes, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTDIFF_TABLES", str(tmp_path / "file" / "tables"))
    with pytest.raises(OSError, match=r"^cannot write the table .*nvidia-tiny\.json \(.+\); make room, or "):
        tables.keep(CARD, {"operation": "doubling", "shape": "1", "choice": None})
