"""Draw with outlines made by hand: a ControlNet for edges follows an arrow and a smile in four styles."""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import fastdiff

STYLES = ("glossy 3D emoji", "flat emoji", "Noto emoji", "Twemoji flat vector emoji")


def main(out: str = ".", steps: int = 30) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    arrow, smile = (Image.new("RGB", (128, 128)) for _ in range(2))
    ImageDraw.Draw(arrow).rounded_rectangle((8, 8, 119, 119), 16, outline="white")
    tip = [(64, 24), (100, 62), (76, 62), (76, 104), (52, 104), (52, 62), (28, 62)]
    ImageDraw.Draw(arrow).polygon(tip, outline="white")
    for face_and_eyes in ((12, 12, 116, 116), (34, 40, 48, 58), (80, 40, 94, 58)):
        ImageDraw.Draw(smile).ellipse(face_and_eyes, outline="white")
    ImageDraw.Draw(smile).arc((36, 50, 92, 96), 20, 160, fill="white")

    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", controlnet="emoji-edges", device="cpu")
    rows = []
    for subject, edges in (("up arrow", arrow), ("grinning face", smile)):
        prompts = [f"{subject}, {style}" for style in STYLES]
        drawn = [pipe(prompt, image=edges, num_inference_steps=steps).images[0] for prompt in prompts]
        rows.append(np.hstack([edges, *drawn]))
    Image.fromarray(np.vstack(rows)).save(folder / "outlines.png")
    print(f"{len(rows)} outlines in {len(STYLES)} styles: outlines.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
