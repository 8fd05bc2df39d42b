"""Draw the README's plots and tables from saved results: benchmarks/results/*.json -> benchmarks/results/*.png.

    python benchmarks/plots.py [DIR]

`roofline.png` shows operations and whole models under the two limits of the GPU: the rates of a bf16 matrix product and
of a copy, both measured in the same run. The x axis is a workload's operations per byte that it must move. An operation
moves its inputs, weights and outputs once; for a model only the weights count. `attention_lengths.png` shows time and
memory of attention by the number of tokens. Both are also printed as tables.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fastdiff
from benchmarks.chart import COLOURS, INK, Point, Series, draw_chart
from benchmarks.models.forwards import MODELS_GPU
from benchmarks.shapes import ATTENTIONS, CONVOLUTIONS, LINEARS
from fastdiff.tuning.models import class_name

RESULTS = Path(__file__).parent / "results"
BYTES = 2  # per bfloat16
Row = dict[str, Any]


class Work(NamedTuple):
    """The minimum work of a workload."""

    flop: float
    moved: float  # bytes


class Limits(NamedTuple):
    """The measured rates of the GPU."""

    tflops: float
    tbps: float

    def floors_ms(self, work: Work) -> tuple[float, float]:
        """Return the lower bounds of the time by operations and by bytes."""
        return work.flop / self.tflops / 1e9, work.moved / self.tbps / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    folder = parser.parse_args().folder
    for name, draw in {"roofline": roofline, "attention_lengths": attention_lengths}.items():
        drawn = draw(folder)
        if drawn is None:
            print(f"{name}: no results in {folder}")
            continue
        chart, table = drawn
        chart.save(folder / f"{name}.png", optimize=True)
        print(table)


def read(folder: Path, name: str) -> list[Row]:
    """Return the rows of a benchmark, or an empty list if it has no results."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else []


def roofline(folder: Path) -> tuple[Any, str] | None:
    limits = limits_of(folder)
    if limits is None:
        return None
    kinds = (("conv2d", conv2d_bytes), ("linear", linear_bytes), ("attention", attention_bytes))
    series, rows = [], []
    for (name, count), colour in zip(kinds, COLOURS, strict=False):
        for row in read(folder, name):
            if row["workload"] in TABLES[name]:
                work = Work(row["tflops"] * row["fastdiff_ms"] * 1e9, count(row["workload"]))
                rows.append((name, row, work))
        series += [points_of(rows, name, who, colour) for who in ("fastdiff", "compile")]
    for row in read(folder, "models"):
        config, _, gflop = MODELS_GPU.get(row["workload"], ({}, 0, None))
        if gflop:
            rows.append(("models", row, Work(1e9 * gflop, weights_bytes(config))))
    series += [points_of(rows, "models", who, COLOURS[3]) for who in ("fastdiff", "compile")]
    found = [each for each in series if each.points]
    if not found:
        return None
    intensities = [x for each in found for x, _ in each.points]
    title = f"Roofline of one {rows[0][1]['gpu']}: fastdiff filled, torch.compile hollow"
    drawn = [
        Series(f"{limits.tbps:.2f} TB/s, {limits.tflops:.0f} TFLOP/s", roof(limits, intensities), INK, True),
        *found,
    ]
    return draw_chart(title, "operations per byte", "TFLOP/s", drawn), floors_table(rows, limits)


def limits_of(folder: Path) -> Limits | None:
    """Return the rates that were measured with the results: the best of several runs."""
    rates = {
        key: max((row[key] / row["share"] for name in names for row in read(folder, name) if key in row), default=None)
        for key, names in {"tflops": ("conv2d", "linear", "attention"), "tbps": ("group_norm", "layer_norm")}.items()
    }
    return None if None in rates.values() else Limits(**rates)


def roof(limits: Limits, intensities: list[float]) -> list[Point]:
    ridge = limits.tflops / limits.tbps
    ends = min(*intensities, ridge), max(*intensities, ridge)
    return [(x, min(limits.tflops, x * limits.tbps)) for x in (ends[0], ridge, ends[1])]


def points_of(rows: list[tuple[str, Row, Work]], kind: str, who: str, colour: tuple[int, int, int]) -> Series:
    """Return the points of a kind's workloads, in TFLOP/s."""
    of_kind = [(row, work) for name, row, work in rows if name == kind and f"{who}_ms" in row]
    points = [(work.flop / work.moved, work.flop / row[f"{who}_ms"] / 1e9) for row, work in of_kind]
    labels = tuple(row["workload"] for row, _ in of_kind) if kind == "models" and who == "fastdiff" else ()
    name = kind if who == "fastdiff" else f"{kind}, torch.compile"
    return Series(name, points, colour, hollow=who != "fastdiff", labels=labels)


def floors_table(rows: list[tuple[str, Row, Work]], limits: Limits) -> str:
    """Return a table of the models' measured milliseconds and their floors by operations and by bytes."""
    lines = ["| model, batch | ms | floor by operations | by bytes | of the floor |", "|---|---|---|---|---|"]
    for kind, row, work in rows:
        if kind == "models":
            floors = limits.floors_ms(work)
            share = f"{max(floors) / row['fastdiff_ms']:.0%}".replace("%", " %")
            lines.append(
                f"| {row['workload']} | {row['fastdiff_ms']:.3g} | {floors[0]:.3g} | {floors[1]:.3g} | {share} |"
            )
    return "\n".join(lines)


def conv2d_bytes(name: str) -> float:
    n, side, channels, out_channels, kernel, options = CONVOLUTIONS[name]
    out_side = side * (2 if "upsample" in options else 1) // options.get("stride", 1)
    outputs = (2 if "residual" in options else 1) * n * out_side**2 * out_channels
    return BYTES * (n * side**2 * sum(channels) + kernel**2 * sum(channels) * out_channels + outputs)


def linear_bytes(name: str) -> float:
    n, tokens, channels, out_channels, options = LINEARS[name]
    outputs = (2 if "residual" in options else 1) * n * tokens * out_channels
    return BYTES * (n * tokens * channels + channels * out_channels + outputs)


def attention_bytes(name: str) -> float:
    n, queries, keys, heads, width, *_ = ATTENTIONS[name]
    return BYTES * 2 * n * heads * width * (queries + keys)


def weights_bytes(config: dict[str, Any]) -> float:
    with torch.device("meta"):
        model = getattr(fastdiff, class_name(config)).from_config(config)
    return BYTES * sum(parameter.numel() for parameter in model.parameters())


TABLES: dict[str, dict] = {"conv2d": CONVOLUTIONS, "linear": LINEARS, "attention": ATTENTIONS}
WAYS = {"naive": "naive", "fastdiff": "ours", "torch": "torch's"}


def attention_lengths(folder: Path) -> tuple[Any, str] | None:
    rows = read(folder, "attention_lengths")
    if not rows:
        return None
    series = []
    for (who, name), colour in zip(WAYS.items(), (COLOURS[4], COLOURS[0], COLOURS[1]), strict=True):
        points = [(row["tokens"], row[f"{who}_ms"]) for row in rows if row[f"{who}_ms"] is not None]
        memory = [(row["tokens"], row[f"{who}_bytes"] / 1e6) for row in rows if row[f"{who}_bytes"] is not None]
        series += [Series(f"{name}, ms", points, colour, True), Series(f"{name}, MB", memory, colour, True, True)]
    title = f"Attention of 8 heads of 64 on one {rows[0]['gpu']}"
    return draw_chart(title, "tokens", "milliseconds, and megabytes at the peak", series), lengths_table(rows)


def lengths_table(rows: list[Row]) -> str:
    head = " | ".join(f"{name} ms | MB" for name in WAYS.values())
    lines = [f"| tokens | {head} |", "|---" * (1 + 2 * len(WAYS)) + "|"]
    for row in rows:
        lines.append(" | ".join([f"| {row['tokens']}", *cells(row)]) + " |")
    return "\n".join(lines)


def cells(row: Row) -> Iterator[str]:
    for who in WAYS:
        ms, moved = row[f"{who}_ms"], row[f"{who}_bytes"]
        yield "does not fit" if ms is None else f"{ms:.3g}"
        yield "" if moved is None else f"{moved / 1e6:.0f}"


if __name__ == "__main__":
    main()
