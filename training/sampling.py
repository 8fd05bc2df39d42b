"""DDIM sampling of many labelled pictures at once with diffusers' scheduler, and grids of pictures."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DDIMScheduler, ModelMixin
from PIL import Image
from torch import Tensor

from training.data import SIZE, to_bytes
from training.diffusion import SCHEDULER

BATCH = 512


@torch.no_grad()
def sample(
    model: ModelMixin,
    labels: Sequence[int],
    seeds: Sequence[int],
    *,
    null_label: int,
    guidance_scale: float = 2.0,
    num_inference_steps: int = 50,
    use_clipped_model_output: bool = True,
) -> Tensor:
    """Draw a picture per (label, seed), with noise from that seed's CPU generator: (N, 64, 64, 3) uint8 on the CPU."""
    parts = []
    for start in range(0, len(labels), BATCH):
        noise = [torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(s)) for s in seeds[start:][:BATCH]]
        x_t = torch.stack(noise).to(model.device)
        classes = torch.tensor(labels[start:][:BATCH], device=model.device)
        classes = torch.cat([torch.full_like(classes, null_label), classes])
        scheduler = DDIMScheduler(**SCHEDULER)
        scheduler.set_timesteps(num_inference_steps)
        for t in scheduler.timesteps:
            timesteps = t.to(model.device).expand(len(classes))  # a DiT needs one per picture
            v_null, v_label = model(torch.cat([x_t, x_t]), timesteps, class_labels=classes).sample.chunk(2)
            v = v_null + guidance_scale * (v_label - v_null)
            x_t = scheduler.step(v, t, x_t, use_clipped_model_output=use_clipped_model_output).prev_sample
        parts.append(to_bytes(x_t))
    return torch.cat(parts)


def save_grid(images: Tensor, columns: int, path: Path, gap: int = 4) -> None:
    """Write (N, 64, 64, 3) uint8 pictures row by row into one PNG on white."""
    rows = -(-len(images) // columns)
    cell = SIZE + gap
    grid = Image.new("RGB", (columns * cell + gap, rows * cell + gap), "white")
    for i, image in enumerate(images):
        grid.paste(Image.fromarray(image.numpy()), (gap + i % columns * cell, gap + i // columns * cell))
    grid.save(path)
