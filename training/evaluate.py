"""Compare emoji64 models: classifier score per label, losses, distance to the training pictures.

    python -m training.evaluate --data emoji64.npz --classifier classifier.pt --out results \
        --model prototype=PROTOTYPE_FOLDER --model emoji64=fastdiff/bundled/emoji64

Every model draws the same number of pictures of every old label "<style> <group>", with the same seeds, noise and
sampler, and with the defaults of its fastdiff.json. A model with finer labels draws each in proportion to the training
pictures. Writes to the folder --out: evaluation.json, the samples, a grid per model, and a sheet of ten samples next to
their nearest training pictures.
"""

import argparse
import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from diffusers import ModelMixin
from torch import Tensor

from training.classifier import Classifier, accuracy, judge, load_classifier
from training.data import Augmenter, Pictures, load
from training.diffusion import Diffusion, mean_loss
from training.labels import SHORT_GROUPS, coarse_names
from training.model import load_model
from training.neighbours import nearest
from training.sampling import sample, save_grid

GOLDEN_RATIO = (5**0.5 - 1) / 2
STYLES = ("fluent_3d", "fluent_flat", "noto", "twemoji")
COARSE = coarse_names(STYLES)
# Each Fluent style has 8 flags, too few to learn a label from, so emoji64 has no label for them.
COMPARED = tuple(name for name in COARSE if not (name.startswith("fluent") and name.endswith("flags")))


@dataclass(frozen=True)
class LabelledModel:
    """A model, and the indices of its labels for each old label."""

    model: ModelMixin
    names: tuple[str, ...]
    members: dict[str, tuple[int, ...]]
    null_label: int
    defaults: dict[str, float]  # its best sampling settings

    def picture_labels(self, pictures: Pictures) -> Tensor:
        """Return the label of each picture in this model's training."""
        is_coarse = self.null_label == len(COARSE)
        return pictures.coarse if is_coarse else pictures.labels

    def label_of(self, name: str, seed: int, picture_counts: list[int]) -> int:
        """Return the finer label that a seed draws for an old label, in proportion to the training pictures."""
        members = self.members[name]
        counts = [picture_counts[label] for label in members]
        position = (seed + 0.5) * GOLDEN_RATIO % 1 * sum(counts)
        return next(label for label, end in zip(members, accumulate(counts), strict=True) if position < end)


def load_labelled(folder: Path, device: str) -> LabelledModel:
    """Load a model folder with a fastdiff.json. Without label_groups its labels are the 36 old ones."""
    info = json.loads((folder / "fastdiff.json").read_text(encoding="utf-8"))
    index = {name: i for i, name in enumerate(info["labels"])}
    groups = info.get("label_groups", {name: [name] for name in index})
    members = {old: tuple(index[name] for name in names) for old, names in groups.items()}
    defaults = {key: info[key] for key in ("guidance_scale", "num_inference_steps", "use_clipped_model_output")}
    return LabelledModel(load_model(folder, device), tuple(info["labels"]), members, info["null_label"], defaults)


def drawn_labels(model: LabelledModel, per_label: int, train: Pictures) -> list[int]:
    """Return the model's label for each picture to draw: all seeds of each compared label in turn."""
    counts = model.picture_labels(train).bincount(minlength=model.null_label).tolist()
    return [model.label_of(name, seed, counts) for name in COMPARED for seed in range(per_label)]


def draw(model: LabelledModel, labels: list[int], per_label: int, **options) -> Tensor:
    """Draw seeds 0 to per_label - 1 of every compared label: (34 * per_label, 3, 64, 64) uint8 on the device."""
    seeds = list(range(per_label)) * len(COMPARED)
    images = sample(model.model, labels, seeds, null_label=model.null_label, **options)
    return images.permute(0, 3, 1, 2).to(model.model.device)


def label_scores(probabilities: Tensor, per_label: int) -> dict[str, dict[str, float]]:
    """Score probabilities (34 * per_label, 36) per label.

    The scores are the label's mean probability over all and over 16 pictures, the standard error over all, and the
    share judged right.
    """
    scores = {}
    for name, part in zip(COMPARED, probabilities.split(per_label), strict=True):
        target = COARSE.index(name)
        p = part[:, target]
        scores[name] = {
            "probability": p.mean().item(),
            "probability_of_16": p[:16].mean().item(),
            "standard_error": (p.std() / per_label**0.5).item(),
            "right": (part.argmax(dim=1) == target).float().mean().item(),
        }
    return scores


def subgroup_scores(model: LabelledModel, labels: list[int], probabilities: Tensor) -> dict[str, float]:
    """Return the old label's mean probability for each of the model's subgroups, over the styles."""
    targets = [COARSE.index(name) for name in COMPARED for _ in range(len(labels) // len(COMPARED))]
    found: dict[str, list[float]] = {}
    for label, target, row in zip(labels, targets, probabilities.tolist(), strict=True):
        found.setdefault(model.names[label].split(" ", 1)[1], []).append(row[target])
    return {subgroup: sum(values) / len(values) for subgroup, values in found.items()}


def kernel_distance(features: Tensor, real: Tensor) -> float:
    """Return the unbiased squared maximum mean discrepancy with kernel (x.y / d + 1)^3 (Binkowski et al. 2018)."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double().T / a.shape[1] + 1) ** 3

    def mean_off_diagonal(k: Tensor) -> Tensor:
        return (k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1))

    xx, yy = kernel(features, features), kernel(real, real)
    return (mean_off_diagonal(xx) + mean_off_diagonal(yy) - 2 * kernel(features, real).mean()).item()


def label_distances(features: Tensor, real: Tensor, real_coarse: Tensor, per_label: int) -> dict[str, float]:
    """Return the kernel distance of each label's samples to all training pictures of that label."""
    parts = zip(COMPARED, features.split(per_label), strict=True)
    return {name: kernel_distance(part, real[real_coarse == COARSE.index(name)]) for name, part in parts}


def real_sample(pictures: Pictures, per_label: int) -> Tensor:
    """Return the indices of the first per_label training pictures (or all, if fewer) of every compared label."""
    rows = [(pictures.coarse == COARSE.index(name)).nonzero().flatten()[:per_label] for name in COMPARED]
    return torch.cat(rows)


def distance_statistics(distance: Tensor, limit: float) -> dict[str, float]:
    """Return quantiles of nearest distances, and the share nearer than `limit`."""
    quantiles = torch.tensor([0.01, 0.1, 0.5, 0.9], device=distance.device)
    values = distance.quantile(quantiles).tolist()
    names = ("quantile_0.01", "quantile_0.10", "median", "quantile_0.90")
    return dict(zip(names, values, strict=True)) | {"share_nearer_than_limit": (distance < limit).float().mean().item()}


def group_medians(distance: Tensor, per_label: int) -> dict[str, float]:
    """Return the median nearest distance of each group's samples, over the styles."""
    rows: dict[str, list[Tensor]] = {group: [] for group in SHORT_GROUPS.values()}
    for name, part in zip(COMPARED, distance.split(per_label), strict=True):
        rows[name.rpartition(" ")[2]].append(part)
    return {group: torch.cat(parts).median().item() for group, parts in rows.items()}


@dataclass(frozen=True)
class Yardstick:
    """The references of all measurements: the pictures, the classifier and the distances of held-out pictures."""

    train: Pictures
    validation: Pictures
    classifier: Classifier
    diffusion: Diffusion
    augmenter: Augmenter
    held_out: Tensor  # nearest distance of each validation picture to the training pictures

    @property
    def near(self) -> float:
        """The distance below which only one held-out picture in a hundred is to a training picture."""
        return self.held_out.quantile(0.01).item()

    def describe(self) -> dict:
        return {
            "classifier_accuracy": {
                "validation": accuracy(self.classifier, self.validation),
                "training": accuracy(self.classifier, self.train),
            },
            "near": self.near,
            "validation_pictures_nearest": distance_statistics(self.held_out, self.near),
        }


def make_yardstick(data: Path, classifier: Path, device: str) -> Yardstick:
    train, validation, _ = load(data, device)
    augmenter = Augmenter(train.images)
    held_out = nearest(validation.images, augmenter).distance
    return Yardstick(train, validation, load_classifier(classifier, device), Diffusion(device), augmenter, held_out)


def measure(yardstick: Yardstick, model: LabelledModel, per_label: int, options: dict, save_as: Path) -> dict:
    """Draw a model's samples, measure them, and write the pictures to files with names that start with `save_as`."""
    train = yardstick.train
    labels = drawn_labels(model, per_label, train)
    images = draw(model, labels, per_label, **options)
    probabilities, features = judge(yardstick.classifier, images)
    _, real_features = judge(yardstick.classifier, train.images)
    neighbours = nearest(images, yardstick.augmenter)
    scores = label_scores(probabilities, per_label)
    write_pictures(save_as, images, train.images[neighbours.index], per_label)
    return {
        "sampling": options | {"scheduler": "ddim", "eta": 0.0, "per_label": per_label},
        "mean_probability": mean(score["probability"] for score in scores.values()),
        "mean_right": mean(score["right"] for score in scores.values()),
        "kernel_distance": kernel_distance(features, real_features[real_sample(train, per_label)]),
        "loss": losses(yardstick, model),
        "nearest": distance_statistics(neighbours.distance, yardstick.near),
        "nearest_median_by_group": group_medians(neighbours.distance, per_label),
        "labels": scores,
        "label_kernel_distances": label_distances(features, real_features, train.coarse, per_label),
        "subgroups": subgroup_scores(model, labels, probabilities),
    }


def losses(yardstick: Yardstick, model: LabelledModel) -> dict[str, float]:
    """Return the v-loss on the validation pictures and on as many training pictures."""
    train, validation = yardstick.train, yardstick.validation
    some = torch.linspace(0, len(train) - 1, len(validation), device=train.labels.device).long()
    given, seen = model.picture_labels(validation), model.picture_labels(train)[some]
    return {
        "validation": mean_loss(model.model, yardstick.diffusion, validation.images, given),
        "training": mean_loss(model.model, yardstick.diffusion, train.images[some], seen),
    }


def write_pictures(save_as: Path, images: Tensor, nearest_images: Tensor, per_label: int) -> None:
    """Write NAME-samples.npz (all), NAME-grid.png (eight seeds per label) and NAME-nearest.png.

    The last shows ten samples with evenly spaced labels, each next to its nearest training picture.
    """
    np.savez_compressed(f"{save_as}-samples.npz", images=images.permute(0, 2, 3, 1).cpu().numpy())
    chosen = [row * per_label + seed for row in range(len(COMPARED)) for seed in range(min(8, per_label))]
    save_grid(images[chosen].permute(0, 2, 3, 1).cpu(), 4 * min(8, per_label), f"{save_as}-grid.png")
    ten = [int(row) * per_label for row in torch.linspace(0, len(COMPARED) - 1, 10)]
    pairs = torch.stack([images[ten], nearest_images[ten]], dim=1).flatten(0, 1)
    save_grid(pairs.permute(0, 2, 3, 1).cpu(), 4, f"{save_as}-nearest.png")


def print_table(results: dict) -> None:
    names = list(results["models"])
    print(f"{'label':24s}" + "".join(f"{name:>22s}" for name in names))
    for label in COMPARED:
        rows = [results["models"][name]["labels"][label] for name in names]
        print(f"{label:24s}" + "".join(f"{r['probability']:15.3f} ±{r['standard_error']:.3f}" for r in rows))
    for key in ("mean_probability", "mean_right", "kernel_distance"):
        print(f"{key:24s}" + "".join(f"{results['models'][name][key]:22.3f}" for name in names))


def model_argument(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    return name, Path(folder)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji64.npz")
    parser.add_argument("--classifier", type=Path, required=True, help="weights from training.classifier")
    parser.add_argument("--model", type=model_argument, action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--per-label", type=int, default=64)
    parser.add_argument("--guidance", type=float, help="one guidance for all models (default: each model's own)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    yardstick = make_yardstick(args.data, args.classifier, args.device)
    results = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU", "torch": torch.__version__}
    results |= yardstick.describe() | {"models": {}}
    for name, folder in args.model:
        model = load_labelled(folder, args.device)
        options = model.defaults | ({} if args.guidance is None else {"guidance_scale": args.guidance})
        results["models"][name] = measure(yardstick, model, args.per_label, options, args.out / name)
    (args.out / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_table(results)


if __name__ == "__main__":
    main()
