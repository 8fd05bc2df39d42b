"""Start from pictures: a sunflower becomes a cat by strengths, and a red apple becomes green."""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import fastdiff


def main(out: str = ".", steps: int = 30) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pipe = fastdiff.Pipeline.from_pretrained("emoji-sd", device="cpu")
    given = {"num_inference_steps": steps}

    flower = pipe("sunflower, glossy 3D emoji", **given).images[0]
    cats = [
        pipe("cat face, glossy 3D emoji", image=flower, strength=strength, **given).images[0]
        for strength in (0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    Image.fromarray(np.hstack([flower, *cats])).save(folder / "strengths.png")

    apple = pipe("red apple, Noto emoji", seed=7, **given).images[0]
    given |= {"prompt_syntax": "weighted", "negative_prompt": "red", "guidance_scale": 9}
    green = pipe("(green:1.5) apple, Noto emoji", seed=1, image=apple, strength=0.97, **given).images[0]
    Image.fromarray(np.hstack([apple, green])).save(folder / "green-apple.png")
    print("two sheets: strengths.png, green-apple.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
