"""Draw bundled models in full precision, int8 and fp8, a row each: results/precision_pairs.png.

    python benchmarks/pictures/precision_pairs.py [--device cpu]

Labels are evenly spaced, seeds count up from 0, and the pictures are not hand-picked.
"""

import argparse

from PIL import Image

import fastdiff
from benchmarks.harness.reports import RESULTS

MODELS = ("emoji64", "emoji64-dit")
PRECISIONS = ("full", "int8", "fp8")
PICTURES = 8  # per row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    device = parser.parse_args().device
    rows = [draw(name, precision, device) for name in MODELS for precision in PRECISIONS]
    side, gap = rows[0][0].width, 2
    sheet = Image.new("RGB", (PICTURES * (side + gap), len(rows) * (side + gap)), "white")
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (column * (side + gap), row * (side + gap)))
    sheet.save(RESULTS / "precision_pairs.png")


def draw(name: str, precision: str, device: str) -> list[Image.Image]:
    pipe = fastdiff.Pipeline.from_pretrained(name, device=device, precision=precision)
    count = len(pipe.info.labels)
    labels = [i * (count - 1) // (PICTURES - 1) for i in range(PICTURES)]
    return pipe(class_labels=labels, seed=0, guidance_scale=pipe.info.guidance_scale or 1.0).images


if __name__ == "__main__":
    main()
