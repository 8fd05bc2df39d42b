"""A chart of points and lines over two logarithmic axes, drawn with Pillow alone."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 960, 560  # pixels
LEFT, TOP, RIGHT, BOTTOM = 84, 52, 720, 496  # of the frame around the points; the legend is on its right
FINER = 3  # supersampling: drawn this many times larger, then reduced
INK, GRID, FRAME = (64, 64, 64), (228, 228, 228), (160, 160, 160)
RADIUS = 4

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
Colour = tuple[int, int, int]
# Okabe and Ito's palette, safe for colour-blind readers.
COLOURS: tuple[Colour, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
)


class Series(NamedTuple):
    """Points of one colour, with or without a line between them; hollow points mark a peer of fastdiff."""

    name: str
    points: list[Point]
    colour: Colour
    line: bool = False
    hollow: bool = False
    labels: tuple[str, ...] = ()  # beside the points


class Axis:
    """Map a positive number to a pixel, by its logarithm."""

    def __init__(self, values: Iterable[float], first: float, last: float) -> None:
        logs = [math.log10(value) for value in values]
        room = 0.05 * (max(logs) - min(logs)) or 0.5
        self.low, high = min(logs) - room, max(logs) + room
        self.first, self.pixels, self.high = first, (last - first) / (high - self.low), high

    def __call__(self, value: float) -> float:
        return self.first + self.pixels * (math.log10(value) - self.low)

    def ticks(self) -> list[float]:
        """Return the powers of ten, and their multiples by 2 and 5 if the axis spans at most three decades."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        times = (1,) if self.high - self.low > 3 else (1, 2, 5)
        ticks = [factor * 10.0**power for power in powers for factor in times]
        return [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]


def draw_chart(title: str, x_name: str, y_name: str, series: list[Series]) -> Image.Image:
    """Return the chart, a picture of WIDTH x HEIGHT pixels. All coordinates must be positive."""
    points = [point for each in series for point in each.points]
    x = Axis((point[0] for point in points), LEFT, RIGHT)
    y = Axis((point[1] for point in points), BOTTOM, TOP)
    large = Image.new("RGB", (FINER * WIDTH, FINER * HEIGHT), "white")
    draw = ImageDraw.Draw(large)
    for tick in x.ticks():
        draw.line([(FINER * x(tick), FINER * TOP), (FINER * x(tick), FINER * BOTTOM)], GRID, FINER)
    for tick in y.ticks():
        draw.line([(FINER * LEFT, FINER * y(tick)), (FINER * RIGHT, FINER * y(tick))], GRID, FINER)
    draw.rectangle([FINER * side for side in (LEFT, TOP, RIGHT, BOTTOM)], outline=FRAME, width=FINER)
    for each in series:
        _draw_series(draw, each, [(x(a), y(b)) for a, b in each.points])
    _draw_legend_marks(draw, series)
    chart = large.reduce(FINER)
    _write(ImageDraw.Draw(chart), title, (x_name, y_name), (x, y), series)
    return chart


def _draw_series(draw: ImageDraw.ImageDraw, series: Series, points: list[Point]) -> None:
    if series.line:
        draw.line([(FINER * x, FINER * y) for x, y in points], series.colour, width=2 * FINER, joint="curve")
    for point in points:
        _draw_mark(draw, series, point)


def _draw_mark(draw: ImageDraw.ImageDraw, series: Series, point: Point) -> None:
    x, y, radius = FINER * point[0], FINER * point[1], FINER * RADIUS
    fill = "white" if series.hollow else series.colour
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill, series.colour, 2 * FINER)


def _legend_rows(series: list[Series]) -> list[tuple[Series, Point]]:
    return [(each, (RIGHT + 24, TOP + 12 + 22 * i)) for i, each in enumerate(series)]


def _draw_legend_marks(draw: ImageDraw.ImageDraw, series: list[Series]) -> None:
    for each, (x, y) in _legend_rows(series):
        if each.line:
            draw.line([(FINER * (x - 10), FINER * y), (FINER * (x + 10), FINER * y)], each.colour, 2 * FINER)
        _draw_mark(draw, each, (x, y))


def _write(
    draw: ImageDraw.ImageDraw, title: str, names: tuple[str, str], axes: tuple[Axis, Axis], series: list[Series]
) -> None:
    font, (x, y) = ImageFont.load_default(13), axes
    draw.text((LEFT, 16), title, INK, ImageFont.load_default(16), anchor="lt")
    draw.text((LEFT, TOP - 6), names[1], INK, font, anchor="lb")
    draw.text(((LEFT + RIGHT) / 2, BOTTOM + 32), names[0], INK, font, anchor="mt")
    for tick in x.ticks():
        draw.text((x(tick), BOTTOM + 8), f"{tick:,.7g}", INK, font, anchor="mt")
    for tick in y.ticks():
        draw.text((LEFT - 8, y(tick)), f"{tick:,.7g}", INK, font, anchor="rm")
    for each, (left, middle) in _legend_rows(series):
        draw.text((left + 18, middle), each.name, INK, font, anchor="lm")
    _write_labels(draw, series, axes)


def _write_labels(draw: ImageDraw.ImageDraw, series: list[Series], axes: tuple[Axis, Axis]) -> None:
    """Write each label beside, above or below its point, where it overlaps no label, no frame and the fewest points."""
    font, (x, y) = ImageFont.load_default(11), axes
    points = [(x(a), y(b)) for each in series for a, b in each.points]
    marks = [(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in points]
    labels: list[Box] = []
    for each in series:
        for (a, b), label in zip(each.points, each.labels, strict=False):
            left, top = x(a), y(b)
            spots = [((left + 8, top), "lm"), ((left, top - 8), "mb"), ((left, top + 8), "mt"), ((left - 8, top), "rm")]
            boxes = {spot: draw.textbbox(spot[0], label, font, spot[1]) for spot in spots}
            hidden = {
                spot: (_meetings(box, labels) + (box[0] < LEFT or box[2] > RIGHT), _meetings(box, marks))
                for spot, box in boxes.items()
            }
            place, anchor = min(spots, key=hidden.__getitem__)
            draw.text(place, label, INK, font, anchor=anchor)
            labels.append(boxes[place, anchor])


def _meetings(box: Box, others: list[Box]) -> int:
    """Return the number of boxes that overlap this one."""
    left, top, right, bottom = box
    return sum(left < other[2] and other[0] < right and top < other[3] and other[1] < bottom for other in others)
