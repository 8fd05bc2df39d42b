"""Train the VAE of emoji-sd, in one or several runs.

    python -m training.emoji_sd.train_vae --data emoji128.npz --out runs/emoji-sd/vae --shape f4c4 --steps 8000

A run ends after --steps or --minutes. It leaves checkpoint.pt, the averaged weights as a diffusers folder (model/,
float16, with the scaling factor of its latents), sheet.png (validation pictures above their reconstructions) and
log.jsonl in --out. Another run with the same --out resumes from the checkpoint; the random draws of a step depend only
on --seed and the step.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from training.data import to_model_range
from training.emoji_sd.data import Pictures, Sampler, Splits, load
from training.emoji_sd.features import STEPS as FEATURE_STEPS
from training.emoji_sd.features import Features, make_features
from training.emoji_sd.sheets import save_pairs
from training.emoji_sd.vae import SHAPES, brought_back, build_vae, quality, save_vae, scaling_factor
from training.emoji_sd.weights import Weights
from training.train_emoji64 import rate_factor

# Weights of the loss's terms; L1 has weight 1.
EDGES = 0.5
FEATURES = 0.2
KL = 1e-3  # per latent; at the optimum the noise that it asks for costs as much L1, 1/8 of a level of 255
LOG_VARIANCE = (-30.0, 20.0)  # the bounds of diffusers' DiagonalGaussianDistribution
TERMS = ("l1", "edges", "features", "kl")
SHEET_PICTURES = 40


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model, sheet and log")
    parser.add_argument("--shape", choices=SHAPES, default="f4c4")
    parser.add_argument("--features", type=Path, help="classifier weights, made if missing (default: OUT/features.pt)")
    parser.add_argument("--feature-steps", type=int, default=FEATURE_STEPS, help="training steps of that classifier")
    parser.add_argument("--steps", type=int, default=8000, help="steps of the whole training")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop this run after this time and leave a checkpoint"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--report-every", type=int, default=1000, help="steps between lines of the log")
    parser.add_argument("--compile", action="store_true", help="compile the step: takes a minute, then runs faster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


class Trainer:
    """The VAE's weights and the training step."""

    def __init__(self, args: argparse.Namespace, train: Pictures, features: Features):
        self.args, self.draw, self.features = args, Sampler(train), features
        torch.manual_seed(args.seed)
        vae = build_vae(SHAPES[args.shape]).to(args.device, memory_format=torch.channels_last)
        self.weights = Weights(vae, weight_decay=0.0)
        self.shares = torch.tensor((1.0, EDGES, FEATURES, KL), device=args.device)
        self.losses = torch.compile(self._losses) if args.compile else self._losses

    def train_step(self) -> Tensor:
        """Make one step, and return the batch's TERMS (4,) without reading them back."""
        step, args = self.weights.step, self.args
        torch.manual_seed(args.seed * 1_000_003 + step + 1)
        _, images = self.draw(args.batch)
        # The VAE does not learn letters, so mirrored pictures are additional data.
        mirrored = torch.rand(args.batch, 1, 1, 1, device=images.device) < 0.5
        x = to_model_range(torch.where(mirrored, images.flip(-1), images))
        terms = self.losses(x.contiguous(memory_format=torch.channels_last), step_noise(self.weights.model, x))
        self.weights.update(terms @ self.shares, args.learning_rate * rate_factor(step, args.steps))
        return terms.detach()

    def _losses(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return TERMS (4,) float32 for pictures (N, 3, H, W) in -1..1 and noise of their latents' shape."""
        vae = self.weights.model
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            moments = vae.quant_conv(vae.encoder(x)).float()
            mean, log_variance = moments.chunk(2, dim=1)
            log_variance = log_variance.clamp(*LOG_VARIANCE)
            z = mean + (log_variance / 2).exp() * noise
            back = vae.decoder(vae.post_quant_conv(z))
            features = self.features(back, x)
        back = back.float()
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        return torch.stack([F.l1_loss(back, x), edge_loss(back, x), features, kl])


def step_noise(vae: AutoencoderKL, x: Tensor) -> Tensor:
    """Return standard normal noise of the latents' shape, drawn from torch's default generator."""
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    height, width = x.shape[-2] // factor, x.shape[-1] // factor
    return torch.randn(len(x), vae.config.latent_channels, height, width, device=x.device)


def edge_loss(x: Tensor, y: Tensor) -> Tensor:
    """Return the L1 of the differences between neighbouring pixels, which penalises blurred edges and ripples."""
    return sum(F.l1_loss(x.diff(dim=dim), y.diff(dim=dim)) for dim in (-1, -2)) / 2


def report(trainer: Trainer, splits: Splits, record: dict) -> None:
    """Log the averaged weights' quality on the validation pictures."""
    validation = splits.validation.images
    record |= quality(validation, brought_back(trainer.weights.ema, validation))
    with (trainer.args.out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")
    print("  ".join(f"{key} {value:.5g}" for key, value in record.items()), flush=True)


def finish(trainer: Trainer, splits: Splits) -> None:
    """Write the checkpoint, the model folder and the sheet."""
    out, ema, validation = trainer.args.out, trainer.weights.ema, splits.validation.images
    trainer.weights.save(out / "checkpoint.pt")
    factor = scaling_factor(ema, splits.train.images)
    save_vae(ema, factor, out / "model")
    some = validation[torch.linspace(0, len(validation) - 1, SHEET_PICTURES).long().to(validation.device)]
    save_pairs(some, brought_back(ema, some), out / "sheet.png")
    print(f"scaling factor {factor:.5f}", flush=True)


def run(args: argparse.Namespace) -> Trainer:
    """Train until --steps or --minutes is reached. The module's docstring lists the files that this writes."""
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    splits = load(args.data, args.device)
    features = make_features(splits.train, args.features or args.out / "features.pt", args.feature_steps)
    trainer = Trainer(args, splits.train, features)
    weights = trainer.weights
    if (args.out / "checkpoint.pt").exists():
        weights.resume(args.out / "checkpoint.pt")
    sizes = [sum(p.numel() for p in part.parameters()) for part in (weights.model, weights.model.decoder)]
    print(f"{len(splits.train)} pictures, {sizes[0]} parameters, {sizes[1]} of the decoder", flush=True)
    print(f"step {weights.step}, ready after {time.monotonic() - started:.0f} s", flush=True)
    terms: list[Tensor] = []
    reported = time.monotonic()
    while weights.step < args.steps and time.monotonic() - started < 60 * args.minutes:
        terms.append(trainer.train_step())
        if weights.step % args.report_every == 0 or weights.step == args.steps:
            means = torch.stack(terms).mean(dim=0).tolist()  # synchronises with the device before the clock is read
            speed = len(terms) * args.batch / (time.monotonic() - reported)
            record = {"step": weights.step, "seconds": time.monotonic() - started, "pictures_per_second": speed}
            report(trainer, splits, record | dict(zip(TERMS, means, strict=True)))
            terms, reported = [], time.monotonic()
    finish(trainer, splits)
    print(f"stopped at step {weights.step} of {args.steps} after {time.monotonic() - started:.0f} s", flush=True)
    return trainer


if __name__ == "__main__":
    run(parse_arguments())
