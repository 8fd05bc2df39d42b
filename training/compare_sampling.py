"""Compare sampling defaults by the classifier's score: guidance, clipped output, steps (DDIM, eta 0).

python -m training.compare_sampling --data emoji64.npz --classifier classifier.pt --model MODEL_FOLDER --out FILE.json
"""

import argparse
import itertools
import json
from pathlib import Path

import torch

from training.classifier import judge, load_classifier
from training.data import load
from training.evaluate import draw, drawn_labels, kernel_distance, label_scores, load_model, real_sample

GUIDANCE = (1.5, 2.0, 3.0, 4.0, 5.0)
STEPS = (20, 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji64.npz")
    parser.add_argument("--classifier", type=Path, required=True, help="weights made by training.classifier")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--per-label", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    train, _, _ = load(args.data, args.device)
    classifier, model = load_classifier(args.classifier, args.device), load_model(args.model, args.device)
    _, real_features = judge(classifier, train.images[real_sample(train, args.per_label)])
    rows = []
    labels = drawn_labels(model, args.per_label, train)
    for guidance, steps, clipped in itertools.product(GUIDANCE, STEPS, (False, True)):
        options = {"guidance_scale": guidance, "num_inference_steps": steps, "use_clipped_model_output": clipped}
        images = draw(model, labels, args.per_label, **options)
        probabilities, features = judge(classifier, images)
        scores = label_scores(probabilities, args.per_label).values()
        row = options | {
            "mean_probability": sum(score["probability"] for score in scores) / len(scores),
            "kernel_distance": kernel_distance(features, real_features),
            "corner": images[:, :, ::63, ::63].float().mean(dim=(1, 2, 3)).median().item(),  # 255 is clean white
        }
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    args.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
