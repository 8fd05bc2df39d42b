"""Time a picture of 20 guided steps with fastdiff on the CPU, for U-Nets of several widths with random weights.

    python -m training.emoji_sd.evaluation.sizes --tokenizer runs/emoji-sd/tokenizer --threads 2

training/emoji_sd/unet.py has the table that this prints. The times include prompt, loop and decode. The widths take
turns, and the minimum over the rounds counts, because other processes may slow a round down.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from fastdiff import TextToImagePipeline
from fastdiff.text.tokenizer import CLIPTokenizer
from training.emoji_sd.folder import save_pipeline
from training.emoji_sd.unet import Denoiser, build_text_encoder, build_unet, parameter_count
from training.emoji_sd.vae import SHAPES, build_vae

CHANNELS = {  # by the latents' side length
    16: ((64, 128, 128), (96, 128, 128), (96, 128, 160), (96, 160), (128, 128), (128, 192), (128, 192, 256)),
    32: ((64, 128, 128), (64, 96, 128, 128), (96, 128, 128), (96, 96, 128, 128), (64, 96, 128, 160)),
}
PROMPT = "red apple"


def made(channels: tuple[int, ...], vae: str, tokenizer: Path, folder: Path) -> tuple[str, TextToImagePipeline]:
    """Write a folder with random weights; return the start of its table row, and its pipeline."""
    text_encoder = build_text_encoder(CLIPTokenizer(tokenizer))
    shape = SHAPES[vae]
    unet = build_unet(channels, shape.latents, shape.latent_size, text_encoder.config.hidden_size)
    nn.init.normal_(unet.conv_out.weight, std=0.01)  # a prediction of zero would not be a realistic picture
    size = save_pipeline(Denoiser(unet, text_encoder), build_vae(shape), tokenizer, folder)
    row = f"| {channels!s:19} | {parameter_count(unet) / 1e6:5.2f} | {size / 2**20:5.2f} |"
    return row, TextToImagePipeline.from_pretrained(folder, device="cpu")


def seconds(pipeline: TextToImagePipeline) -> float:
    started = time.perf_counter()
    pipeline(PROMPT, seed=0, num_inference_steps=20, guidance_scale=3.0)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--vae", choices=SHAPES, default="f4c4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        every = CHANNELS[SHAPES[args.vae].latent_size]
        rows = [made(channels, args.vae, args.tokenizer, Path(folder) / str(channels)) for channels in every]
    for _, pipeline in rows:
        seconds(pipeline)
    rounds = [[seconds(pipeline) for _, pipeline in rows] for _ in range(args.rounds)]
    print("| channels            | M     | MiB   | seconds |")
    for (row, _), times in zip(rows, zip(*rounds, strict=True), strict=True):
        print(f"{row} {min(times):7.2f} |")


if __name__ == "__main__":
    main()
