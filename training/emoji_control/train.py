"""Train a ControlNet that makes emoji-sd follow edges, in one or several runs.

    python -m training.emoji_control.train --data emoji128.npz --out runs/emoji-edges --minutes 8

A run ends after --steps or --minutes. It leaves checkpoint.pt, the averaged weights as a diffusers folder (model/) and
log.jsonl in --out, and writes the first two again at every report, so that a run that is cut off loses little. Another
run with the same --out resumes from the checkpoint; the random draws of a step depend only on --seed and the step.
--start FOLDER begins with the weights of such a model/ folder and a new optimiser, where there is no checkpoint.

emoji-sd itself is not trained. The learning rate falls over the last quarter of the steps, or of the time if it is over
first. The loss at step 0 is that of emoji-sd alone, since the zero convolutions start at zero.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from fastdiff.checkpoints.hub import BUNDLED
from fastdiff.text.tokenizer import CLIPTokenizer
from training.diffusion import Diffusion
from training.emoji_control.bank import Batch, ControlBank, make_bank, plain_batch
from training.emoji_control.controlnet import (
    MOST_BYTES,
    Frozen,
    build_controlnet,
    load_controlnet,
    save_controlnet,
)
from training.emoji_sd.data import load
from training.emoji_sd.evaluation.drawing import load_pipeline
from training.emoji_sd.train_unet import JUDGED, v_losses
from training.emoji_sd.unet import parameter_count
from training.emoji_sd.weights import Weights
from training.train_emoji64 import rate_factor


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model and log")
    parser.add_argument("--model", type=Path, default=BUNDLED / "emoji-sd", help="folder of emoji-sd")
    parser.add_argument("--start", type=Path, help="folder of a ControlNet to begin with; default: emoji-sd's encoder")
    parser.add_argument("--steps", type=int, default=12_000, help="steps of the whole training")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop this run after this time and leave a checkpoint"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--copies", type=int, default=8, help="augmented copies per picture to encode")
    parser.add_argument("--captions", type=int, default=12, help="captions per picture")
    parser.add_argument("--report-every", type=int, default=500, help="steps between validation losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


@torch.no_grad()
def mean_loss(predict: Frozen, controlnet: torch.nn.Module, diffusion: Diffusion, batch: Batch) -> float:
    """Return the v-loss of pictures under the training density of t, with the same t and noise on every call."""
    generator, device, total = torch.Generator().manual_seed(0), batch.latents.device, 0.0
    for rows in torch.arange(len(batch.latents), device=device).repeat(JUDGED).split(512):
        part = batch.part(rows)
        u = torch.rand(len(rows), generator=generator).to(device)
        t = torch.searchsorted(diffusion.t_cumulative, u, right=True).clamp(max=len(diffusion.alpha_bar) - 1)
        eps = torch.randn(part.latents.shape, generator=generator).to(device)
        denoise = partial(predict, controlnet, control=part.control)
        total += v_losses(denoise, diffusion, part.latents, part.tokens, t, eps).sum().item()
    return total / (JUDGED * len(batch.latents))


class Trainer:
    """The ControlNet's weights beside the frozen emoji-sd, and the training step."""

    def __init__(self, args: argparse.Namespace, pipeline: StableDiffusionPipeline, bank: ControlBank):
        self.args, self.bank, self.diffusion = args, bank, Diffusion(args.device)
        torch.manual_seed(args.seed)
        built = build_controlnet(pipeline) if args.start is None else load_controlnet(args.start, args.device)
        built = built.train().requires_grad_(True).to(args.device, memory_format=torch.channels_last)
        self.weights = Weights(built, weight_decay=0.01)
        frozen = Frozen(pipeline.unet, pipeline.text_encoder)
        self.predict = frozen.to(args.device, memory_format=torch.channels_last)
        self.forward = torch.compile(self.predict) if args.compile else self.predict

    def train_step(self, most_steps: int) -> Tensor:
        """Make one of about `most_steps` steps, and return the batch's mean loss without reading it back."""
        step, args = self.weights.step, self.args
        torch.manual_seed(args.seed * 1_000_003 + step + 1)
        batch = self.bank.draw(args.batch)
        t = self.diffusion.draw_t(len(batch.latents))
        denoise = partial(self.forward, self.weights.model, control=batch.control)
        losses = v_losses(denoise, self.diffusion, batch.latents, batch.tokens, t, torch.randn_like(batch.latents))
        loss = losses.mean()
        self.weights.update(loss, args.learning_rate * rate_factor(step, max(most_steps, step + 1)))
        return loss.detach()

    def save(self) -> int:
        """Write checkpoint.pt and model/; return the model's size in bytes."""
        self.weights.save(self.args.out / "checkpoint.pt")
        return save_controlnet(self.weights.ema, self.args.out / "model")


class Clock:
    """The time of a run, and the steps that it leaves room for."""

    def __init__(self, args: argparse.Namespace, started: float, first_step: int):
        self.args, self.started, self.first = args, started, first_step
        self.trained_from = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_over(self, step: int) -> bool:
        return step >= self.args.steps or self.seconds >= 60 * self.args.minutes

    def most_steps(self, step: int) -> int:
        """Return the steps of the training if the rest of this run is as fast as it was so far."""
        trained = time.monotonic() - self.trained_from
        if step - self.first < 20 or self.args.minutes == float("inf"):
            return self.args.steps
        left = max(0.0, 60 * self.args.minutes - self.seconds)
        return min(self.args.steps, step + int(left * (step - self.first) / trained))


def report(trainer: Trainer, judged: dict[str, Batch], losses: list[Tensor], clock: Clock) -> None:
    """Log the averaged weights' losses on the splits with plain captions, to log.jsonl and the screen."""
    record: dict[str, float] = {"step": trainer.weights.step}
    if losses:
        record["batch_loss"] = torch.stack(losses).mean().item()
    record["seconds"] = clock.seconds
    for name, batch in judged.items():
        record[f"{name}_loss"] = mean_loss(trainer.predict, trainer.weights.ema, trainer.diffusion, batch)
    with (trainer.args.out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")
    print("  ".join(f"{key} {value:.5g}" for key, value in record.items()), flush=True)


def run(args: argparse.Namespace) -> Trainer:
    """Train until --steps or --minutes is reached. The module's docstring lists the files that this writes."""
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    splits, pipeline = load(args.data, args.device), load_pipeline(args.model, args.device)
    tokenizer = CLIPTokenizer(args.model / "tokenizer")
    bank = make_bank(pipeline.vae, tokenizer, splits.train, copies=args.copies, captions=args.captions, seed=args.seed)
    most = len(splits.validation)
    judged = {name: plain_batch(pipeline.vae, tokenizer, part, most) for name, part in vars(splits).items()}
    trainer = Trainer(args, pipeline, bank)
    if (args.out / "checkpoint.pt").exists():
        trainer.weights.resume(args.out / "checkpoint.pt")
    clock = Clock(args, started, trainer.weights.step)
    print(
        f"{len(splits.train)} pictures, ControlNet {parameter_count(trainer.weights.model)} parameters, step "
        f"{trainer.weights.step}, prepared in {clock.seconds:.0f} s",
        flush=True,
    )
    losses: list[Tensor] = []
    report(trainer, judged, losses, clock)
    while not clock.is_over(trainer.weights.step):
        losses.append(trainer.train_step(clock.most_steps(trainer.weights.step)))
        if trainer.weights.step % args.report_every == 0 or clock.is_over(trainer.weights.step):
            report(trainer, judged, losses, clock)
            trainer.save()
            losses = []
    size = trainer.save()
    over = f", more than {MOST_BYTES >> 20}" if size > MOST_BYTES else ""
    print(
        f"stopped at step {trainer.weights.step} of {args.steps} after {clock.seconds:.0f} s, {size / 2**20:.2f} MiB"
        f"{over}",
        flush=True,
    )
    return trainer


if __name__ == "__main__":
    run(parse_arguments())
