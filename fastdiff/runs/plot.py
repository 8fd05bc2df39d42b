"""A line plot of a trajectory, drawn with Pillow alone: one line per channel over the positions."""

import colorsys
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont
    from PIL.ImageFont import ImageFont as BitmapFont

WIDTH, HEIGHT = 960, 540  # pixels
_BOX = 72, 24, 856, 484  # left, top, right, bottom of the plot area
_FINER = 3  # lines are drawn at this multiple of the size, then reduced for antialiasing
_INK, _GRID, _FRAME = (64, 64, 64), (228, 228, 228), (160, 160, 160)
_LEGEND = WIDTH - 80, 44, 18  # left, top, and height of a line
_TICKS = 10  # approximate maximum per axis


def draw_lines(trajectory: np.ndarray) -> Image.Image:
    """Return the plot of a trajectory (C, L) of finite numbers, a picture of WIDTH x HEIGHT pixels."""
    channels, horizon = trajectory.shape
    last, (low, high) = max(1, horizon - 1), _padded(float(trajectory.min()), float(trajectory.max()))
    x, y = _Scale(0, last, _BOX[0] + 8, _BOX[2] - 8), _Scale(low, high, _BOX[3], _BOX[1])
    positions, values = _ticks(0, last, least=1), _ticks(low, high)
    colours = [_colour(channel, channels) for channel in range(channels)]
    large = Image.new("RGB", (_FINER * WIDTH, _FINER * HEIGHT), "white")
    _draw_grid(ImageDraw.Draw(large), [x(tick) for tick in positions], [y(tick) for tick in values])
    for line, colour in zip(trajectory, colours, strict=True):
        points = [(_FINER * x(i), _FINER * y(value)) for i, value in enumerate(line.tolist())]
        _draw_line(ImageDraw.Draw(large), points, colour)
    plot = large.reduce(_FINER)
    _write_numbers(ImageDraw.Draw(plot), {x(tick): tick for tick in positions}, {y(tick): tick for tick in values})
    _write_legend(ImageDraw.Draw(plot), colours)
    return plot


class _Scale:
    """Maps numbers on an axis to pixels."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.first, self.pixels = low, first, (last - first) / (high - low)

    def __call__(self, value: float) -> float:
        return self.first + self.pixels * (value - self.low)


def _padded(low: float, high: float) -> tuple[float, float]:
    """Return the range with a margin on both sides, so it is never empty."""
    room = 0.03 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Return ticks from `low` to `high`: multiples of 1, 2 or 5 times a power of ten, at least `least` apart."""
    narrowest = max((high - low) / _TICKS, least)
    power = 10.0 ** math.floor(math.log10(narrowest))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= 0.999 * narrowest)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _colour(channel: int, channels: int) -> tuple[int, int, int]:
    """Return a hue spaced evenly around the colour circle; neighbours differ in lightness."""
    rgb = colorsys.hls_to_rgb(channel / channels, (0.36, 0.52)[channel % 2], 0.72)
    return tuple(round(255 * part) for part in rgb)  # type: ignore[return-value]


def _draw_grid(draw: ImageDraw.ImageDraw, columns: Sequence[float], lines: Sequence[float]) -> None:
    left, top, right, bottom = (_FINER * side for side in _BOX)
    for x in columns:
        draw.line([(_FINER * x, top), (_FINER * x, bottom)], _GRID, _FINER)
    for y in lines:
        draw.line([(left, _FINER * y), (right, _FINER * y)], _GRID, _FINER)
    draw.rectangle((left, top, right, bottom), outline=_FRAME, width=_FINER)


def _draw_line(draw: ImageDraw.ImageDraw, points: list[tuple[float, float]], colour: tuple[int, int, int]) -> None:
    draw.line(points, colour, width=2 * _FINER, joint="curve")
    if len(points) == 1:
        ((x, y),) = points
        radius = 3 * _FINER
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _write_numbers(draw: ImageDraw.ImageDraw, positions: dict[float, float], values: dict[float, float]) -> None:
    font, (left, _, right, bottom) = _font(), _BOX
    for x, tick in positions.items():
        draw.text((x, bottom + 8), f"{tick:.7g}", _INK, font, anchor="mt")
    for y, tick in values.items():
        draw.text((left - 8, y), f"{tick:.7g}", _INK, font, anchor="rm")
    draw.text(((left + right) / 2, bottom + 30), "position", _INK, font, anchor="mt")


def _write_legend(draw: ImageDraw.ImageDraw, colours: Sequence[tuple[int, int, int]]) -> None:
    font, (left, top, height) = _font(), _LEGEND
    draw.text((left, top - 20), "channel", _INK, font, anchor="lt")
    fitting = (_BOX[3] - top) // height
    for i, colour in enumerate(colours[:fitting]):
        y = top + i * height + height / 2
        draw.line([(left, y), (left + 20, y)], colour, 3)
        more = i == fitting - 1 and len(colours) > fitting
        draw.text((left + 28, y), "..." if more else str(i), _INK, font, anchor="lm")


def _font() -> "FreeTypeFont | BitmapFont":
    return ImageFont.load_default(13)
