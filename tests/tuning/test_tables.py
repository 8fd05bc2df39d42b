"""The table that the tuner keeps."""

import json

import pytest
import torch

from fastdiff.kernels.plans.tuning import read_table
from fastdiff.tuning import judging, tables
from tests.tuning.doubling import FAST, shape_of

CARD = "NVIDIA Tiny"


def test_a_table_is_kept_shape_by_shape_and_read(tunes, tmp_path):
    rows = {n: {"workload": "w"} | judging.tune(shape_of(torch.randn(n))) for n in (64, 32)}
    for row in rows.values():
        tables.keep(CARD, row)
    table = read_table(tmp_path / "nvidia-tiny.json")
    assert table.choices == {"doubling": {"64": list(FAST), "32": list(FAST)}}
    tables.keep(CARD, rows[32] | {"choice": None})
    assert read_table(tmp_path / "nvidia-tiny.json").choices == {"doubling": {"64": list(FAST)}}, "removed"
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-tiny.json"]
    content = json.loads((tmp_path / "nvidia-tiny.json").read_text())
    assert content.keys() == {"gpu", "torch", "triton", "kernels", "choices", "rows", "forwards"}
    assert content["rows"]["doubling"]["32"] == {"workload": "w", "usual_ms": 2.0, "best_ms": 1.0}
    assert not tables.refused(CARD)


@pytest.mark.parametrize("part", ["rows", "forwards"])
@pytest.mark.parametrize("wrong", [None, ["doubling"], {"doubling": 1}], ids=str)
def test_measurements_that_cannot_be_read_are_made_again(tunes, tmp_path, part, wrong):
    tables.keep(CARD, {"workload": "w"} | judging.tune(shape_of(torch.randn(64))))
    file = tmp_path / "nvidia-tiny.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: wrong}))
    assert tables.kept(CARD) == tables.Kept()


def test_a_table_of_another_triton_is_not_gone_on_with(tunes, tmp_path):
    (tmp_path / "nvidia-tiny.json").write_text(json.dumps({"triton": "1.0", "choices": {"doubling": {"1": [1]}}}))
    assert tables.refused(CARD).endswith("nvidia-tiny.json was made with Triton 1.0, not 3.6.0")
    tables.keep(CARD, {"workload": "w"} | judging.tune(shape_of(torch.randn(64))))
    assert read_table(tmp_path / "nvidia-tiny.json").choices == {"doubling": {"64": list(FAST)}}


def test_a_folder_that_cannot_be_written_is_one_line(tunes, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTDIFF_TABLES", str(tmp_path / "file" / "tables"))
    with pytest.raises(OSError, match=r"^cannot write the table .*nvidia-tiny\.json \(.+\); make room, or "):
        tables.keep(CARD, {"workload": "w"} | judging.tune(shape_of(torch.randn(64))))
