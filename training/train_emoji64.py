"""Train emoji64, or emoji64-dit with `--model dit`, in one or several runs.

    python -m training.train_emoji64 --data emoji64.npz --out runs/emoji64

A run ends after --steps or --minutes. It leaves checkpoint.pt, the averaged weights as a model folder (model/), sample
grids and log.jsonl in --out. Another run with the same --out resumes from the checkpoint. The random draws of a step
depend only on --seed and the step, so a resumed run makes the same steps as an uninterrupted one.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from diffusers import ModelMixin

from training.data import Augmenter, Pictures, load, to_model_range
from training.diffusion import NULL_PROBABILITY, Diffusion, mean_loss, picture_distribution, stratified_draw
from training.labels import Labels
from training.model import SHAPES, build_model, save_model
from training.sampling import sample, save_grid

WARM_UP_STEPS = 300
DECAY_FRACTION = 0.25  # the learning rate falls linearly to 0 over the last quarter
EMA_DECAY = 0.999
GRADIENT_NORM = 1.0


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="unet")
    parser.add_argument("--data", type=Path, required=True, help="emoji64.npz")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint, model, grids and log")
    parser.add_argument("--steps", type=int, default=24_000, help="steps of the whole training")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop this run after this time and leave a checkpoint"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--shape", type=int, nargs="+", help="channels of four levels, or width and blocks of a DiT")
    parser.add_argument("--report-every", type=int, default=1000, help="steps between validation losses and grids")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


class Trainer:
    """The training step, and what a checkpoint holds: weights, their moving average, optimiser and step."""

    def __init__(self, args: argparse.Namespace, train: Pictures, labels: Labels):
        self.args, self.train, self.labels = args, train, labels
        torch.manual_seed(args.seed)
        self.model = build_model(args.model, labels, args.shape or SHAPES[args.model], args.dropout).to(args.device)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        on_gpu = self.model.device.type == "cuda"
        self.forward = torch.compile(self.model) if on_gpu else self.model
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=on_gpu
        )
        self.step = 0
        self.diffusion = Diffusion(args.device)
        self.augment = Augmenter(train.images)
        self.distribution = picture_distribution(train.labels)

    def train_step(self) -> torch.Tensor:
        """Make one optimiser step, and return the batch's mean loss without reading it back."""
        torch.manual_seed(self.args.seed * 1_000_003 + self.step + 1)
        indices = stratified_draw(self.distribution, self.args.batch)
        x_0 = to_model_range(self.augment(indices)).contiguous(memory_format=torch.channels_last)
        unlabelled = torch.rand(len(indices), device=x_0.device) < NULL_PROBABILITY
        labels = self.train.labels[indices].masked_fill(unlabelled, self.labels.null_label)
        t = self.diffusion.draw_t(len(indices))
        loss = self.diffusion.loss(self.forward, x_0, labels, t, torch.randn_like(x_0)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.learning_rate * rate_factor(self.step, self.args.steps)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self._update_ema()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def _update_ema(self) -> None:
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), 1 - decay)

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
        }
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate's factor: warm-up, constant, then a linear fall to 0 over the last quarter."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = min(1.0, (steps - step) / (DECAY_FRACTION * steps))
    return warm_up * fall


def draw_grid(model: ModelMixin, labels: Labels, path: Path) -> None:
    """Draw two pictures (seeds 0 and 1, 20 steps) of every style and group into a grid of 18 columns."""
    index = {name: i for i, name in enumerate(labels.names)}
    chosen = [index[members[seed % len(members)]] for members in labels.groups.values() for seed in (0, 1)]
    images = sample(model, chosen, [0, 1] * len(labels.groups), null_label=labels.null_label, num_inference_steps=20)
    save_grid(images, columns=18, path=path)


def report(trainer: Trainer, validation: Pictures, record: dict) -> None:
    """Write the averaged weights' validation and training losses and a grid of their samples to --out."""
    out, ema, train = trainer.args.out, trainer.ema, trainer.train
    some = torch.linspace(0, len(train) - 1, len(validation), device=train.labels.device).long()
    record["validation_loss"] = mean_loss(ema, trainer.diffusion, validation.images, validation.labels)
    record["training_loss"] = mean_loss(ema, trainer.diffusion, train.images[some], train.labels[some])
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")
    draw_grid(ema, trainer.labels, out / f"grid-{trainer.step:06d}.png")
    print("  ".join(f"{key} {value:.5g}" for key, value in record.items()), flush=True)


def run(args: argparse.Namespace) -> Trainer:
    """Train until --steps or --minutes is reached. The module's docstring lists the files that this writes."""
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    train, validation, labels = load(args.data, args.device)
    trainer = Trainer(args, train, labels)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
    size = sum(p.numel() for p in trainer.model.parameters())
    print(f"{len(train)} pictures, {len(labels.names)} labels, {size} parameters, step {trainer.step}", flush=True)
    losses: list[torch.Tensor] = []
    reported = time.monotonic()
    while trainer.step < args.steps and time.monotonic() - started < 60 * args.minutes:
        losses.append(trainer.train_step())
        if trainer.step % args.report_every == 0 or trainer.step == args.steps:
            batch_loss = torch.stack(losses).mean().item()  # synchronises with the device before the clock is read
            speed = len(losses) * args.batch / (time.monotonic() - reported)
            seconds = time.monotonic() - started
            record = {"step": trainer.step, "seconds": seconds, "pictures_per_second": speed, "batch_loss": batch_loss}
            report(trainer, validation, record)
            losses, reported = [], time.monotonic()
    trainer.save(checkpoint)
    save_model(trainer.ema, labels, args.out / "model")
    print(f"stopped at step {trainer.step} of {args.steps} after {time.monotonic() - started:.0f} s", flush=True)
    return trainer


if __name__ == "__main__":
    run(parse_arguments())
