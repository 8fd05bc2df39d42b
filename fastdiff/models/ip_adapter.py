"""IPAdapter: makes keys and values of pictures for a text U-Net's cross-attentions (Ye et al. 2023, arXiv 2308.06721).

The image projection makes tokens of what the image encoder gives, and one product makes their keys and values for all
attentions, side by side as `TextDenoiser.project_text` has them for the text. They are the same at each step, so a
pipeline makes them before the loop. The adapter's scale multiplies the values, which multiplies the attention's output.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from fastdiff.arguments import shown
from fastdiff.checkpoints.single_files.ip_adapter_sizes import LAYERS
from fastdiff.checkpoints.weights import diffusers_shapes, load_weights
from fastdiff.errors import InputError
from fastdiff.execution.devices import on_meta
from fastdiff.kernels.attention import attention
from fastdiff.kernels.linear import linear
from fastdiff.models.blocks.embeddings import each_through, normed
from fastdiff.models.blocks.text_attentions import TextReader
from fastdiff.models.blocks.transformer import TextAttention
from fastdiff.models.ip_adapter_files import StoredIPAdapter
from fastdiff.models.unet2d_condition import UNet2DConditionModel

_SHOWN = 3  # keys in an error


class ImageTokens(nn.Module):
    """Tokens of a plain adapter: a projection of an image embedding; diffusers' ImageProjection."""

    def __init__(self, stored: StoredIPAdapter):
        super().__init__()
        self.tokens = stored.tokens
        self.proj = nn.Linear(stored.image_width, stored.tokens * stored.text_width)
        self.norm = nn.LayerNorm(stored.text_width)

    def forward(self, embeds: Tensor) -> Tensor:
        """(1, image_width) -> (1, tokens, text_width)."""
        return normed(each_through(embeds, self.proj).unflatten(1, (self.tokens, -1)), self.norm)


class PerceiverAttention(nn.Module):
    """Attention of an adapter's own tokens to the picture's tokens and to themselves; in diffusers' block of Resampler.

    Names are the file's.
    """

    def __init__(self, stored: StoredIPAdapter):
        super().__init__()
        width, inner = stored.width, stored.inner_width
        self.heads = stored.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q = nn.Linear(width, inner, bias=False)
        self.to_kv = nn.Linear(width, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        """Return latents (1, tokens, width) plus their attention to x (1, L, width)."""
        own = normed(latents, self.norm2)
        q = linear(own, self.to_q.weight)
        keys, values = linear(torch.cat([normed(x, self.norm1), own], dim=1), self.to_kv.weight).chunk(2, dim=-1)
        y = attention(q, keys, values, heads=self.heads)
        return linear(y, self.to_out.weight, residual=latents)


class PerceiverMLP(nn.ModuleDict):
    """Norm, linear with GELU, linear and the residual sum. The names are the file's."""

    def __init__(self, stored: StoredIPAdapter):
        inner = nn.Linear(stored.width, stored.mlp_width, bias=False)
        outer = nn.Linear(stored.mlp_width, stored.width, bias=False)
        super().__init__({"0": nn.LayerNorm(stored.width), "1": inner, "3": outer})

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = cast(nn.Linear, self["1"]), cast(nn.Linear, self["3"])
        h = linear(normed(x, cast(nn.LayerNorm, self["0"])), inner.weight, activation="gelu")
        return linear(h, outer.weight, residual=x)


class Resampler(nn.Module):
    """Tokens of a plus adapter, which read all tokens of a picture; diffusers' IPAdapterPlusImageProjection."""

    def __init__(self, stored: StoredIPAdapter):
        super().__init__()
        self.latents = nn.Parameter(torch.empty(1, stored.tokens, stored.width))
        self.proj_in = nn.Linear(stored.image_width, stored.width)
        self.layers = nn.ModuleList(
            nn.ModuleList([PerceiverAttention(stored), PerceiverMLP(stored)]) for _ in range(stored.depth)
        )
        self.proj_out = nn.Linear(stored.width, stored.text_width)
        self.norm_out = nn.LayerNorm(stored.text_width)

    def forward(self, states: Tensor) -> Tensor:
        """(1, L, image_width) -> (1, tokens, text_width)."""
        x, latents = linear(states, self.proj_in.weight, self.proj_in.bias), self.latents
        for layer in self.layers:
            attend, mlp = cast(nn.ModuleList, layer)
            latents = mlp(attend(x, latents))
        return normed(linear(latents, self.proj_out.weight, self.proj_out.bias), self.norm_out)


class IPAdapter(nn.Module):
    """An IP-Adapter for a U-Net: the image projection, and the projections of its tokens to keys and values."""

    def __init__(self, stored: StoredIPAdapter, paths: Mapping[str, TextAttention], width: int):
        """`paths`: the cross-attentions in the order of the file. `width`: of the keys and values of all attentions."""
        super().__init__()
        self.source, self.kind, self.image_width = stored.source, stored.kind, stored.image_width
        self.image_proj = ImageTokens(stored) if stored.kind == "plain" else Resampler(stored)
        self.to_kv_ip = nn.Linear(stored.text_width, width, bias=False)
        self.columns = {path: layer.columns for path, layer in paths.items()}
        numbers = {path: 2 * i + 1 for i, path in enumerate(paths)}  # self-attentions have the even numbers
        in_order = sorted(paths.items(), key=lambda item: item[1].columns.start)
        self.stacked = {
            "to_kv_ip.": {
                f"{LAYERS}{numbers[path]}.{name}_ip.": share
                for path, layer in in_order
                for name, share in layer.projections.items()
            }
        }

    @property
    def reads_states(self) -> bool:
        """Whether it reads the image encoder's penultimate states instead of its image_embeds."""
        return self.kind == "plus"

    def embeds_shape(self) -> tuple[int | None, ...]:
        """Return the shape of the embeds of a picture. None stands for any size."""
        return (None, self.image_width) if self.reads_states else (self.image_width,)

    @torch.no_grad()
    def keys_and_values(self, embeds: Tensor) -> Tensor:
        """Return the keys and values of pictures (n, ...) with the scale 1: (n * tokens, width).

        Each picture is computed on its own, so its bits do not depend on the others.
        """
        tokens = [self.image_proj(each) for each in embeds.to(self.to_kv_ip.weight).split(1)]
        return torch.cat([linear(each, self.to_kv_ip.weight)[0] for each in tokens])

    def scaled(self, keys_and_values: Tensor, scale_of: Callable[[str], float]) -> Tensor:
        """Return keys and values (..., width) whose values are multiplied by their attention's scale."""
        scales = torch.ones(keys_and_values.shape[-1])
        for path, columns in self.columns.items():
            middle = (columns.start + columns.stop) // 2  # the keys, then the values
            scales[middle : columns.stop] = scale_of(f"{path}.")
        return (keys_and_values.float() * scales.to(keys_and_values.device)).to(keys_and_values.dtype)


def build_ip_adapter(stored: StoredIPAdapter, unet: UNet2DConditionModel) -> IPAdapter:
    """Return the IP-Adapter of a file for a U-Net, in its dtype and on its device.

    Raises:
        InputError: for an adapter of another model, for a U-Net with other attentions than Stable Diffusion's, and for
            values beyond the range of the dtype. NonFiniteWeightsError for NaN or infinity.
    """
    paths = _cross_attentions(unet)
    assert unet.text_projections is not None  # guaranteed by _cross_attentions
    stored.check_model(unet.config)
    with on_meta():
        adapter = IPAdapter(stored, paths, unet.text_projections.out_features)
    state = dict(stored.tensors)
    _check_layers(stored, state, diffusers_shapes(adapter))
    load_weights(adapter, state, source=stored.source, dtype=unet.dtype, device=unet.device)
    return adapter.eval()


def _cross_attentions(unet: UNet2DConditionModel) -> dict[str, TextAttention]:
    """Return a U-Net's attentions to the text by their path, in the order of diffusers' `attn_processors`."""
    found = {path: each for path, each in unet.named_modules() if isinstance(each, TextAttention)}
    others = any(isinstance(each, TextReader) for each in unet.modules())
    if not found or others or unet.encoder_hid_proj is not None or any(path.endswith("attn1") for path in found):
        raise InputError(
            "IP-Adapter: this U-Net has other attentions than Stable Diffusion's; draw without IP-Adapters"
        )
    parts = ("down_blocks.", "up_blocks.", "mid_block.")  # diffusers' order
    return {path: found[path] for part in parts for path in found if path.startswith(part)}


def _check_layers(stored: StoredIPAdapter, state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise InputError for keys and shapes that do not fit the model."""
    missing = [key for key in shapes if key not in state]
    unknown = [key for key in state if key not in shapes]
    other = [f"{key} {tuple(state[key].shape)}" for key in shapes if key in state and state[key].shape != shapes[key]]
    for what, keys in (("has no", missing), ("has unknown", unknown), ("has other shapes:", other)):
        if keys:
            more = "" if len(keys) <= _SHOWN else f" and {len(keys) - _SHOWN} more"
            names = ", ".join(f"{key if key.isprintable() else shown(key):.120}" for key in keys[:_SHOWN])
            of_layers = all(key.startswith(LAYERS) for key in keys)
            remedy = "give an IP-Adapter of this model" if of_layers else "download it again"
            raise InputError(f"{stored.source} {what} {names}{more}; {remedy}")
