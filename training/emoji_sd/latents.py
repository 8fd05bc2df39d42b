"""Latents of the training pictures and tokens of their captions: made once, then drawn from on the device."""

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

ENCODED = 256  # pictures at once


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 -> (N, C, h, w) float32: means of the latents, scaled as the denoiser sees them."""
    parts = [vae.encode(to_model_range(part)).latent_dist.mean for part in images.split(ENCODED)]
    return torch.cat(parts) * vae.config.scaling_factor


@dataclass(frozen=True)
class LatentBank:
    """Latents of pictures and of their shifted copies, and tokens of several captions of each."""

    latents: Tensor  # (copies, N, C, h, w) float32, each copy shifted
    tokens: Tensor  # (N, captions, L) int16
    empty: Tensor  # (L,) int16, the tokens of no prompt
    distribution: Tensor  # (N,), a kind as likely as the square root of its count

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Latents (count, C, h, w) and tokens (count, L) int64, from torch's default generator, without a read-back."""
        pictures = stratified_draw(self.distribution, count)
        copies = torch.randint(len(self.latents), (count,), device=pictures.device)
        return self.latents[copies, pictures], drawn_prompts(self.tokens, self.empty, pictures)


def make_bank(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, pictures: Pictures, *, copies: int, captions: int, seed: int
) -> LatentBank:
    """Encode `copies` shifted copies of every picture and write `captions` captions of it, all on its device."""
    torch.manual_seed(seed)
    latents = torch.stack([encode(vae, shifted(pictures.images)) for _ in range(copies)])
    tokens = token_ids(tokenizer, caption_table(pictures.words, captions, seed)).to(latents.device)
    return LatentBank(latents, tokens, empty_tokens(tokenizer, latents.device), picture_distribution(pictures.kinds))


def plain_tokens(tokenizer: CLIPTokenizer, pictures: Pictures) -> Tensor:
    """The tokens of each picture's plain caption, (N, L) int64 on its device."""
    ids = token_ids(tokenizer, [[plain_caption(words)] for words in pictures.words])
    return ids[:, 0].long().to(pictures.kinds.device)


def empty_tokens(tokenizer: CLIPTokenizer, device: torch.device | str) -> Tensor:
    return token_ids(tokenizer, [[""]])[0, 0].to(device)


def spread(count: int, of: int, device: torch.device | str) -> Tensor:
    """(count,) int64 indices, evenly spread over `of`."""
    return torch.linspace(0, of - 1, min(count, of), device=device).long()
