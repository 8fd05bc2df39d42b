"""The forward process and the loss: squared-cosine schedule, v-prediction, and min-SNR-5 as the density of t.

Sources: Ho et al. 2020 eq. 4 (x_t); Salimans & Ho 2022 appendix D (v); Hang et al. 2023 (min-SNR); Nichol &
Dhariwal 2021 (squared-cosine alpha_bar).
"""

import torch
from diffusers import DDIMScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from training.data import to_model_range

NULL_PROBABILITY = 0.12
SCHEDULER = {
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "clip_sample": True,
}


class Diffusion:
    """The schedule's alpha_bar and the cumulative density of t, on a device."""

    def __init__(self, device: torch.device | str):
        alpha_bar = DDIMScheduler(**SCHEDULER).alphas_cumprod
        snr = alpha_bar / (1 - alpha_bar)
        density = snr.clamp(max=5) / (snr + 1) + 0.1
        self.alpha_bar = alpha_bar.to(device)
        self.t_cumulative = cumulative(density).to(device)

    def draw_t(self, count: int) -> Tensor:
        """Draw (count,) int64 timesteps, stratified over their density and in random order."""
        t = stratified_draw(self.t_cumulative, count)
        return t[torch.randperm(count, device=t.device)]

    def loss(self, model: nn.Module, x_0: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return each picture's squared error on v, (N,) float32; x_0 and noise (N, 3, H, W), labels and t (N,)."""
        alpha_bar = self.alpha_bar[t][:, None, None, None]
        signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        x_t = signal * x_0 + sigma * noise
        v = signal * noise - sigma * x_0
        with torch.autocast(x_0.device.type, dtype=torch.bfloat16):
            prediction = model(x_t, t, class_labels=labels).sample
        return F.mse_loss(prediction.float(), v, reduction="none").mean(dim=(1, 2, 3))


def cumulative(weights: Tensor) -> Tensor:
    """Return the cumulative distribution of non-negative weights, float32; the last entry is exactly 1."""
    total = weights.double().cumsum(0)
    return (total / total[-1]).float()


def stratified_draw(distribution: Tensor, count: int) -> Tensor:
    """Draw (count,) ascending int64 indices of a cumulative distribution, one from each of `count` equal strata."""
    device = distribution.device
    u = (torch.arange(count, device=device) + torch.rand(count, device=device)) / count
    return torch.searchsorted(distribution, u, right=True).clamp(max=len(distribution) - 1)


def picture_distribution(labels: Tensor) -> Tensor:
    """Return the cumulative distribution of pictures with labels (N,); a label's weight is the root of its count."""
    counts = labels.bincount()[labels]
    return cumulative(counts.double().rsqrt())


@torch.no_grad()
def mean_loss(model: nn.Module, diffusion: Diffusion, images: Tensor, labels: Tensor, repeats: int = 8) -> float:
    """Return the v-loss of pictures under the training density of t, with the same t and noise on every call.

    images (N, 3, 64, 64) uint8, labels (N,). Each picture is used `repeats` times. Noise is drawn on the CPU, so that
    results of different machines are comparable.
    """
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(repeats):
        u = (torch.arange(len(images)) + torch.rand(len(images), generator=generator)) / len(images)
        u = u[torch.randperm(len(images), generator=generator)].to(images.device)
        t = torch.searchsorted(diffusion.t_cumulative, u, right=True).clamp(max=len(diffusion.alpha_bar) - 1)
        noise = torch.randn(images.shape, generator=generator).to(images.device)
        x_0 = to_model_range(images)
        for part in torch.arange(len(images), device=images.device).split(512):
            total += diffusion.loss(model, x_0[part], labels[part], t[part], noise[part]).sum().item()
    return total / (repeats * len(images))
