"""Write the denoising loop yourself: a model and a scheduler, called as in diffusers."""

import argparse
from pathlib import Path

import torch
from PIL import Image

import fastdiff

FOLDER = Path(fastdiff.__file__).parent / "bundled" / "emoji64"


def main(out: str = ".", label: int = 15, steps: int = 10) -> None:
    unet = fastdiff.UNet2DModel.from_pretrained(FOLDER)  # of a pipeline's folder it takes the part unet/
    scheduler = fastdiff.DDIMScheduler.from_pretrained(FOLDER, subfolder="scheduler")
    scheduler.set_timesteps(steps)

    generator = torch.Generator().manual_seed(7)
    size = unet.config.sample_size
    x = torch.randn(1, unet.config.in_channels, size, size, generator=generator)
    with torch.inference_mode():
        for t in scheduler.timesteps:
            noise = unet(x, t, class_labels=torch.tensor([label])).sample
            x = scheduler.step(noise, t, x).prev_sample

    pixels = ((x[0].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1) * 255).round().byte().numpy()
    path = Path(out, "own-loop.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    print(f"label {label} in {steps} steps of {type(scheduler).__name__}: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="folder of the picture")
    parser.add_argument("--steps", type=int, default=10)
    main(**vars(parser.parse_args()))
