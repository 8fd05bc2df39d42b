"""Follow edges with a ControlNet: the edges of a drawn picture, and outlines that the program draws itself."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import fastdiff
from fastdiff.edges import canny_picture

SOURCES = {  # a prompt -> prompts that are drawn with the edges of its picture
    "cat face, glossy 3D emoji": ("fox face, flat emoji", "tiger face, Noto emoji", "wolf face, glossy 3D emoji"),
    "red apple, Noto emoji": (
        "green apple, glossy 3D emoji",
        "tomato, flat emoji",
        "tangerine, Twemoji flat vector emoji",
    ),
}
STYLES = ("glossy 3D emoji", "flat emoji", "Noto emoji", "Twemoji flat vector emoji")


def arrow(draw: ImageDraw.ImageDraw) -> None:
    draw.rounded_rectangle((8, 8, 119, 119), 16, outline="white")
    draw.polygon([(64, 24), (100, 62), (76, 62), (76, 104), (52, 104), (52, 62), (28, 62)], outline="white")


def face(draw: ImageDraw.ImageDraw) -> None:
    draw.ellipse((12, 12, 116, 116), outline="white")
    for x in (34, 80):
        draw.ellipse((x, 40, x + 14, 58), outline="white")
    draw.arc((36, 50, 92, 96), 20, 160, "white")


def outline(shape: Callable[[ImageDraw.ImageDraw], None]) -> Image.Image:
    picture = Image.new("RGB", (128, 128))
    shape(ImageDraw.Draw(picture))
    return picture


def main(out: str = ".", steps: int = 30) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", controlnet="emoji-edges", device="cpu")
    plain = pipe.with_parts(controlnet=None)

    def draw(edges: Image.Image, prompts: tuple[str, ...]) -> list[Image.Image]:
        return [pipe(prompt, image=edges, num_inference_steps=steps).images[0] for prompt in prompts]

    rows = []
    for prompt, others in SOURCES.items():
        source = plain(prompt, num_inference_steps=steps).images[0]
        edges = canny_picture(source)
        rows.append(np.hstack([source, edges, *draw(edges, others)]))
    Image.fromarray(np.vstack(rows)).save(folder / "edges.png")

    rows = []
    for shape, name in ((arrow, "up arrow"), (face, "grinning face")):
        edges = outline(shape)
        rows.append(np.hstack([edges, *draw(edges, tuple(f"{name}, {style}" for style in STYLES))]))
    Image.fromarray(np.vstack(rows)).save(folder / "outlines.png")
    print("two sheets: edges.png, outlines.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
