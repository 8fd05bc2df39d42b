"""The model card of emoji-sd (its folder's README.md), with every number read from the run's results or files."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from training.emoji_sd.bundling.figures import Figures, minutes

NAME = "emoji-sd"
TEMPLATE = Path(__file__).with_name("card.md")
SETS = {  # the sets of prompts in evaluate's scores
    "train": "captions of training pictures",
    "held_out": "names held out in the requested style, seen in the other three",
    "known_words": "unseen names whose words all occur in training captions",
    "new_words": "unseen names with a word that no training caption has",
}
SAMPLERS = {"dpm++2m": "DPM-Solver++", "ddim": "DDIM", "euler": "Euler"}


def card_text(figures: Figures, folder: Path, notes: str) -> str:
    """Return the card of a bundled folder; `notes` describes what its sheets show."""
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.format(**_values(figures, folder), notes=notes)


def _values(figures: Figures, folder: Path) -> dict[str, Any]:
    evaluation, vae, unet = figures.evaluation, figures.vae[-1], figures.unet[-1]
    sampling, nearest = evaluation["sampling"], evaluation["nearest"]
    judged, seen = figures.sampling["judged"], evaluation["scores"]["train"]["drawn"]
    counts = {part: parameter_count(folder / part) for part in ("unet", "text_encoder", "vae")}
    config = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    return {
        "device": evaluation["device"],
        "torch": evaluation["torch"].partition("+")[0],
        "sampler": SAMPLERS[sampling["sampler"]],
        "steps": sampling["num_inference_steps"],
        "guidance": f"{sampling['guidance_scale']:g}",
        "sampling_table": sampling_table(figures.sampling["chosen_by"], sampling),
        "tried_prompts": seen["pictures"] // len(range(*evaluation["seeds"])),
        "tried_pictures": figures.sampling["chosen_by"][0]["pictures"],
        "tried_seeds": _seeds(figures.sampling["chosen_by"][0]["seeds"]),
        "best": described(judged),
        "best_first": percent(judged["first"]),
        "best_seeds": _seeds(judged["seeds"]),
        "seeds": _seeds(evaluation["seeds"]),
        "score_table": score_table(evaluation["scores"], evaluation["chance"]),
        "kernel_distance": f"{evaluation['kernel_distance']:.3g}",
        "nearest_median": f"{nearest['drawn']['median']:.1f}",
        "validation_median": f"{nearest['validation_pictures']['median']:.1f}",
        "near_share": percent(nearest["drawn"]["share_nearer_than_limit"]),
        "psnr": f"{vae['psnr']:.1f}",
        "sharpness": percent(vae["sharpness"]),
        "flatness": f"{vae['flatness']:.2f}",
        "white": f"{vae['white']:.2f}",
        "grid_prompts": quoted(figures.prompts["grid"]),
        "new_prompts": quoted(figures.prompts["new"]),
        "unet_parameters": f"{counts['unet']:,}",
        "text_parameters": f"{counts['text_encoder']:,}",
        "vae_parameters": f"{counts['vae']:,}",
        "mebibytes": f"{model_bytes(folder) / 2**20:.1f}",
        "channels": ", ".join(map(str, config["block_out_channels"])),
        "latents": f"{config['sample_size']}x{config['sample_size']}x{config['in_channels']}",
        "unet_steps": f"{unet['step']:,}",
        "unet_minutes": math.ceil(minutes(figures.unet)),
        "vae_steps": f"{vae['step']:,}",
        "vae_minutes": math.ceil(minutes(figures.vae)),
        "losses": " / ".join(f"{unet[f'{name}_loss']:.4f}" for name in ("train", "held_out", "validation")),
    }


def sampling_table(rows: Iterable[dict[str, Any]], chosen: dict[str, Any]) -> str:
    """Return the share of first places, a row per sampler and steps, a column per guidance, the chosen one bold."""
    scores = {
        (row["sampler"], row["num_inference_steps"], row["guidance_scale"]): percent(row["first"]) for row in rows
    }
    guidance = sorted({scale for *_, scale in scores})
    place = (chosen["sampler"], chosen["num_inference_steps"], chosen["guidance_scale"])
    if place in scores:
        scores[place] = f"**{scores[place]}**"
    ways = dict.fromkeys((sampler, steps) for sampler, steps, _ in scores)
    lines = [
        [f"{SAMPLERS[sampler]}, {steps} steps", *(scores[sampler, steps, scale] for scale in guidance)]
        for sampler, steps in ways
    ]
    return table(["guidance", *(f"{scale:g}" for scale in guidance)], lines)


def score_table(scores: dict[str, dict[str, dict[str, float]]], chance: dict[str, float]) -> str:
    """Return a table with a row per set of prompts: scores of the drawn pictures and of the real ones."""
    lines = [
        [
            text,
            str(scores[name]["drawn"]["pictures"]),
            *(percent(scores[name][whose][place]) for place in ("first", "first_5") for whose in ("drawn", "real")),
        ]
        for name, text in SETS.items()
    ]
    lines.append(["chance", "", *(percent(chance[place]) for place in ("first", "first_5") for _ in range(2))])
    heads = ["prompts", "pictures", "first: drawn", "real", "first 5: drawn", "real"]
    return table(heads, lines)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def described(row: dict[str, Any]) -> str:
    """Return a setting in words: "DPM-Solver++ with 20 steps at guidance 3"."""
    steps, scale = row["num_inference_steps"], row["guidance_scale"]
    return f"{SAMPLERS[row['sampler']]} with {steps} steps at guidance {scale:g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def quoted(prompts: Iterable[str]) -> str:
    return ", ".join(f'"{prompt}"' for prompt in prompts)


def _seeds(ends: Sequence[int]) -> str:
    return f"{ends[0]} to {ends[1] - 1}"


def parameter_count(folder: Path) -> int:
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def model_bytes(folder: Path) -> int:
    """Return the size in bytes of the parts' folders, which diffusers loads."""
    parts = ("scheduler", "text_encoder", "tokenizer", "unet", "vae")
    return sum(path.stat().st_size for part in parts for path in (folder / part).iterdir())
