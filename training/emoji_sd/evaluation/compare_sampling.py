"""Compare guidance, samplers and steps of emoji-sd by the judge's scores.

    python -m training.emoji_sd.evaluation.compare_sampling --data emoji128.npz --judge runs/emoji-sd/judge/judge.pt \
        --model runs/emoji-sd/unet/model --out runs/emoji-sd/sampling.json

Every setting draws the same captions of training pictures with seeds 0 to --per-prompt - 1. The setting with the best
`first` is drawn again with seeds from 1000 on, which played no part in the choice.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline

from training.emoji_sd.evaluation.drawing import SAMPLERS, load_pipeline
from training.emoji_sd.evaluation.evaluate import (
    Yardstick,
    add_common_arguments,
    draw_asked,
    make_yardstick,
    score_drawn,
    white_background,
)
from training.emoji_sd.evaluation.prompts import Asked, asked_of

GUIDANCE = (1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
STEPS = (10, 20, 30)
JUDGING_SEED = 1000


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--per-prompt", type=int, default=2)
    return parser.parse_args(argv)


def row_of(yardstick: Yardstick, pipeline: StableDiffusionPipeline, asked: Asked, seeds: range, options: dict) -> dict:
    """Return the scores, kernel distance and background of one setting."""
    images = draw_asked(pipeline, asked, seeds, options)
    return {
        **options,
        "seeds": [seeds.start, seeds.stop],
        **score_drawn(yardstick.judge, asked, seeds, images),
        "kernel_distance": yardstick.kernel_distance(images),
        "corner": white_background(images),
    }


def run(args: argparse.Namespace) -> dict:
    torch.set_float32_matmul_precision("high")
    yardstick = make_yardstick(args.data, args.judge, args.model / "tokenizer", args.device)
    pipeline = load_pipeline(args.model, args.device)
    asked = asked_of(yardstick.splits.train, yardstick.names, args.prompts)
    rows = []
    for sampler, steps, guidance in itertools.product(SAMPLERS, STEPS, GUIDANCE):
        options = {"sampler": sampler, "num_inference_steps": steps, "guidance_scale": guidance}
        rows.append(row_of(yardstick, pipeline, asked, range(args.per_prompt), options))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    best = max(rows, key=lambda row: row["first"])
    options = {key: best[key] for key in ("sampler", "num_inference_steps", "guidance_scale")}
    seeds = range(JUDGING_SEED, JUDGING_SEED + args.per_prompt)
    results = {"chosen_by": rows, "judged": row_of(yardstick, pipeline, asked, seeds, options)}
    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    run(parse_arguments())
