"""Follow edges with a ControlNet: draw other things with the edges of a picture."""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import fastdiff
from fastdiff.edges import canny_picture

CAT, APPLE = "cat face, glossy 3D emoji", "red apple, Noto emoji"
OTHERS = {  # drawn with the edges of its picture
    CAT: ["fox face, flat emoji", "tiger face, Noto emoji", "wolf face, glossy 3D emoji"],
    APPLE: ["green apple, glossy 3D emoji", "tomato, flat emoji", "tangerine, Twemoji flat vector emoji"],
}


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
    print("one sheet: edges.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
