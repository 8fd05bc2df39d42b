"""Measure emoji-sd: the judge's scores of drawn pictures, kernel distance, nearest training pictures, and sheets.

    python -m training.emoji_sd.evaluation.evaluate --data emoji128.npz --judge runs/emoji-sd/judge/judge.pt \
        --model runs/emoji-sd/unet/model --guidance 3 --out runs/emoji-sd/evaluation

A score is how often the judge ranks the requested name first, or among the first 5, of 500 names without skin tones. It
is given for drawn pictures, for the real pictures of the same captions, and for chance. `train` has captions of
training pictures. `held_out` has names that training shows in three styles but not in the requested one.
`known_words` and `new_words` have validation names, which training never shows: names whose words all occur in its
captions, and names with a word that none of its captions has.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor
from torch.nn import functional as F

from fastdiff.execution.devices import device_name
from fastdiff.text.tokenizer import CLIPTokenizer
from training.data import Augmenter
from training.emoji_sd.data import Splits, load
from training.emoji_sd.evaluation.drawing import SAMPLERS, draw, load_pipeline
from training.emoji_sd.evaluation.judge import NameJudge, candidate_names, load_judge
from training.emoji_sd.evaluation.prompts import GRID, NEW, Asked, asked_sets, sheet_prompts
from training.emoji_sd.latents import spread
from training.emoji_sd.sheets import save_sheet
from training.evaluate import distance_statistics, kernel_distance
from training.neighbours import nearest

REAL = 2000  # training pictures for the kernel distance
NEAREST_SHOWN = 10


@dataclass(frozen=True)
class Yardstick:
    """The pictures, the judge and the names that it chooses among."""

    splits: Splits
    names: list[str]
    judge: NameJudge

    @property
    def chance(self) -> dict[str, float]:
        return {"first": 1 / len(self.names), "first_5": 5 / len(self.names)}

    def kernel_distance(self, images: Tensor) -> float:
        train = self.splits.train.images
        return kernel_distance(self.judge.features(images), self.judge.features(train[spread(REAL, len(train), "cpu")]))


def make_yardstick(data: Path, judge: Path, tokenizer: Path, device: torch.device | str) -> Yardstick:
    splits, reader = load(data, "cpu"), CLIPTokenizer(tokenizer)
    names = candidate_names(splits)
    return Yardstick(splits, names, NameJudge(load_judge(judge, reader, device), reader, names))


def draw_asked(pipeline: StableDiffusionPipeline, asked: Asked, seeds: range, options: dict) -> Tensor:
    """Draw every seed of every prompt, prompt by prompt: (prompts * seeds, 3, 128, 128) uint8 on the CPU."""
    prompts = [prompt for prompt in asked.prompts for _ in seeds]
    return draw(pipeline, prompts, [*seeds] * len(asked.prompts), **options)


def score_drawn(judge: NameJudge, asked: Asked, seeds: range, images: Tensor) -> dict[str, float]:
    return judge.score(images, [name for name in asked.names for _ in seeds])


def halved(images: Tensor) -> Tensor:
    """Halve (N, 3, 128, 128) uint8 to (N, 3, 64, 64), for the search of nearest pictures."""
    return F.avg_pool2d(images.float(), 2).round().byte()


def nearest_report(yardstick: Yardstick, images: Tensor, device: str, sheet: Path) -> dict:
    """Return distances to the nearest training pictures at 64x64, also of validation; write ten pairs to a sheet."""
    train = yardstick.splits.train.images
    augmenter = Augmenter(halved(train).to(device))
    held_out = nearest(halved(yardstick.splits.validation.images).to(device), augmenter).distance
    found = nearest(halved(images).to(device), augmenter)
    near = held_out.quantile(0.01).item()
    some = spread(NEAREST_SHOWN, len(images), "cpu")
    save_sheet(torch.stack([images[some], train[found.index.cpu()[some]]], dim=1).flatten(0, 1), 4, sheet)
    return {
        "near": near,
        "drawn": distance_statistics(found.distance, near),
        "validation_pictures": distance_statistics(held_out, near),
    }


def white_background(images: Tensor) -> float:
    """Return the median of the mean corner of (N, 3, S, S) uint8 pictures; 255 is a clean white background."""
    last = images.shape[-1] - 1
    return images[:, :, ::last, ::last].float().mean(dim=(1, 2, 3)).median().item()


def measure(yardstick: Yardstick, pipeline: StableDiffusionPipeline, seeds: range, options: dict, out: Path) -> dict:
    """Return the scores of the sets of prompts, and the distances of the pictures of training captions."""
    results: dict = {
        "device": device_name(pipeline.device),
        "torch": torch.__version__,
        "sampling": options,
        "seeds": [seeds.start, seeds.stop],
        "chance": yardstick.chance,
        "scores": {},
    }
    for name, asked in asked_sets(yardstick.splits, yardstick.names).items():
        images = draw_asked(pipeline, asked, seeds, options)
        drawn = score_drawn(yardstick.judge, asked, seeds, images)
        results["scores"][name] = {"drawn": drawn, "real": yardstick.judge.score(asked.images, asked.names)}
        if name == "train":
            results["kernel_distance"] = yardstick.kernel_distance(images)
            results["corner"] = white_background(images)
            results["nearest"] = nearest_report(yardstick, images, str(pipeline.device), out / "nearest.png")
    return results


def draw_sheets(yardstick: Yardstick, pipeline: StableDiffusionPipeline, options: dict, out: Path) -> None:
    """Write NAME.png and its prompts NAME.txt: 64 random, 36 common and 12 new prompts, with seed 0."""
    for name, columns, prompts in (
        ("unpicked", 8, sheet_prompts(yardstick.splits)),
        ("grid", 6, list(GRID)),
        ("new", 4, list(NEW)),
    ):
        save_sheet(draw(pipeline, prompts, [0] * len(prompts), **options), columns, out / f"{name}.png")
        (out / f"{name}.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--judge", type=Path, required=True, help="judge.pt")
    parser.add_argument("--model", type=Path, required=True, help="folder of the pipeline, tokenizer included")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for evaluation.json and the sheets")
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampler", choices=SAMPLERS, default="dpm++2m")
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1000, help="compare_sampling uses the seeds from 0 on")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict:
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    yardstick = make_yardstick(args.data, args.judge, args.model / "tokenizer", args.device)
    pipeline = load_pipeline(args.model, args.device)
    options = {"guidance_scale": args.guidance, "num_inference_steps": args.steps, "sampler": args.sampler}
    draw_sheets(yardstick, pipeline, options, args.out)
    seeds = range(args.first_seed, args.first_seed + args.per_prompt)
    results = measure(yardstick, pipeline, seeds, options, args.out)
    (args.out / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2), flush=True)
    return results


if __name__ == "__main__":
    run(parse_arguments())
