"""Make the bundled folder from a trained run, and keep the results that its card shows.

    python -m training.emoji_sd.bundling.bundle --run runs/emoji-sd --vae f4c4 --licences LICENCES --notes notes.md

Reads the files that the scripts of training/emoji_sd wrote to --run, and writes fastdiff/bundled/emoji-sd: the model in
float16, fastdiff.json with the evaluated sampling settings, the licences of the training pictures, the sheets, and the
card. --notes is a Markdown file with the impressions of someone who looked at the sheets.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

from training.emoji_sd.bundling.card import NAME, card_text
from training.emoji_sd.bundling.figures import KEPT, Figures
from training.emoji_sd.evaluation.drawing import SAMPLERS
from training.emoji_sd.folder import MOST_BYTES, SCHEDULER, mend_configs

ROOT = Path(__file__).parents[3]
SHEETS = ("grid", "new", "unpicked", "nearest")
# `fastdiff models emoji-sd` lists these prompts; `fastdiff sample` draws the first four, the page the first.
PROMPTS = (
    "cat face, glossy 3D emoji",
    "red apple, Noto emoji",
    "rocket, flat emoji",
    "sunflower, Twemoji",
    "ghost",
    "octopus",
    "pizza",
    "woman astronaut",
)


def copy_model(trained: Path, folder: Path, sampler: str) -> None:
    """Copy a folder that train_unet wrote, and make the sampler's scheduler (a name in SAMPLERS) the folder's own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained, folder)
    mend_configs(folder)  # an older run may need it
    scheduler = SAMPLERS[sampler](**SCHEDULER, **({"clip_sample": False} if sampler == "ddim" else {}))
    scheduler.save_pretrained(folder / "scheduler")
    path = folder / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, index | {"scheduler": ["diffusers", type(scheduler).__name__]})


def check_model(folder: Path, most_bytes: int) -> None:
    """Raise ValueError if a folder is too large, names a folder of its machine, or has weights that are not finite."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > most_bytes:
        raise ValueError(
            f"{folder} has {size / 2**20:.2f} MiB, more than {most_bytes / 2**20:g}; train a smaller model"
        )
    for path in folder.rglob("*.json"):
        if "_name_or_path" in path.read_text(encoding="utf-8"):
            raise ValueError(
                f"{path} names a folder of the machine that trained it; save the model with training.emoji_sd.folder"
            )
    for path in folder.rglob("*.safetensors"):
        wrong = [name for name, p in load_file(path).items() if p.dtype != torch.float16 or not p.isfinite().all()]
        if wrong:
            raise ValueError(f"{path}: {wrong[0]} is not finite in float16; train it again")


def write_info(folder: Path, sampling: dict) -> None:
    """Write fastdiff.json: the example prompts and the evaluated sampling settings."""
    info = {
        "prompts": PROMPTS,
        "guidance_scale": sampling["guidance_scale"],
        "num_inference_steps": sampling["num_inference_steps"],
        "scheduler": sampling["sampler"],
    }
    write_json(folder / "fastdiff.json", info)


def copy_licences(licences: Path, folder: Path) -> None:
    folder.mkdir()
    for path in licences.iterdir():
        shutil.copyfile(path, folder / path.name)


def copy_sheets(evaluation: Path, folder: Path) -> None:
    """Copy the sheets of `evaluate`, losslessly recompressed."""
    for name in SHEETS:
        with Image.open(evaluation / f"{name}.png") as sheet:
            sheet.save(folder / f"{name}.png", optimize=True)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder with f4c4/, judge/, unet/, evaluation/ etc.")
    parser.add_argument("--vae", default="f4c4", help="name of the VAE's folder in --run")
    parser.add_argument("--licences", type=Path, required=True, help="folder of the licences of emoji128.npz")
    parser.add_argument("--notes", type=Path, required=True, help="Markdown file about what the sheets show")
    parser.add_argument("--out", type=Path, default=ROOT / "fastdiff" / "bundled" / NAME)
    parser.add_argument("--results", type=Path, default=ROOT / "training" / "results", help="folder for the results")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    figures = Figures.read(args.run, args.vae)
    copy_model(args.run / "unet" / "model", args.out, figures.evaluation["sampling"]["sampler"])
    check_model(args.out, MOST_BYTES)
    write_info(args.out, figures.evaluation["sampling"])
    copy_licences(args.licences, args.out / "licenses")
    copy_sheets(args.run / "evaluation", args.out)
    notes = args.notes.read_text(encoding="utf-8").strip()
    (args.out / "README.md").write_text(card_text(figures, args.out, notes), encoding="utf-8")
    args.results.mkdir(parents=True, exist_ok=True)
    for source, name in KEPT.items():
        shutil.copy(args.run / source.format(vae=args.vae), args.results / name)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {size / 2**20:.2f} MiB with its card, sheets and licences")


if __name__ == "__main__":
    run(parse_arguments())
