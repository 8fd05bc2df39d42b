"""Speed up a diffusers pipeline with one line, check that it draws the same picture, and undo it."""

import argparse
from pathlib import Path

import diffusers
import numpy as np
import torch

import fastdiff

# a folder of Stable Diffusion that diffusers can load; yours works the same way
FOLDER = Path(fastdiff.__file__).parent / "bundled" / "emoji-sd"


def main(steps: int = 4) -> None:
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> np.ndarray:
        generator = torch.Generator().manual_seed(7)
        return pipe("cat face", num_inference_steps=steps, generator=generator, output_type="np").images[0]

    before = draw()
    fastdiff.accelerate(pipe)  # its U-Net and its VAE now run on fastdiff
    accelerated = draw()
    fastdiff.restore(pipe)
    after = draw()

    print(f"{type(pipe).__name__} drew a picture of {before.shape[1]} x {before.shape[0]} pixels three times")
    print(f"largest difference, accelerated: {np.abs(accelerated - before).max():.1e} of 1")
    print(f"largest difference, restored:    {np.abs(after - before).max():.1e} of 1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    main(**vars(parser.parse_args()))
