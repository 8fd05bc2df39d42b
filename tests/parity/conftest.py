"""Tiny pipelines saved by diffusers, and reference loops for guided models."""

import diffusers
import pytest
import torch

from fastdiff import UNet2DConditionModel
from fastdiff.checkpoints.weights import load_weights
from fastdiff.execution.devices import on_meta

TINY_UNET = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


@pytest.fixture
def save_pipeline(tmp_path, randomise):
    """Build a tiny DDPM or DDIM pipeline in diffusers, save it, and return it with its folder."""

    def save(kind: str, unet: dict | None = None, **scheduler):
        model = randomise(diffusers.UNet2DModel(**TINY_UNET | (unet or {})))
        with torch.no_grad():
            # a large random output would amplify rounding from step to step, and need a loose tolerance
            model.conv_out.weight.mul_(0.02)
        scheduler = getattr(diffusers, f"{kind}Scheduler")(**scheduler)
        pipe = getattr(diffusers, f"{kind}Pipeline")(unet=model, scheduler=scheduler)
        pipe.set_progress_bar_config(disable=True)
        pipe.save_pretrained(tmp_path / "pipeline")
        return pipe, tmp_path / "pipeline"

    return save


@pytest.fixture
def guided_loop():
    """A loop over diffusers' model and scheduler with classifier-free guidance, which yields x_{t-1} of every step."""

    @torch.no_grad()
    def loop(model, scheduler, x, labels, null_label, guidance_scale, steps, **step_options):
        scheduler.set_timesteps(steps, device=x.device)
        null = torch.full_like(labels, null_label)
        for t in scheduler.timesteps:
            guided, unguided = model(torch.cat([x, x]), t[None], torch.cat([labels, null])).sample.chunk(2)
            prediction = unguided + guidance_scale * (guided - unguided)
            x = scheduler.step(prediction, t, x, **step_options).prev_sample
            yield x

    return loop


@pytest.fixture
def pair(randomise):
    """Build diffusers' UNet2DConditionModel from a config, and ours with the same weights."""

    def make(config: dict):
        theirs = randomise(diffusers.UNet2DConditionModel(**config))
        for module in theirs.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.data += 1
        with on_meta():
            ours = UNet2DConditionModel.from_config(theirs.config)
        load_weights(ours, theirs.state_dict(), source="model", dtype=torch.float32, device="cpu")
        return theirs, ours

    return make
