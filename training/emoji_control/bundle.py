"""Make the bundled folder of the ControlNet from a trained run, and keep the results that its card shows.

    python -m training.emoji_control.bundle --run runs/emoji-edges --licences LICENCES --notes notes.md --out FOLDER

Reads model/, log.jsonl and evaluation/ of --run, and writes to --out a diffusers ControlNetModel folder in float16, the
sheets, the licences of the training pictures and the card. --notes is a Markdown file with the impressions of someone
who looked at the sheets.
"""

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from training.emoji_control.controlnet import MOST_BYTES
from training.emoji_sd.bundling.bundle import ROOT, check_model, copy_licences
from training.emoji_sd.bundling.card import SAMPLERS, parameter_count, percent, quoted, table
from training.emoji_sd.bundling.figures import minutes

NAME = "emoji-edges"
TEMPLATE = Path(__file__).with_name("card.md")
MODEL = ("config.json", "diffusion_pytorch_model.safetensors")
KEPT = {  # path in the run's folder -> name in training/results
    "evaluation/evaluation.json": "evaluation-control.json",
    "log.jsonl": "training-log-control.jsonl",
}
SETS = {
    "train": "edges of training pictures",
    "held_out": "names held out in the requested style, seen in the other three",
    "known_words": "unseen names whose words all occur in training captions",
    "new_words": "unseen names with a word that no training caption has",
}
WAYS = {
    "controlled": "edges and caption",
    "edges_alone": "edges, empty prompt",
    "prompt_alone": "caption alone",
    "decoded": "real picture through the VAE",
}


def agreement_table(sets: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a table with a row per set of pictures and way of drawing."""
    places = [place for place in ("first", "first_5") if place in next(iter(sets.values()))["controlled"]]
    heads = ["pictures", "", "drawn from", "precision", "recall", "F1"]
    lines = [
        [
            SETS[name] if way == "controlled" else "",
            str(figures[way]["pictures"]) if way == "controlled" else "",
            text,
            *(percent(figures[way][key]) for key in ("precision", "recall", "f1", *places)),
        ]
        for name, figures in sets.items()
        for way, text in WAYS.items()
    ]
    return table([*heads, *(place.replace("_", " ") for place in places)], lines)


def scale_table(scales: dict[str, dict[str, float]]) -> str:
    """Return a table with a row per scale of the control."""
    keys = [key for key in ("f1", "first") if key in next(iter(scales.values()))]
    heads = {"f1": "F1", "first": "name first"}
    lines = [[scale, *(percent(figures[key]) for key in keys)] for scale, figures in scales.items()]
    return table(["scale", *(heads[key] for key in keys)], lines)


def card_text(evaluation: dict[str, Any], log: list[dict[str, Any]], folder: Path, notes: str) -> str:
    """Return the card of a bundled folder; `notes` describes what its sheets show."""
    sampling, last = evaluation["sampling"], log[-1]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    splits = ("train", "held_out", "validation")
    return TEMPLATE.read_text(encoding="utf-8").format(
        device=evaluation["device"],
        torch=evaluation["torch"].partition("+")[0],
        sampler=SAMPLERS[sampling["sampler"]],
        steps=sampling["num_inference_steps"],
        guidance=f"{sampling['guidance_scale']:g}",
        first_seed=evaluation["first_seed"],
        agreement_table=agreement_table(evaluation["sets"]),
        scale_table=scale_table(evaluation["scales"]),
        held_out_captions=quoted(evaluation["sheets"]["held_out"]),
        style_names=quoted(evaluation["sheets"]["styles"]),
        other_prompts=quoted(evaluation["sheets"]["other"]),
        parameters=f"{parameter_count(folder):,}",
        mebibytes=f"{sum((folder / name).stat().st_size for name in MODEL) / 2**20:.1f}",
        embedding=", ".join(map(str, config["conditioning_embedding_out_channels"])),
        trained_steps=f"{last['step']:,}",
        trained_minutes=math.ceil(minutes(log)),
        losses=" / ".join(f"{last[f'{name}_loss']:.4f}" for name in splits),
        alone_losses=" / ".join(f"{log[0][f'{name}_loss']:.4f}" for name in splits),
        licences="\n".join(
            f"- [{path.name}](licenses/{path.name})" for path in sorted((folder / "licenses").iterdir())
        ),
        notes=notes,
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder with model/, log.jsonl and evaluation/")
    parser.add_argument("--licences", type=Path, required=True, help="folder of the licences of emoji128.npz")
    parser.add_argument("--notes", type=Path, required=True, help="Markdown file about what the sheets show")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--results", type=Path, default=ROOT / "training" / "results", help="folder for the results")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    for name in MODEL:
        shutil.copyfile(args.run / "model" / name, args.out / name)
    check_model(args.out, MOST_BYTES)
    copy_licences(args.licences, args.out / "licenses")
    evaluation = json.loads((args.run / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    log = [json.loads(line) for line in (args.run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    for name in evaluation["sheets"]:
        with Image.open(args.run / "evaluation" / f"{name}.png") as sheet:
            sheet.save(args.out / f"{name}.png", optimize=True)
    notes = args.notes.read_text(encoding="utf-8").strip()
    (args.out / "README.md").write_text(card_text(evaluation, log, args.out, notes), encoding="utf-8")
    args.results.mkdir(parents=True, exist_ok=True)
    for source, name in KEPT.items():
        shutil.copyfile(args.run / source, args.results / name)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 2**20:.2f} MiB with its card, sheets and licences")


if __name__ == "__main__":
    run(parse_arguments())
