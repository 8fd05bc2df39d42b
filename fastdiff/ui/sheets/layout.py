"""The picture of an X/Y sheet: pictures in columns and rows, with a caption above and beside them."""

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import gradio
from PIL import Image, ImageDraw, ImageFont

_FONT = Path(gradio.__file__).parent / "templates/frontend/static/fonts/SourceSansPro/SourceSansPro-Regular.woff2"
_SMALLEST, _SHARE = 13, 30  # pixels of a letter: the least, and one for so many of a picture's width and height
_LETTERS = 8  # the least width of a column, and the most of the captions beside the rows, in letters' heights
_BESIDE = 12
_MOST_LINES = 6  # of a caption above a column


def draw_captions(pictures: Sequence[Image.Image], columns: Sequence[str], rows: Sequence[str]) -> Image.Image:
    """Return the sheet of `pictures` of one size, row by row. Each keeps its pixels."""
    width, height = pictures[0].size
    letter = max(_SMALLEST, (width + height) // _SHARE)
    font, line, gap = _font(letter), math.ceil(1.3 * letter), letter // 2
    cell = max(width, _LETTERS * letter)
    above = [_wrap(text, cell, font, _MOST_LINES) for text in columns]
    beside = [_wrap(text, _BESIDE * letter, font, max(1, height // line)) for text in rows]
    longest = max((math.ceil(font.getlength(text)) for lines in beside for text in lines), default=0)
    left = longest + 2 * gap if longest else gap
    tallest = line * max(map(len, above))
    top = tallest + 2 * gap if tallest else gap
    size = left + len(columns) * (cell + gap), top + len(rows) * (height + gap)
    sheet = Image.new(pictures[0].mode, size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, lines in enumerate(above):
        x = left + i * (cell + gap) + cell / 2
        _write(draw, lines, x, top - gap - line * len(lines) / 2, line, font, "mm")
    for i, lines in enumerate(beside):
        _write(draw, lines, left - gap, top + i * (height + gap) + height / 2, line, font, "rm")
    for place, picture in enumerate(pictures):
        row, column = divmod(place, len(columns))
        sheet.paste(picture, (left + column * (cell + gap) + (cell - width) // 2, top + row * (height + gap)))
    return sheet


def _font(letter: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Gradio's own, for Latin, Greek and Cyrillic, else Pillow's, for ASCII; a box stands for other letters."""
    try:
        return ImageFont.truetype(_FONT, letter)
    except OSError:  # this FreeType reads no WOFF2, or this Gradio has another font
        return ImageFont.load_default(letter)


def _write(
    draw: ImageDraw.ImageDraw,
    lines: Sequence[str],
    x: float,
    y: float,
    height: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    anchor: str,
) -> None:
    """Write lines around the height `y`."""
    for i, text in enumerate(lines):
        draw.text((x, y + (i - (len(lines) - 1) / 2) * height), text, "black", font, anchor=anchor)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, most: int) -> list[str]:
    """The lines of a text, none wider than `width`; the end of one that has more than `most` is cut off."""
    lines = [""]
    for word in unicodedata.normalize("NFC", text).split():  # a letter and its accent are one to the font
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            if font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    if len(lines) > most:
        lines = lines[:most]
        while lines[-1] and font.getlength(f"{lines[-1]}…") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += "…"
    return [each for each in lines if each]
