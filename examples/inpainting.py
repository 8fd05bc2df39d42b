"""Paint a part of a picture anew: a face gets another mouth, and a red apple becomes green."""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

import fastdiff


def main(out: str = ".", steps: int = 30) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", device="cpu")

    face = pipe("neutral face, glossy 3D emoji", seed=1, num_inference_steps=steps).images[0]
    mouth = Image.new("L", face.size)
    ImageDraw.Draw(mouth).ellipse((28, 72, 100, 112), fill=255)
    options = {"image": face, "mask_image": mouth, "num_inference_steps": steps}
    grin = pipe("grinning face, glossy 3D emoji", **options).images[0]
    Image.fromarray(np.hstack([face, mouth.convert("RGB"), grin])).save(folder / "mouth.png")

    apple = pipe("red apple, Noto emoji", seed=7, num_inference_steps=steps).images[0]
    red, green, _ = apple.split()  # white are the red pixels and three pixels around them
    body = ImageChops.subtract(red, green).point(lambda level: 255 * (level > 40)).filter(ImageFilter.MaxFilter(7))
    options = {"image": apple, "mask_image": body, "num_inference_steps": steps}
    painted = pipe("green apple, Noto emoji", seed=3, **options).images[0]
    Image.fromarray(np.hstack([apple, body.convert("RGB"), painted])).save(folder / "green-body.png")
    print("two sheets: mouth.png, green-body.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
