"""Plan trajectories with a tiny random UNet1DModel, which this script saves as a diffusers folder first."""

import argparse
import tempfile

import diffusers
import numpy as np

import fastdiff

CONFIG = {  # 14 channels: 3 of an action, then 11 of an observation
    "in_channels": 14,
    "out_channels": 14,
    "block_out_channels": (8, 16, 32),
    "down_block_types": ("DownResnetBlock1D",) * 3,
    "up_block_types": ("UpResnetBlock1D",) * 2,
    "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock",
    "use_timestep_embedding": True,
    "act_fn": "mish",
}


def main(steps: int = 5) -> None:
    unet, scheduler = diffusers.UNet1DModel(**CONFIG), diffusers.DDIMScheduler()
    with tempfile.TemporaryDirectory() as folder:
        diffusers.DDIMPipeline(unet, scheduler).save_pretrained(folder)
        pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu")

    now = np.linspace(-1, 1, 11)  # what is observed now: the last 11 channels at position 0
    plans = pipe(horizon=32, batch_size=4, conditions={0: now}, num_inference_steps=steps).trajectories
    print(f"{type(pipe).__name__} made {plans.shape[0]} plans of {plans.shape[1]} channels, {plans.shape[2]} positions")
    print("each begins with the observation:", bool(np.allclose(plans[:, 3:, 0], now)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    main(**vars(parser.parse_args()))
