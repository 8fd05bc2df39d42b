"""Compare sampling defaults by the classifier's score: guidance, clipped output, steps (DDIM, eta 0).

    python -m training.compare_sampling --data emoji64.npz --classifier classifier.pt --model FOLDER --out FILE.json

Draws every label "<style> <group>" with seeds 0 to --per-label - 1, which use its finer labels in turn.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from training.classifier import judge, load_classifier
from training.data import load
from training.evaluate import COMPARED, draw, kernel_distance, label_scores, load_labelled, real_sample

GUIDANCE = (1.5, 2.0, 3.0, 4.0, 5.0)
STEPS = (20, 50)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji64.npz")
    parser.add_argument("--classifier", type=Path, required=True, help="weights from training.classifier")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--per-label", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def corner(images: Tensor) -> float:
    """Return the median over (N, 3, 64, 64) pictures of the mean of their corners; 255 is a clean white background."""
    return images[:, :, ::63, ::63].float().mean(dim=(1, 2, 3)).median().item()


def main() -> None:
    args = parse_arguments()
    torch.set_float32_matmul_precision("high")
    train, _, _ = load(args.data, args.device)
    classifier, model = load_classifier(args.classifier, args.device), load_labelled(args.model, args.device)
    _, real_features = judge(classifier, train.images[real_sample(train, args.per_label)])
    finer = [model.members[name] for name in COMPARED]
    labels = [members[seed % len(members)] for members in finer for seed in range(args.per_label)]
    rows = []
    for guidance, steps, clipped in itertools.product(GUIDANCE, STEPS, (False, True)):
        options = {"guidance_scale": guidance, "num_inference_steps": steps, "use_clipped_model_output": clipped}
        images = draw(model, labels, args.per_label, **options)
        probabilities, features = judge(classifier, images)
        row = options | {
            "mean_probability": mean(s["probability"] for s in label_scores(probabilities, args.per_label).values()),
            "kernel_distance": kernel_distance(features, real_features),
            "corner": corner(images),
        }
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    args.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
