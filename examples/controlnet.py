"""Follow edges with a ControlNet: draw other things with the edges of a picture, and with edges drawn by hand."""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import fastdiff
from fastdiff.edges import canny_picture

CAT, APPLE = "cat face, glossy 3D emoji", "red apple, Noto emoji"
OTHERS = {  # drawn with the edges of its picture
    CAT: ["fox face, flat emoji", "tiger face, Noto emoji", "wolf face, glossy 3D emoji"],
    APPLE: ["green apple, glossy 3D emoji", "tomato, flat emoji", "tangerine, Twemoji flat vector emoji"],
}
STYLES = ("glossy 3D emoji", "flat emoji", "Noto emoji", "Twemoji flat vector emoji")


def arrow() -> Image.Image:
    edges = Image.new("RGB", (128, 128))
    draw = ImageDraw.Draw(edges)
    draw.rounded_rectangle((8, 8, 119, 119), 16, outline="white")
    points = [(64, 24), (100, 62), (76, 62), (76, 104), (52, 104), (52, 62), (28, 62)]
    draw.polygon(points, outline="white")
    return edges


def smile() -> Image.Image:
    edges = Image.new("RGB", (128, 128))
    draw = ImageDraw.Draw(edges)
    for box in ((12, 12, 116, 116), (34, 40, 48, 58), (80, 40, 94, 58)):
        draw.ellipse(box, outline="white")
    draw.arc((36, 50, 92, 96), 20, 160, fill="white")
    return edges


def main(out: str = ".", steps: int = 30) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", controlnet="emoji-edges", device="cpu")
    plain, rows = pipe.with_parts(controlnet=None), []
    for prompt, others in OTHERS.items():
        source = plain(prompt, num_inference_steps=steps).images[0]
        edges = canny_picture(source)
        drawn = [pipe(other, image=edges, num_inference_steps=steps).images[0] for other in others]
        rows.append(np.hstack([source, edges, *drawn]))
    Image.fromarray(np.vstack(rows)).save(folder / "edges.png")

    rows = []
    for subject, edges in (("up arrow", arrow()), ("grinning face", smile())):
        prompts = [f"{subject}, {style}" for style in STYLES]
        drawn = [pipe(prompt, image=edges, num_inference_steps=steps).images[0] for prompt in prompts]
        rows.append(np.hstack([edges, *drawn]))
    Image.fromarray(np.vstack(rows)).save(folder / "outlines.png")
    print("two sheets: edges.png, outlines.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
