"""Charts, the roofline, and attention by the number of tokens."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_points_are_where_their_logarithms_are(load):
    chart = load("chart")
    colour, points = (213, 94, 0), [(1, 1), (10, 100), (100, 10_000)]
    drawn = chart.draw_chart("title", "x", "y", [chart.Series("a", points, colour)])
    assert drawn.size == (chart.WIDTH, chart.HEIGHT)
    middle = (chart.LEFT + chart.RIGHT) // 2, (chart.TOP + chart.BOTTOM) // 2
    assert drawn.getpixel(middle) == colour
    hollow = chart.draw_chart("title", "x", "y", [chart.Series("a", points, colour, hollow=True)])
    assert hollow.getpixel(middle) == (255, 255, 255)


def test_ticks_are_round_numbers(load):
    chart = load("chart")
    assert chart.Axis([512, 16384], 0, 1).ticks() == [500, 1000, 2000, 5000, 10000]
    assert chart.Axis([0.01, 1000], 0, 1).ticks() == pytest.approx([0.01, 0.1, 1, 10, 100, 1000])
    assert chart.Axis([7], 0, 1).ticks() == [5, 10, 20]


def test_the_least_bytes_of_operations(load):
    plots = load("plots")
    assert plots.conv2d_bytes("ddpm256_b8-C128-H256-down") == 2 * (8 * 256**2 * 128 + 9 * 128**2 + 8 * 128**2 * 128)
    assert plots.conv2d_bytes("ddpm256_b8-C256-H64-up") == 2 * (8 * 64**2 * 256 + 9 * 256**2 + 8 * 128**2 * 256)
    assert plots.linear_bytes("dit_b2-out") == 2 * (512 * 1152 * 3 + 1152**2), "x, residual and output"
    assert plots.attention_bytes("sd15_b2-L4096-keys77-d40") == 2 * 2 * 320 * (2 * 4096 + 2 * 77)


def test_the_roofline_of_the_saved_results(load, tmp_path, monkeypatch, capsys):
    plots = load("plots")
    for name in ("conv2d", "attention", "group_norm"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    rows = [row for row in json.loads((RESULTS / "models.json").read_text()) if row["workload"] == "ddpm32_b1"]
    (tmp_path / "models.json").write_text(json.dumps(rows))
    limits = plots.limits_of(tmp_path)
    work = plots.Work(12.4e9, 71.49e6)
    assert limits.floors_ms(work) == pytest.approx((12.4 / limits.tflops, 0.07149 / limits.tbps))
    assert plots.roof(limits, [1.0, 1e4])[1] == pytest.approx((limits.tflops / limits.tbps, limits.tflops))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path)])
    plots.main()
    with Image.open(tmp_path / "roofline.png") as drawn:
        assert drawn.format == "PNG"
    out = capsys.readouterr().out
    assert f"| ddpm32_b1 | {rows[0]['fastdiff_ms']:.3g} |" in out
    assert f"attention_lengths: no results in {tmp_path}" in out


def test_attention_over_the_number_of_tokens(harness, load, tmp_path, monkeypatch, capsys):
    bench, plots = load("bench_attention_lengths"), load("plots")
    rows = [bench.row(tokens) | {"gpu": "a card"} for tokens in (4, 16)]
    assert rows[0]["workload"] == "L4" and all(row["naive_max_abs_err"] < 0.1 for row in rows)
    rows[1] |= {"naive_ms": None, "naive_bytes": None}
    for row in rows:
        row |= {"fastdiff_bytes": 1e6, "torch_bytes": 2e6}
    rows[0]["naive_bytes"] = 3e6
    (tmp_path / "attention_lengths.json").write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path)])
    plots.main()
    assert (tmp_path / "attention_lengths.png").is_file()
    *_, short, long = capsys.readouterr().out.splitlines()
    assert short.startswith("| 4 | ") and " | 3 | " in short
    assert long.startswith("| 16 | does not fit |  | ")


def test_what_does_not_fit_in_memory_has_no_numbers(harness, load):
    bench = load("bench_attention_lengths")

    def call():
        raise torch.OutOfMemoryError

    assert set(bench.measured_way(call, torch.ones(1)).values()) == {None}


def test_our_attention_must_be_right(harness, load, monkeypatch):
    bench = load("bench_attention_lengths")
    right = bench.attention
    wrong = lambda *qkv, heads: right(*qkv, heads=heads) + 1  # noqa: E731
    wrong.reference = right.reference
    monkeypatch.setattr(bench, "attention", wrong)
    with pytest.raises(ArithmeticError, match="4 tokens: ours is off by"):
        bench.row(4)


def test_labels_of_near_points_do_not_meet(load, monkeypatch):
    chart = load("chart")
    written = []
    text = chart.ImageDraw.ImageDraw.text

    def write(draw, place, words, ink, font, anchor):
        if words.startswith("model"):
            written.append(draw.textbbox(place, words, font, anchor))
        text(draw, place, words, ink, font, anchor=anchor)

    monkeypatch.setattr(chart.ImageDraw.ImageDraw, "text", write)
    points, names = [(1.0, 1.0), (1.2, 1.01), (99.0, 9.0)], ("model 1", "model 2", "model 3")
    chart.draw_chart("near", "x", "y", [chart.Series("points", points, chart.COLOURS[0], labels=names)])
    assert len(written) == 3 and all(chart._meetings(box, written) == 1 for box in written)  # itself
    assert all(box[0] >= chart.LEFT and box[2] <= chart.RIGHT for box in written)
