"""Measure a ControlNet of emoji-sd: agreement with the edges, the judge's scores, and sheets.

    python -m training.emoji_control.evaluate --data emoji128.npz --controlnet runs/emoji-edges/model \
        --judge runs/emoji-sd/judge/judge.pt --out runs/emoji-edges/evaluation

The control pictures are the edges of real pictures, none of which training showed but `train`. Each is drawn in three
ways: `controlled`, with the picture's plain caption; `edges_alone`, with an empty prompt; and `prompt_alone`, without
the ControlNet. `decoded` is the real picture through the VAE, the best that a drawing could reach. Without --judge
there are no scores.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import StableDiffusionControlNetPipeline
from torch import Tensor

from fastdiff.checkpoints.hub import BUNDLED
from fastdiff.execution.devices import device_name
from fastdiff.text.tokenizer import CLIPTokenizer
from training.emoji_control.controlnet import controlled_pipeline, load_controlnet
from training.emoji_control.controls import agreement, control_pictures, edges_of
from training.emoji_sd.captions import STYLE_WORDS, folded, plain_caption
from training.emoji_sd.data import Pictures, Splits, load
from training.emoji_sd.evaluation.drawing import SAMPLERS, draw, load_pipeline
from training.emoji_sd.evaluation.judge import NameJudge, candidate_names, load_judge
from training.emoji_sd.evaluation.prompts import Asked, asked_sets
from training.emoji_sd.latents import spread
from training.emoji_sd.sheets import save_sheet
from training.emoji_sd.vae import brought_back

SEED = 1000  # of the first picture of a set; each later one has the next seed
SCALES = (0.25, 0.5, 0.75, 1.0, 1.5)
SHEET_ROWS, STYLE_ROWS = 16, 8
OTHER = {  # prompts, and the training pictures whose edges they get
    "red apple, glossy 3D emoji": "basketball", "pizza, flat emoji": "full moon", "cat face": "dog face",
    "ghost": "octopus", "watermelon": "red heart", "sunflower": "sun",
}  # fmt: skip


class Drawer:
    """The pipeline with the ControlNet, and the sampling settings."""

    def __init__(self, pipeline: StableDiffusionControlNetPipeline, options: dict):
        self.pipeline, self.options = pipeline, options

    def __call__(self, prompts: Sequence[str], edges: Tensor, scale: float = 1.0) -> Tensor:
        """Draw a picture per prompt and edges (N, 1, 128, 128) bool: (N, 3, 128, 128) uint8 on the CPU."""
        seeds = [SEED + i for i in range(len(prompts))]
        control = control_pictures(edges).to(self.pipeline.device)
        return draw(self.pipeline, prompts, seeds, control=control, control_scale=scale, **self.options)


def measure(drawer: Drawer, judge: NameJudge | None, asked: Asked) -> dict[str, dict[str, float]]:
    """Return the agreement of drawn pictures with the edges, and the judge's scores, for each way of drawing."""
    wanted, empty = edges_of(asked.images), [""] * len(asked.prompts)
    vae = drawer.pipeline.vae
    ways = {
        "controlled": drawer(asked.prompts, wanted),
        "edges_alone": drawer(empty, wanted),
        "prompt_alone": drawer(asked.prompts, wanted, 0.0),
        "decoded": brought_back(vae, asked.images.to(vae.device)).cpu(),
    }
    results: dict[str, dict[str, float]] = {}
    for way, images in ways.items():
        results[way] = {"pictures": len(images), **agreement(edges_of(images), wanted)}
        if judge is not None:
            results[way] |= judge.score(images, asked.names)
    return results


def scale_row(drawer: Drawer, judge: NameJudge | None, asked: Asked) -> dict[str, dict[str, float]]:
    """Return the same figures for several scales of the control."""
    wanted, found = edges_of(asked.images), {}
    for scale in SCALES:
        images = drawer(asked.prompts, wanted, scale)
        scores = {} if judge is None else judge.score(images, asked.names)
        found[f"{scale:g}"] = agreement(edges_of(images), wanted) | scores
    return found


def held_out_sheet(drawer: Drawer, pictures: Pictures, path: Path) -> list[str]:
    """Draw pictures, evenly spaced: control, with the caption, with no prompt, without control, and the original.

    Returns the captions, one for each group of five.
    """
    some = spread(SHEET_ROWS, len(pictures), "cpu")
    images = pictures.images[some]
    edges, captions = edges_of(images), [plain_caption(pictures.words[row]) for row in some.tolist()]
    columns = (
        control_pictures(edges),
        drawer(captions, edges),
        drawer([""] * len(captions), edges),
        drawer(captions, edges, 0.0),
        images,
    )
    save_sheet(torch.stack(columns, dim=1).flatten(0, 1), 10, path)
    return captions


def style_sheet(drawer: Drawer, pictures: Pictures, path: Path) -> list[str]:
    """Draw the same edges in all four styles; each row begins with the edges. Returns the names."""
    some = spread(STYLE_ROWS, len(pictures), "cpu")
    edges = edges_of(pictures.images[some])
    names = [folded(pictures.words[row].name) for row in some.tolist()]
    drawn = [drawer([f"{name}, {words[0]}" for name in names], edges) for words in STYLE_WORDS.values()]
    save_sheet(torch.stack([control_pictures(edges), *drawn], dim=1).flatten(0, 1), 10, path)
    return names


def other_sheet(drawer: Drawer, splits: Splits, path: Path) -> list[str]:
    """Draw prompts with the edges of something else, each after its edges. Returns the prompts."""
    rows = {folded(words.name): row for row, words in enumerate(splits.train.words)}
    known = [(prompt, rows[name]) for prompt, name in OTHER.items() if name in rows]
    if not known:
        return []
    prompts = [prompt for prompt, _ in known]
    edges = edges_of(splits.train.images[[row for _, row in known]])
    save_sheet(torch.stack([control_pictures(edges), drawer(prompts, edges)], dim=1).flatten(0, 1), 6, path)
    return prompts


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--controlnet", type=Path, required=True, help="folder that train wrote: OUT/model")
    parser.add_argument("--out", type=Path, required=True, help="folder for evaluation.json and the sheets")
    parser.add_argument("--model", type=Path, default=BUNDLED / "emoji-sd", help="folder of emoji-sd")
    parser.add_argument("--judge", type=Path, help="judge.pt of training.emoji_sd.evaluation.judge")
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sampler", choices=SAMPLERS, default="dpm++2m")
    parser.add_argument("--most", type=int, help="pictures of each set at most; default: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def first(asked: Asked, most: int | None) -> Asked:
    return Asked(asked.prompts[:most], asked.names[:most], asked.images[:most])


def run(args: argparse.Namespace) -> dict:
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    splits, reader = load(args.data, "cpu"), CLIPTokenizer(args.model / "tokenizer")
    names = candidate_names(splits)
    judge = None if args.judge is None else NameJudge(load_judge(args.judge, reader, args.device), reader, names)
    pipeline = controlled_pipeline(
        load_pipeline(args.model, args.device), load_controlnet(args.controlnet, args.device)
    )
    options = {"guidance_scale": args.guidance, "num_inference_steps": args.steps, "sampler": args.sampler}
    drawer = Drawer(pipeline, options)
    sheets = {
        "held_out": held_out_sheet(drawer, splits.held_out, args.out / "held_out.png"),
        "styles": style_sheet(drawer, splits.validation, args.out / "styles.png"),
        "other": other_sheet(drawer, splits, args.out / "other.png"),
    }
    asked = {name: first(each, args.most) for name, each in asked_sets(splits, names).items()}
    results = {
        "device": device_name(pipeline.device),
        "torch": torch.__version__,
        "sampling": options,
        "first_seed": SEED,
        "sheets": sheets,
        "sets": {name: measure(drawer, judge, each) for name, each in asked.items()},
        "scales": scale_row(drawer, judge, asked["held_out"]),
    }
    (args.out / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in results.items() if key != "sheets"}, indent=1), flush=True)
    return results


if __name__ == "__main__":
    run(parse_arguments())
