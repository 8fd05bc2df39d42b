"""The training set in memory: latents and edges of augmented copies of each picture, and tokens of their captions."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from fastdiff.edges import HIGH, LOW
from fastdiff.text.tokenizer import CLIPTokenizer
from training.diffusion import picture_distribution, stratified_draw
from training.emoji_control.controls import augmented, edges_of
from training.emoji_sd.captions import caption_table, drawn_prompts
from training.emoji_sd.data import Pictures
from training.emoji_sd.latents import empty_tokens, encode, plain_tokens, spread
from training.emoji_sd.tokenizer import token_ids

DROPPED = 0.5  # share of empty prompts, so that the edges alone say what to draw
THRESHOLDS = ((LOW, HIGH), (LOW, HIGH), (50, 100), (200, 400))  # of the copies in turn


@dataclass(frozen=True)
class Batch:
    """Pictures with their control pictures and prompts."""

    latents: Tensor  # (N, C, h, w) float32
    control: Tensor  # (N, 3, S, S) float32, 0 or 1
    tokens: Tensor  # (N, L) int64

    def part(self, rows: Tensor) -> "Batch":
        return Batch(self.latents[rows], self.control[rows], self.tokens[rows])


@dataclass(frozen=True)
class ControlBank:
    """Copies of each picture, all on one device."""

    latents: Tensor  # (copies, N, C, h, w) float32
    edges: Tensor  # (copies, N, 1, S, S) bool
    tokens: Tensor  # (N, captions, L) int16
    empty: Tensor  # (L,) int16, the tokens of the empty prompt
    distribution: Tensor  # (N,), cumulative; a kind's weight is the square root of its count

    def draw(self, count: int) -> Batch:
        """Draw a batch from the default generator, without a read-back."""
        pictures = stratified_draw(self.distribution, count)
        copies = torch.randint(len(self.latents), (count,), device=pictures.device)
        tokens = drawn_prompts(self.tokens, self.empty, pictures, DROPPED)
        return Batch(self.latents[copies, pictures], as_control(self.edges[copies, pictures]), tokens)


def as_control(edges: Tensor) -> Tensor:
    """Return edges (N, 1, S, S) bool as a ControlNet reads them: (N, 3, S, S) float32, 1 on edges."""
    return edges.float().expand(-1, 3, -1, -1)


def make_bank(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, pictures: Pictures, *, copies: int, captions: int, seed: int
) -> ControlBank:
    """Encode `copies` copies of every picture, every second one scaled, and find the edges of each."""
    torch.manual_seed(seed)
    device, latents, edges = pictures.images.device, [], []
    for copy in range(copies):
        images = augmented(pictures.images, scaled=copy % 2 == 1)
        latents.append(encode(vae, images))
        edges.append(edges_of(images, *THRESHOLDS[copy // 2 % len(THRESHOLDS)]).to(device))
    tokens = token_ids(tokenizer, caption_table(pictures.words, captions, seed)).to(device)
    distribution = picture_distribution(pictures.kinds)
    return ControlBank(torch.stack(latents), torch.stack(edges), tokens, empty_tokens(tokenizer, device), distribution)


def plain_batch(vae: AutoencoderKL, tokenizer: CLIPTokenizer, pictures: Pictures, most: int) -> Batch:
    """Return at most `most` pictures as they are, with their plain captions."""
    some = spread(most, len(pictures), pictures.images.device)
    images = pictures.images[some]
    control = as_control(edges_of(images).to(images.device))
    return Batch(encode(vae, images), control, plain_tokens(tokenizer, pictures)[some])
