"""Train emoji-sd's U-Net together with its text encoder, in one or several runs.

    python -m training.emoji_sd.train_unet --data emoji128.npz --vae runs/emoji-sd/f4c4/model \
        --tokenizer runs/emoji-sd/tokenizer --out runs/emoji-sd/unet

A run ends after --steps or --minutes. It leaves checkpoint.pt, the averaged weights as a StableDiffusionPipeline folder
(model/) and log.jsonl in --out. Another run with the same --out resumes from the checkpoint; the random draws of a step
depend only on --seed and the step. You may change --steps on resuming, to finish within the remaining time: the
learning rate falls over the last quarter of --steps.

The model predicts v on the squared-cosine schedule, like emoji64. The schedule's last step is pure noise (signal
4.9e-5), so that sampling starts where training did and a flat white background keeps its mean. The density of t is
min-SNR-5.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastdiff.text.tokenizer import CLIPTokenizer
from training.diffusion import Diffusion
from training.emoji_sd.data import Pictures, load
from training.emoji_sd.folder import save_pipeline
from training.emoji_sd.latents import LatentBank, encode, make_bank, plain_tokens, spread
from training.emoji_sd.unet import (
    CHANNELS,
    TEXT_LAYERS,
    TEXT_WIDTH,
    Denoiser,
    build_text_encoder,
    build_unet,
    parameter_count,
)
from training.emoji_sd.vae import load_vae
from training.emoji_sd.weights import Weights
from training.train_emoji64 import rate_factor

JUDGED = 8  # times that each picture is used for a reported loss


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--vae", type=Path, required=True, help="folder that train_vae wrote: OUT/model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model and log")
    parser.add_argument("--steps", type=int, default=16_000, help="steps of the whole training")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop this run after this time and leave a checkpoint"
    )
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS, help="channels of the U-Net's levels")
    parser.add_argument("--text-width", type=int, default=TEXT_WIDTH, help="width of the text encoder")
    parser.add_argument("--text-layers", type=int, default=TEXT_LAYERS, help="layers of the text encoder")
    parser.add_argument("--copies", type=int, default=8, help="shifted copies per picture to encode")
    parser.add_argument("--captions", type=int, default=24, help="captions per picture")
    parser.add_argument("--report-every", type=int, default=1000, help="steps between validation losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def v_losses(denoiser: torch.nn.Module, diffusion: Diffusion, x_0: Tensor, tokens: Tensor, t: Tensor, eps: Tensor):
    """Return each latent's squared error on v, (N,) float32; x_0 and eps (N, C, h, w), tokens (N, L), t (N,)."""
    alpha_bar = diffusion.alpha_bar[t][:, None, None, None]
    signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    x_t = (signal * x_0 + sigma * eps).contiguous(memory_format=torch.channels_last)
    with torch.autocast(x_0.device.type, dtype=torch.bfloat16):
        prediction = denoiser(x_t, t, tokens)
    return F.mse_loss(prediction.float(), signal * eps - sigma * x_0, reduction="none").mean(dim=(1, 2, 3))


@torch.no_grad()
def mean_loss(denoiser: Denoiser, diffusion: Diffusion, latents: Tensor, tokens: Tensor) -> float:
    """Return the v-loss of pictures under the training density of t, with the same t and noise on every call."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for part in torch.arange(len(latents), device=latents.device).repeat(JUDGED).split(512):
        u = torch.rand(len(part), generator=generator).to(latents.device)
        t = torch.searchsorted(diffusion.t_cumulative, u, right=True).clamp(max=len(diffusion.alpha_bar) - 1)
        eps = torch.randn(len(part), *latents.shape[1:], generator=generator).to(latents.device)
        total += v_losses(denoiser, diffusion, latents[part], tokens[part], t, eps).sum().item()
    return total / (JUDGED * len(latents))


class Trainer:
    """The weights of text encoder and U-Net, and the training step."""

    def __init__(self, args: argparse.Namespace, bank: LatentBank, tokenizer: CLIPTokenizer):
        self.args, self.bank, self.diffusion = args, bank, Diffusion(args.device)
        torch.manual_seed(args.seed)
        text_encoder = build_text_encoder(tokenizer, args.text_width, args.text_layers)
        _, _, channels, _, size = bank.latents.shape
        unet = build_unet(tuple(args.channels), channels, size, args.text_width)
        denoiser = Denoiser(unet, text_encoder).train().to(args.device, memory_format=torch.channels_last)
        self.weights = Weights(denoiser, weight_decay=0.01)
        self.forward = torch.compile(denoiser) if args.compile else denoiser

    def train_step(self) -> Tensor:
        """Make one step, and return the batch's mean loss without reading it back."""
        step, args = self.weights.step, self.args
        torch.manual_seed(args.seed * 1_000_003 + step + 1)
        x_0, tokens = self.bank.draw(args.batch)
        t = self.diffusion.draw_t(len(x_0))
        loss = v_losses(self.forward, self.diffusion, x_0, tokens, t, torch.randn_like(x_0)).mean()
        self.weights.update(loss, args.learning_rate * rate_factor(step, args.steps))
        return loss.detach()


class Reporter:
    """Log the averaged weights' losses on the splits with plain captions, to log.jsonl and the screen."""

    def __init__(self, trainer: Trainer, judged: dict[str, tuple[Tensor, Tensor]], started: float):
        self.trainer, self.judged, self.started = trainer, judged, started
        self.losses: list[Tensor] = []
        self.since = time.monotonic()

    def report(self) -> None:
        trainer = self.trainer
        batch_loss = torch.stack(self.losses).mean().item()  # synchronises with the device before the clock is read
        speed = len(self.losses) * trainer.args.batch / (time.monotonic() - self.since)
        seconds = time.monotonic() - self.started
        record = {
            "step": trainer.weights.step,
            "seconds": seconds,
            "pictures_per_second": speed,
            "batch_loss": batch_loss,
        }
        for name, (latents, tokens) in self.judged.items():
            record[f"{name}_loss"] = mean_loss(trainer.weights.ema, trainer.diffusion, latents, tokens)
        with (trainer.args.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        print("  ".join(f"{key} {value:.5g}" for key, value in record.items()), flush=True)
        self.losses, self.since = [], time.monotonic()


def run(args: argparse.Namespace) -> Trainer:
    """Train until --steps or --minutes is reached. The module's docstring lists the files that this writes."""
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    splits, vae, tokenizer = (
        load(args.data, args.device),
        load_vae(args.vae, args.device),
        CLIPTokenizer(args.tokenizer),
    )
    bank = make_bank(vae, tokenizer, splits.train, copies=args.copies, captions=args.captions, seed=args.seed)
    trainer = Trainer(args, bank, tokenizer)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.weights.resume(checkpoint)

    def judged(pictures: Pictures) -> tuple[Tensor, Tensor]:
        some = spread(len(splits.validation), len(pictures), args.device)
        return encode(vae, pictures.images[some]), plain_tokens(tokenizer, pictures)[some]

    reporter = Reporter(trainer, {name: judged(part) for name, part in vars(splits).items()}, started)
    print(
        f"{len(splits.train)} pictures, U-Net {parameter_count(trainer.weights.model.unet)}, text encoder "
        f"{parameter_count(trainer.weights.model.text_encoder)} parameters, step {trainer.weights.step}, "
        f"prepared in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    while trainer.weights.step < args.steps and time.monotonic() - started < 60 * args.minutes:
        reporter.losses.append(trainer.train_step())
        if trainer.weights.step % args.report_every == 0 or trainer.weights.step == args.steps:
            reporter.report()
    trainer.weights.save(checkpoint)
    size = save_pipeline(trainer.weights.ema, vae, args.tokenizer, args.out / "model")
    seconds = time.monotonic() - started
    print(
        f"stopped at step {trainer.weights.step} of {args.steps} after {seconds:.0f} s, {size / 2**20:.2f} MiB",
        flush=True,
    )
    return trainer


if __name__ == "__main__":
    run(parse_arguments())
