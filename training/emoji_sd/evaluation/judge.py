"""The judge of emoji-sd: it embeds pictures and captions in one space, so that it can name a drawn picture.

    python -m training.emoji_sd.evaluation.judge --data emoji128.npz --tokenizer runs/emoji-sd/tokenizer \
        --out runs/emoji-sd/judge

It is trained contrastively on the training pictures only (Radford et al. 2021, CLIP, figure 3; pictures of the same
name match each other's captions). The other splits test how often the right name is first, or among the first 5, of 500
names without skin tones. A run ends after --steps or --minutes; another run resumes from judge.pt.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastdiff.text.tokenizer import CLIPTokenizer
from training.classifier import Block
from training.data import to_model_range
from training.diffusion import picture_distribution, stratified_draw
from training.emoji_sd.captions import caption_table, folded
from training.emoji_sd.data import Pictures, Splits, load, plain_names
from training.emoji_sd.latents import spread
from training.emoji_sd.tokenizer import token_ids
from training.train_emoji64 import rate_factor

WIDTHS = (32, 64, 128, 256, 384)  # each level halves the side: 64, 32, 16, 8, 4
TEXT_WIDTH, TEXT_LAYERS, TEXT_HEADS = 192, 3, 6
EMBEDDING = 256
CANDIDATES = 500
CAPTIONS = 16  # per picture
JUDGED = 512  # pictures per batch
REPORTED = 1000  # at most, pictures of a split in a report


class Judge(nn.Module):
    """A residual network for pictures, a transformer for captions, and the scale of their similarities."""

    def __init__(self, vocabulary: int, length: int, end: int):
        super().__init__()
        levels, channels = [], 3
        for width in WIDTHS:
            levels += [Block(channels, width, 2), Block(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*levels)
        self.image_head = nn.Sequential(nn.Dropout(0.2), nn.Linear(channels, EMBEDDING))
        self.words = nn.Embedding(vocabulary, TEXT_WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(length, TEXT_WIDTH))
        layer = nn.TransformerEncoderLayer(
            TEXT_WIDTH, TEXT_HEADS, 4 * TEXT_WIDTH, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.text = nn.TransformerEncoder(layer, TEXT_LAYERS, enable_nested_tensor=False)
        self.text_head = nn.Sequential(nn.LayerNorm(TEXT_WIDTH), nn.Linear(TEXT_WIDTH, EMBEDDING))
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())
        self.end = end
        nn.init.normal_(self.words.weight, std=0.02)

    def features(self, images: Tensor) -> Tensor:
        """Map (N, 3, 128, 128) uint8 to (N, 384) float32: the mean over positions before the head."""
        x = to_model_range(images)
        if x.is_cuda:  # faster on a GPU; bfloat16 convolutions on the CPU fail with few channels
            x = x.contiguous(memory_format=torch.channels_last)
        return self.blocks(x).mean(dim=(2, 3))

    def embed_images(self, images: Tensor) -> Tensor:
        """Map (N, 3, 128, 128) uint8 to (N, 256) vectors of length 1."""
        return F.normalize(self.image_head(self.features(images)).float(), dim=1)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """Map (N, L) int64 to (N, 256) vectors of length 1, from the mean over the tokens up to the first end."""
        is_end = tokens == self.end
        after = is_end.cumsum(1) - is_end.long() > 0  # (N, L): padding
        hidden = self.text(self.words(tokens) + self.positions, src_key_padding_mask=after)
        kept = (~after)[..., None]
        return F.normalize(self.text_head((hidden * kept).sum(1) / kept.sum(1)).float(), dim=1)


def contrastive_loss(images: Tensor, texts: Tensor, names: Tensor, log_scale: Tensor) -> Tensor:
    """Return the mean cross entropy of both directions; images and texts (N, D) of length 1, names (N,) integers."""
    logits = log_scale.exp().clamp(max=100) * images @ texts.T
    right = (names[:, None] == names).float()
    right = right / right.sum(1, keepdim=True)
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def varied(images: Tensor) -> Tensor:
    """Augment (N, 3, S, S) uint8: rotate by up to 12 degrees, scale, shift and tint all, and blur a quarter."""
    count, device = len(images), images.device
    angle, scale = uniform(count, -0.2, 0.2, device), uniform(count, 0.9, 1.3, device)
    move = torch.stack([uniform(count, -0.15, 0.15, device) for _ in range(2)], dim=1)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = torch.stack(
        [torch.stack([cos, -sin, move[:, 0]], 1), torch.stack([sin, cos, move[:, 1]], 1)], 1
    )  # (N, 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    ink = F.grid_sample(255 - images.float(), grid, align_corners=False)  # white outside
    blurred = F.interpolate(F.avg_pool2d(ink, 2), scale_factor=2, mode="bilinear")
    ink = torch.where(uniform(count, 0, 1, device)[:, None, None, None] < 0.25, blurred, ink)
    tint = 1 + 0.15 * (2 * torch.rand(count, 3, 1, 1, device=device) - 1)
    return (255 - ink * tint).round().clamp(0, 255).byte()


def uniform(count: int, low: float, high: float, device: torch.device) -> Tensor:
    return low + (high - low) * torch.rand(count, device=device)


def candidate_names(splits: Splits) -> list[str]:
    """Return the names to choose among: of validation and held-out pictures, filled up with names from training."""
    chosen = set(plain_names((*splits.validation.words, *splits.held_out.words)))
    others = [name for name in plain_names(splits.train.words) if name not in chosen]
    fill = random.Random(0).sample(others, max(0, min(CANDIDATES - len(chosen), len(others))))
    return sorted(chosen | set(fill))


class NameJudge:
    """A judge and the names that it chooses among."""

    def __init__(self, judge: Judge, tokenizer: CLIPTokenizer, names: Sequence[str]):
        self.judge = judge.eval()
        self.index = {name: i for i, name in enumerate(names)}
        tokens = token_ids(tokenizer, [[folded(name)] for name in names])[:, 0].long()
        with torch.no_grad():
            self.texts = judge.embed_texts(tokens.to(judge.log_scale.device))  # (names, 256)

    @torch.no_grad()
    def ranks(self, images: Tensor, names: Sequence[str]) -> Tensor:
        """Count the names that match each picture better than its own: (N,) int64 on the CPU.

        images (N, 3, 128, 128) uint8; each of `names` is one of the candidates.
        """
        own = torch.tensor([self.index[name] for name in names], device=self.texts.device)
        parts = [self.judge.embed_images(part.to(own.device)) @ self.texts.T for part in images.split(JUDGED)]
        likeness = torch.cat(parts)
        return (likeness > likeness.gather(1, own[:, None])).sum(dim=1).cpu()

    def score(self, images: Tensor, names: Sequence[str]) -> dict[str, float]:
        ranks = self.ranks(images, names)
        rates = {f"first_{k}" if k > 1 else "first": (ranks < k).float().mean().item() for k in (1, 5)}
        return rates | {"pictures": len(ranks)}

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Map (N, 3, 128, 128) uint8 to (N, 384) float32."""
        parts = [self.judge.features(part.to(self.texts.device)) for part in images.split(JUDGED)]
        return torch.cat(parts)


def judgeable(pictures: Pictures, names: Sequence[str]) -> list[int]:
    """Return the rows of pictures whose name is one of `names`."""
    known = set(names)
    return [row for row, words in enumerate(pictures.words) if words.name in known]


class JudgeTrainer:
    """The judge's weights, optimiser and step, and the captions that it learns from."""

    def __init__(self, args: argparse.Namespace, splits: Splits, tokenizer: CLIPTokenizer):
        self.args, self.splits, self.train, self.tokenizer = args, splits, splits.train, tokenizer
        torch.manual_seed(args.seed)
        self.judge = Judge(tokenizer.size, tokenizer.length, tokenizer.end).to(args.device)
        self.optimiser = torch.optim.AdamW(self.judge.parameters(), lr=0.0, weight_decay=0.05)
        self.step = 0
        self.tokens = token_ids(tokenizer, caption_table(self.train.words, CAPTIONS, args.seed)).to(args.device)
        index = {name: i for i, name in enumerate(sorted({words.name for words in self.train.words}))}
        self.names = torch.tensor([index[words.name] for words in self.train.words], device=args.device)
        self.distribution = picture_distribution(self.train.kinds)

    def train_step(self) -> Tensor:
        torch.manual_seed(self.args.seed * 1_000_003 + self.step + 1)
        self.judge.train()
        pictures = stratified_draw(self.distribution, self.args.batch)
        variant = torch.randint(CAPTIONS, (len(pictures),), device=pictures.device)
        with torch.autocast(pictures.device.type, dtype=torch.bfloat16):
            images = self.judge.embed_images(varied(self.train.images[pictures]))
            texts = self.judge.embed_texts(self.tokens[pictures, variant].long())
        loss = contrastive_loss(images, texts, self.names[pictures], self.judge.log_scale)
        loss.backward()
        nn.utils.clip_grad_norm_(self.judge.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.learning_rate * rate_factor(self.step, self.args.steps)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        return loss.detach()

    def scores(self) -> dict[str, dict[str, float]]:
        """Return how often the judge finds the right name, per split."""
        names = candidate_names(self.splits)
        by_name = NameJudge(self.judge, self.tokenizer, names)
        found = {}
        for split, pictures in vars(self.splits).items():
            rows = judgeable(pictures, names)
            rows = [rows[i] for i in spread(REPORTED, len(rows), "cpu").tolist()]
            found[split] = by_name.score(pictures.images[rows], [pictures.words[row].name for row in rows])
        return found

    def save(self, path: Path) -> None:
        state = {"judge": self.judge.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step}
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.args.device, weights_only=True)
        self.judge.load_state_dict(state["judge"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]


def load_judge(path: Path, tokenizer: CLIPTokenizer, device: torch.device | str) -> Judge:
    judge = Judge(tokenizer.size, tokenizer.length, tokenizer.end).to(device)
    judge.load_state_dict(torch.load(path, map_location=device, weights_only=True)["judge"])
    return judge.eval()


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="emoji128.npz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="folder for judge.pt and log.jsonl")
    parser.add_argument("--steps", type=int, default=3000, help="steps of the whole training")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop this run after this time")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--report-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> JudgeTrainer:
    """Train until --steps or --minutes is reached, at least one step; save, and print the scores."""
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    trainer = JudgeTrainer(args, load(args.data, args.device), CLIPTokenizer(args.tokenizer))
    if (args.out / "judge.pt").exists():
        trainer.resume(args.out / "judge.pt")
    is_over = trainer.step >= args.steps
    while not is_over:
        loss = trainer.train_step()
        is_over = trainer.step == args.steps or time.monotonic() - started >= 60 * args.minutes
        if trainer.step % args.report_every == 0 or is_over:
            record = {"step": trainer.step, "seconds": time.monotonic() - started, "batch_loss": loss.item()}
            record |= trainer.scores()
            with (args.out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
    trainer.save(args.out / "judge.pt")
    print(f"stopped at step {trainer.step} of {args.steps} after {time.monotonic() - started:.0f} s", flush=True)
    return trainer


if __name__ == "__main__":
    run(parse_arguments())
