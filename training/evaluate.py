"""Measure emoji64 models side by side: classifier score per label, losses, distance to the training pictures.

    python -m training.evaluate --data emoji64.npz --classifier classifier.pt --out results \
        --model prototype=PROTOTYPE_FOLDER --model emoji64=fastdiff/bundled/emoji64

Every model draws the same number of pictures of every old label "<style> <group>", with the same seeds, noise and
sampler; a model with finer labels takes them in turn. The folder --out gets evaluation.json, a grid of each model and
a sheet of ten samples beside their nearest training pictures.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import UNet2DModel
from torch import Tensor

from training.classifier import accuracy, judge, load_classifier
from training.data import Augmenter, Pictures, load
from training.diffusion import Diffusion, mean_loss
from training.labels import SHORT_GROUPS, coarse_names
from training.neighbours import nearest
from training.sampling import sample, save_grid

STYLES = ("fluent_3d", "fluent_flat", "noto", "twemoji")
COARSE = coarse_names(STYLES)
# Fluent has 8 flags in each style: too few to learn a label from, so emoji64 has none for them.
COMPARED = tuple(name for name in COARSE if not (name.startswith("fluent") and name.endswith("flags")))


@dataclass(frozen=True)
class LabelledModel:
    """A UNet and the indices of the labels that stand for each old label."""

    unet: UNet2DModel
    names: tuple[str, ...]
    members: dict[str, tuple[int, ...]]
    null_label: int

    def picture_labels(self, pictures: Pictures) -> Tensor:
        """The label this model was trained to give each picture."""
        is_coarse = self.null_label == len(COARSE)
        return pictures.coarse if is_coarse else pictures.labels


def load_model(folder: Path, device: str) -> LabelledModel:
    """A model folder with a fastdiff.json; without label_groups its labels are the 36 old ones."""
    unet = UNet2DModel.from_pretrained(folder, subfolder="unet", torch_dtype=torch.float32).to(device).eval()
    info = json.loads((folder / "fastdiff.json").read_text(encoding="utf-8"))
    index = {name: i for i, name in enumerate(info["labels"])}
    groups = info.get("label_groups", {name: [name] for name in index})
    members = {old: tuple(index[name] for name in names) for old, names in groups.items()}
    return LabelledModel(unet, tuple(info["labels"]), members, info["null_label"])


def drawn_labels(model: LabelledModel, per_label: int) -> list[int]:
    """The model's label of each picture drawn: seed after seed of every compared label."""
    return [model.members[name][seed % len(model.members[name])] for name in COMPARED for seed in range(per_label)]


def draw(model: LabelledModel, per_label: int, **options) -> Tensor:
    """Seeds 0 to per_label - 1 of every compared label, in order: (34 * per_label, 3, 64, 64) uint8 on the device."""
    seeds = list(range(per_label)) * len(COMPARED)
    images = sample(model.unet, drawn_labels(model, per_label), seeds, null_label=model.null_label, **options)
    return images.permute(0, 3, 1, 2).to(model.unet.device)


def label_scores(probabilities: Tensor, per_label: int) -> dict[str, dict[str, float]]:
    """(34 * per_label, 36) -> per label: mean probability of the label, its standard error, share judged right."""
    scores = {}
    for name, part in zip(COMPARED, probabilities.split(per_label), strict=True):
        target = COARSE.index(name)
        p = part[:, target]
        scores[name] = {
            "probability": p.mean().item(),
            "standard_error": (p.std() / per_label**0.5).item(),
            "right": (part.argmax(dim=1) == target).float().mean().item(),
        }
    return scores


def subgroup_scores(model: LabelledModel, probabilities: Tensor, per_label: int) -> dict[str, float]:
    """Mean probability of the old label for each of the model's own labels, over the styles."""
    targets = [COARSE.index(name) for name in COMPARED for _ in range(per_label)]
    found: dict[str, list[float]] = {}
    for label, target, row in zip(drawn_labels(model, per_label), targets, probabilities.tolist(), strict=True):
        found.setdefault(model.names[label].split(" ", 1)[1], []).append(row[target])
    return {subgroup: sum(values) / len(values) for subgroup, values in found.items()}


def kernel_distance(features: Tensor, real: Tensor) -> float:
    """1000 x the unbiased squared maximum mean discrepancy, kernel (x.y / d + 1)^3 (Binkowski et al. 2018)."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double().T / a.shape[1] + 1) ** 3

    def mean_off_diagonal(k: Tensor) -> Tensor:
        return (k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1))

    xx, yy = kernel(features, features), kernel(real, real)
    return 1000 * (mean_off_diagonal(xx) + mean_off_diagonal(yy) - 2 * kernel(features, real).mean()).item()


def real_sample(pictures: Pictures, per_label: int) -> Tensor:
    """Indices of the first per_label training pictures of every compared label (fewer where there are fewer)."""
    rows = [(pictures.coarse == COARSE.index(name)).nonzero().flatten()[:per_label] for name in COMPARED]
    return torch.cat(rows)


def distance_statistics(distance: Tensor, limit: float) -> dict[str, float]:
    """Quantiles of nearest distances, and the share nearer than `limit`."""
    quantiles = torch.tensor([0.01, 0.1, 0.5, 0.9], device=distance.device)
    values = distance.quantile(quantiles).tolist()
    names = ("quantile_0.01", "quantile_0.10", "median", "quantile_0.90")
    return dict(zip(names, values, strict=True)) | {"share_nearer_than_limit": (distance < limit).float().mean().item()}


def group_medians(distance: Tensor, per_label: int) -> dict[str, float]:
    """Median nearest distance of each group's samples, over the styles."""
    rows: dict[str, list[Tensor]] = {group: [] for group in SHORT_GROUPS.values()}
    for name, part in zip(COMPARED, distance.split(per_label), strict=True):
        rows[name.rpartition(" ")[2]].append(part)
    return {group: torch.cat(parts).median().item() for group, parts in rows.items()}


def evaluate(args: argparse.Namespace) -> dict:
    """All measurements of all models, and the pictures that go with them."""
    train, validation, _ = load(args.data, args.device)
    classifier = load_classifier(args.classifier, args.device)
    diffusion, augmenter = Diffusion(args.device), Augmenter(train.images)
    real = train.images[real_sample(train, args.per_label)]
    _, real_features = judge(classifier, real)
    held_out = nearest(validation.images, augmenter).distance
    limit = held_out.quantile(0.01).item()
    some = torch.linspace(0, len(train) - 1, len(validation), device=train.labels.device).long()
    options = {
        "guidance_scale": args.guidance,
        "num_inference_steps": args.steps,
        "use_clipped_model_output": args.clipped,
    }
    results = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "sampling": options | {"scheduler": "ddim", "eta": 0.0, "per_label": args.per_label},
        "classifier_accuracy": {
            "validation": accuracy(classifier, validation),
            "training": accuracy(classifier, train),
        },
        "near_limit": limit,
        "validation_pictures": distance_statistics(held_out, limit),
        "models": {},
    }
    for name, folder in args.model:
        model = load_model(folder, args.device)
        images = draw(model, args.per_label, **options)
        probabilities, features = judge(classifier, images)
        neighbours = nearest(images, augmenter)
        scores = label_scores(probabilities, args.per_label)
        losses = {
            "validation": mean_loss(model.unet, diffusion, validation.images, model.picture_labels(validation)),
            "training": mean_loss(model.unet, diffusion, train.images[some], model.picture_labels(train)[some]),
        }
        results["models"][name] = {
            "mean_probability": sum(s["probability"] for s in scores.values()) / len(scores),
            "mean_right": sum(s["right"] for s in scores.values()) / len(scores),
            "kernel_distance_x1000": kernel_distance(features, real_features),
            "loss": losses,
            "nearest": distance_statistics(neighbours.distance, limit),
            "nearest_median_by_group": group_medians(neighbours.distance, args.per_label),
            "labels": scores,
            "subgroups": subgroup_scores(model, probabilities, args.per_label),
        }
        write_pictures(args.out, name, images, train.images[neighbours.index], args.per_label)
    return results


def write_pictures(out: Path, name: str, images: Tensor, nearest_images: Tensor, per_label: int) -> None:
    """grid-NAME.png: eight seeds of every label; nearest-NAME.png: ten samples, labels evenly spread, each beside its
    nearest training picture."""
    chosen = [row * per_label + seed for row in range(len(COMPARED)) for seed in range(min(8, per_label))]
    save_grid(images[chosen].permute(0, 2, 3, 1).cpu(), 4 * min(8, per_label), out / f"grid-{name}.png")
    ten = [int(row) * per_label for row in torch.linspace(0, len(COMPARED) - 1, 10)]
    pairs = torch.stack([images[ten], nearest_images[ten]], dim=1).flatten(0, 1)
    save_grid(pairs.permute(0, 2, 3, 1).cpu(), 4, out / f"nearest-{name}.png")


def print_table(results: dict) -> None:
    names = list(results["models"])
    print(f"{'label':24s}" + "".join(f"{name:>22s}" for name in names))
    for label in COMPARED:
        rows = [results["models"][name]["labels"][label] for name in names]
        print(f"{label:24s}" + "".join(f"{r['probability']:15.3f} ±{r['standard_error']:.3f}" for r in rows))
    for key in ("mean_probability", "mean_right", "kernel_distance_x1000"):
        print(f"{key:24s}" + "".join(f"{results['models'][name][key]:22.3f}" for name in names))


def model_argument(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    return name, Path(folder)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji64.npz")
    parser.add_argument("--classifier", type=Path, required=True, help="weights made by training.classifier")
    parser.add_argument("--model", type=model_argument, action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--per-label", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--clipped", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    results = evaluate(args)
    (args.out / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_table(results)


if __name__ == "__main__":
    main()
