"""Latents of the training pictures and tokens of their captions, computed once and then sampled on the device."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from fastdiff.text.tokenizer import CLIPTokenizer
from training.data import to_model_range
from training.diffusion import picture_distribution, stratified_draw
from training.emoji_sd.captions import caption_table, drawn_prompts, plain_caption
from training.emoji_sd.data import Pictures, shifted
from training.emoji_sd.tokenizer import token_ids

ENCODED = 256  # pictures per batch


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Encode (N, 3, H, W) uint8 to the latents' means (N, C, h, w) float32, in the denoiser's scale."""
    parts = [vae.encode(to_model_range(part)).latent_dist.mean for part in images.split(ENCODED)]
    return torch.cat(parts) * vae.config.scaling_factor


@dataclass(frozen=True)
class LatentBank:
    """Latents of several shifted copies of each picture, and tokens of several captions of each."""

    latents: Tensor  # (copies, N, C, h, w) float32, each copy shifted
    tokens: Tensor  # (N, captions, L) int16
    empty: Tensor  # (L,) int16, the tokens of the empty prompt
    distribution: Tensor  # (N,), cumulative; a kind's weight is the square root of its count

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw latents (count, C, h, w) and tokens (count, L) int64 from the default generator, without a read-back."""
        pictures = stratified_draw(self.distribution, count)
        copies = torch.randint(len(self.latents), (count,), device=pictures.device)
        return self.latents[copies, pictures], drawn_prompts(self.tokens, self.empty, pictures)


def make_bank(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, pictures: Pictures, *, copies: int, captions: int, seed: int
) -> LatentBank:
    """Encode `copies` shifted copies and write `captions` captions of every picture, on the pictures' device."""
    torch.manual_seed(seed)
    latents = torch.stack([encode(vae, shifted(pictures.images)) for _ in range(copies)])
    tokens = token_ids(tokenizer, caption_table(pictures.words, captions, seed)).to(latents.device)
    return LatentBank(latents, tokens, empty_tokens(tokenizer, latents.device), picture_distribution(pictures.kinds))


def plain_tokens(tokenizer: CLIPTokenizer, pictures: Pictures) -> Tensor:
    """Return the tokens of each picture's plain caption, (N, L) int64 on the pictures' device."""
    ids = token_ids(tokenizer, [[plain_caption(words)] for words in pictures.words])
    return ids[:, 0].long().to(pictures.kinds.device)


def empty_tokens(tokenizer: CLIPTokenizer, device: torch.device | str) -> Tensor:
    return token_ids(tokenizer, [[""]])[0, 0].to(device)


def spread(count: int, of: int, device: torch.device | str) -> Tensor:
    """Return at most `count` int64 indices, evenly spaced over `of`."""
    return torch.linspace(0, of - 1, min(count, of), device=device).long()
