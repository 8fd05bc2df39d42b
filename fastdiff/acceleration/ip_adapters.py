"""IP-Adapters of live pipelines: the keys and values of a call's pictures, which our U-Net reads beside the text's.

diffusers loads an IP-Adapter into the U-Net. `encoder_hid_proj` makes tokens of embeddings, and the processor of each
cross-attention has the layers `to_k_ip` and `to_v_ip`. They stay the live model's own, in its memory, and run once for
a loop: what they make is the same at each step. The scales are in the values, as in `models.ip_adapter`, so a new scale
makes no new CUDA graph.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.acceleration.layers import IP_PROCESSORS, IP_PROJECTION, library
from fastdiff.acceleration.recall import Kept
from fastdiff.arguments import as_float, shown
from fastdiff.errors import InputError
from fastdiff.models.blocks.transformer import TextAttention
from fastdiff.models.prompt import PromptCheck
from fastdiff.models.unet2d_condition import UNet2DConditionModel

PLAIN = "ImageProjection"  # reads (N, n, C) of n pictures; the others read (N, n, L, C)
PROJECTIONS = {PLAIN, "IPAdapterPlusImageProjection", "IPAdapterFullImageProjection"}
EMBEDS = "image_embeds"
ARGUMENT = f"added_cond_kwargs: {EMBEDS}"
UNDO = "call unload_ip_adapter() on the pipeline first"

Scales = tuple[tuple[float, ...], ...]  # for each adapter, one of each attention


def check_ip_adapters(model: Any) -> None:
    """Raise InputError for IP-Adapters of a live model that our U-Net cannot read."""
    found = {path: module.processor for path, module in model.named_modules() if hasattr(module, "processor")}
    found = {path: each for path, each in found.items() if "IPAdapter" in type(each).__name__}
    projection: Any = getattr(model, "encoder_hid_proj", None)
    has_projection = type(projection).__name__ == IP_PROJECTION
    if not found and not has_projection:
        return
    projections = [*projection.image_projection_layers] if has_projection else []
    pairs = ((found.values(), IP_PROCESSORS), (projections, PROJECTIONS))
    odd = [type(part) for parts, known in pairs for part in parts if not _is_one_of(part, known)]
    if odd:
        raise InputError(f"accelerate: an IP-Adapter with {odd[0].__name__} is not supported; {UNDO}")
    if getattr(model, "text_encoder_hid_proj", None) is not None:
        raise InputError(f"accelerate: an IP-Adapter of Kolors is not supported; {UNDO}")
    blocks = {path: each for path, each in model.named_modules() if type(each).__name__ == "BasicTransformerBlock"}
    counts = {len(layers) for each in found.values() for layers in (each.to_k_ip, each.to_v_ip, each.scale)}
    is_whole = found.keys() == {f"{path}.attn2" for path in blocks} and counts == {len(projections)}
    if not is_whole or any(each.only_cross_attention for each in blocks.values()):
        raise InputError(f"accelerate: the IP-Adapter is not on each cross-attention, or also on other layers; {UNDO}")


def _is_one_of(part: nn.Module, names: set[str]) -> bool:
    return library(type(part)) == "diffusers" and type(part).__name__ in names


def image_reader(model: Any, ours: UNet2DConditionModel) -> "ImageReader | None":
    """Return the reader of the image prompts of a live U-Net that passed `check_ip_adapters`; None without adapters."""
    return ImageReader(model, ours) if type(model.encoder_hid_proj).__name__ == IP_PROJECTION else None


class ImageReader:
    """Makes the keys and values of image prompts with the layers of a live U-Net; see `UNet2DConditionModel`."""

    def __init__(self, model: Any, ours: UNet2DConditionModel):
        attentions = [(path, each) for path, each in ours.named_modules() if isinstance(each, TextAttention)]
        attentions.sort(key=lambda item: item[1].columns.start)
        self._processors = [model.get_submodule(path).processor for path, _ in attentions]
        self._widths = [width for _, each in attentions for width in each.projections.values()]  # of keys, of values...
        self._projections = [*model.encoder_hid_proj.image_projection_layers]
        parts = (model.encoder_hid_proj, *self._processors)
        owners = [module for part in parts for module in part.modules()]
        places = [(owner._parameters, name) for owner in owners for name in owner._parameters]
        self._kept: Kept[_Made] = Kept([(owned, name) for owned, name in places if owned[name] is not None])

    def __call__(self, check: PromptCheck, added_cond_kwargs: Any) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return the other `added_cond_kwargs` of a call, and the keys and values (N, tokens, width) of each adapter.

        The tensors are the same objects in each call of a loop, until a scale changes.

        Raises InputError for embeddings that are missing or do not fit, and for scales that are no numbers.
        """
        if not isinstance(added_cond_kwargs, Mapping) or added_cond_kwargs.get(EMBEDS) is None:
            raise InputError(f"{ARGUMENT}: missing, but an IP-Adapter is loaded; give ip_adapter_image, or {UNDO}")
        others = {name: value for name, value in added_cond_kwargs.items() if name != EMBEDS}
        given, scales = self._checked(check, added_cond_kwargs[EMBEDS]), self._scales()
        with torch.inference_mode(False), torch.no_grad():
            return others, self._of(given, check.dtype).scaled(scales, self._widths)

    def begin(self) -> None:
        """Make what the next call reads anew, whether or not torch has counted writes."""
        self._kept.begin()

    def _checked(self, check: PromptCheck, given: Any) -> list[Tensor]:
        """Return the embeddings (N, n, ...) of each adapter."""
        given = [given[:, None]] if isinstance(given, Tensor) and given.ndim else given  # as in diffusers
        if not isinstance(given, list | tuple) or len(given) != len(self._projections):
            what = f"{len(given)} tensors" if isinstance(given, list | tuple) else shown(given)
            count = len(self._projections)
            raise InputError(f"{ARGUMENT}: {what} for {count} IP-Adapters; give a list with one for each")
        for each, projection in zip(given, self._projections, strict=True):
            first = next(layer for layer in projection.modules() if isinstance(layer, nn.Linear))
            axes = [None] if type(projection).__name__ == PLAIN else [None, None]
            check.rows(ARGUMENT, each, *axes, first.in_features)
        return list(given)

    def _scales(self) -> Scales:
        """Return the scales that `set_ip_adapter_scale` has given to the processors."""
        found = []
        for processor in self._processors:
            numbers = [as_float(each) for each in processor.scale]
            if None in numbers:
                scale = shown(processor.scale[numbers.index(None)])
                raise InputError(f"accelerate: the scale {scale} of an IP-Adapter is not a finite number; give one")
            found.append(numbers)
        return tuple(zip(*found, strict=True))

    def _of(self, given: Sequence[Tensor], dtype: torch.dtype) -> "_Made":
        """Return the keys and values of embeddings. An earlier call's are kept until something is written."""
        made = self._kept.find(given, lambda: self._new(given, dtype))
        return self._new(given, dtype) if made is None else made

    def _new(self, given: Sequence[Tensor], dtype: torch.dtype) -> "_Made":
        return _Made([self._keys_and_values(i, each.to(dtype)) for i, each in enumerate(given)])

    def _keys_and_values(self, adapter: int, embeds: Tensor) -> Tensor:
        """Return the keys and values (N, n * tokens, width) of embeddings (N, n, ...), with the scale 1.

        Each row is computed alone, so its bits do not depend on the others.
        """
        rows = []
        for each in embeds:
            tokens = self._projections[adapter](each).flatten(0, 1)
            pairs = ((each.to_k_ip[adapter], each.to_v_ip[adapter]) for each in self._processors)
            rows.append(torch.cat([layer(tokens) for pair in pairs for layer in pair], dim=-1))
        return torch.stack(rows)


class _Made:
    """The keys and values of the pictures of a loop."""

    def __init__(self, plain: list[Tensor]):
        self._plain = plain
        self._scaled: tuple[Scales, tuple[Tensor, ...]] | None = None

    def scaled(self, scales: Scales, widths: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the keys and values whose values are multiplied by their attention's scale."""
        if self._scaled is None or self._scaled[0] != scales:
            self._scaled = (
                scales,
                tuple(_times(plain, each, widths) for plain, each in zip(self._plain, scales, strict=True)),
            )
        return self._scaled[1]


def _times(plain: Tensor, scales: Sequence[float], widths: Sequence[int]) -> Tensor:
    factors = torch.tensor([factor for scale in scales for factor in (1.0, scale)])  # of keys, then of values
    columns = factors.repeat_interleave(torch.tensor(widths)).to(plain.device)
    return (plain.float() * columns).to(plain.dtype)
