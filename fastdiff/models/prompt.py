"""Checks of the inputs of a text U-Net other than sample, timestep and class labels."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff.arguments import shown
from fastdiff.checkpoints.configs.unet2d_condition import HINT_SCALE, UNet2DConditionConfig
from fastdiff.errors import InputError
from fastdiff.execution.tensors import FLOATS, REAL, beside, tensor
from fastdiff.models.blocks.conditioning import Given, Prompt

HIDDEN = -10_000.0  # the bias of a masked key, as in diffusers


class Extras(NamedTuple):
    """Tensors that are added inside the model, with one entry per picture."""

    bias: Given = ()  # (N, keys of attn1), from attention_mask
    down: Given = ()  # (N, H, W, C) for each skip connection
    mid: Given = ()  # (N, H, W, C)
    inside: Given = ()  # (N, H, W, C) for each down block, and perhaps one for the middle


class PromptCheck:
    """The checks of one call, with a model's config, dtype and device and `count` pictures."""

    def __init__(self, config: UNet2DConditionConfig, dtype: torch.dtype, device: torch.device, count: int):
        self.config, self.dtype, self.device, self.count = config, dtype, device, count

    def prompt(
        self,
        encoder_hidden_states: Any,
        encoder_attention_mask: Any = None,
        added_cond_kwargs: Any = None,
        timestep_cond: Any = None,
    ) -> Prompt:
        """Return the arguments of a call as a Prompt. Raises InputError for arguments that do not fit the model."""
        if encoder_hidden_states is None and not self.config.reads_text:
            encoder_hidden_states = torch.zeros(self.count, 1, self.config.text_width, dtype=self.dtype).to(self.device)
        width = self.config.text_width if self.config.reads_text else None
        text = self.rows("encoder_hidden_states", encoder_hidden_states, None, width)
        if text.dtype != self.dtype:
            raise InputError(
                f"encoder_hidden_states: it is {text.dtype}, but the model is {self.dtype}; move one of them"
            )
        bias = self.bias("encoder_attention_mask", encoder_attention_mask, {self.config.tokens(text.shape[1])})
        return Prompt(text, bias, self._added(added_cond_kwargs), self._timestep_cond(timestep_cond))

    def bias(self, name: str, mask: Any, lengths: set[int]) -> Given:
        """Return a mask (N, keys), 1 to keep and 0 to hide, as a bias of the scores. Each of `lengths` must be keys."""
        if mask is None:
            return ()
        tensor(name, mask, (*REAL, torch.bool))
        for length in sorted(lengths):
            self._check_shape(name, mask, (length,))
        return ((1 - beside(name, mask, self.device).to(self.dtype)) * HIDDEN,)

    def attention_bias(self, mask: Any, size: tuple[int, int], text_length: int) -> Given:
        """Return attention_mask as a bias, for a sample of this height and width."""
        return (
            ()
            if mask is None
            else self.bias("attention_mask", mask, self.config.attended(*size, self.config.tokens(text_length)))
        )

    def residuals(self, down: Any, mid: Any, size: tuple[int, int]) -> tuple[Given, Given]:
        """Return a ControlNet's residuals, (N, C, H, W) each, as (N, H, W, C), for a sample of this height and width.

        There is one of `down` for each skip connection, and `mid` for the mid block's output. Pooled ones have a height
        and width of 1.
        """
        names = "down_block_additional_residuals", "mid_block_additional_residual"
        if down is None and mid is None:
            return (), ()
        if self.config.has_k_blocks:
            raise InputError(f"{names[down is None]}: K blocks take no residuals of a ControlNet; leave it out")
        shapes = self.config.residual_shapes(*size)
        if down is None or mid is None:
            raise InputError(f"{names[down is not None]}: missing; give both {' and '.join(names)}")
        if not isinstance(down, list | tuple) or len(down) != len(shapes) - 1:
            found = len(down) if isinstance(down, list | tuple) else shown(down)
            raise InputError(
                f"{names[0]}: {found} given; give a list of {len(shapes) - 1}, one for each skip connection"
            )
        for name, each, shape in zip([names[0]] * len(down) + [names[1]], [*down, mid], shapes, strict=True):
            is_pooled = isinstance(each, Tensor) and tuple(each.shape[2:]) == (1, 1)
            self.rows(name, each, *((shape[0], 1, 1) if is_pooled else shape))
        *skips, middle = (each.to(self.dtype).permute(0, 2, 3, 1) for each in (*down, mid))
        return tuple(skips), (middle,)

    def inside(self, given: Any, size: tuple[int, int]) -> Given:
        """Return a T2I-Adapter's residuals, (N, C, H, W) each, as (N, H, W, C), for a sample of this height and width.

        There is one for each down block, and perhaps one more for the middle.
        """
        if given is None:
            return ()
        name, stages = "down_intrablock_additional_residuals", self.config.down_stages
        if any(stage.block.resample != "conv" for stage in stages):
            raise InputError(f"{name}: this model's down blocks take no residuals of a T2I-Adapter; leave them out")
        if not isinstance(given, list | tuple) or not len(stages) <= len(given) <= len(stages) + 1:
            found = len(given) if isinstance(given, list | tuple) else shown(given)
            raise InputError(f"{name}: {found} given; give a list of {len(stages)}, one for each down block")
        sizes = self.config.sizes(*size)
        ends = [*sizes[1:], sizes[-1]]
        shapes: list[tuple[int | None, ...]] = [
            (stage.width, *(sizes if stage.block.reads_text else ends)[i]) for i, stage in enumerate(stages)
        ]
        shapes.append((None, None, None))  # diffusers ignores the last one if it does not fit
        for each, shape in zip(given, shapes, strict=False):
            self.rows(name, each, *shape)
        return tuple(each.to(self.dtype).permute(0, 2, 3, 1) for each in given)

    def hint(self, prompt: Prompt, height: int, width: int) -> None:
        """Raise InputError unless the hint, if the model reads one, has the size that fits a sample."""
        for name, value in zip(self.config.added_shapes, prompt.added, strict=True):
            if name == "hint":
                self._check_shape("added_cond_kwargs: hint", value, (3, HINT_SCALE * height, HINT_SCALE * width))

    def _added(self, given: Any) -> Given:
        wanted = self.config.added_shapes.keys()
        if given is not None and not isinstance(given, Mapping):
            raise InputError(f"added_cond_kwargs: {shown(given)} is not a dictionary; give one of tensors by name")
        given = dict(given or {})
        found = set(given)
        if found - wanted:
            names = (key if isinstance(key, str) and key.isprintable() else shown(key) for key in found - wanted)
            raise InputError(f"added_cond_kwargs: this model takes no {', '.join(sorted(names)):.120}; leave it out")
        if wanted - found:
            missing = ", ".join(sorted(wanted - found))
            kinds: dict[str, str | None] = {"addition_embed_type": self.config.addition_embed_type}
            kinds |= {"encoder_hid_dim_type": self.config.encoder_hid_dim_type}
            why = " and ".join(f"{option} {kind!r}" for option, kind in kinds.items() if kind is not None)
            raise InputError(f"added_cond_kwargs: {missing} is missing; {why} needs it")
        of_size = self._check_text_time(given) if "time_ids" in wanted else {}
        shapes: dict[str, tuple[int | None, ...]] = dict(self.config.added_shapes)
        others = {name: shape for name, shape in shapes.items() if name not in of_size}
        if "hint" in others:
            others["hint"] = (3, None, None)
        rows = {name: self.rows(f"added_cond_kwargs: {name}", given[name], *shape) for name, shape in others.items()}
        rows = of_size | {name: row.to(self.dtype) for name, row in rows.items()}
        return tuple(rows[name] for name in self.config.added_shapes)

    def _check_text_time(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return SDXL's pooled text and sizes. Raises InputError unless their widths sum to the model's."""
        embeds = self.rows("added_cond_kwargs: text_embeds", given["text_embeds"], None)
        ids = self.rows("added_cond_kwargs: time_ids", given["time_ids"], None, dtypes=REAL)
        width = embeds.shape[1] + ids.shape[1] * (self.config.addition_time_embed_dim or 0)
        if width != self.config.projection_class_embeddings_input_dim:
            raise InputError(
                f"added_cond_kwargs: text_embeds of {embeds.shape[1]} channels and {ids.shape[1]} time_ids make "
                f"{width} channels, but the model takes {self.config.projection_class_embeddings_input_dim}"
            )
        return {"text_embeds": embeds, "time_ids": ids}

    def _timestep_cond(self, given: Any) -> Given:
        if given is None:
            return ()
        width = self.config.time_cond_proj_dim
        if width is None:
            raise InputError("timestep_cond: the model's config has no time_cond_proj_dim; leave it out")
        return (self.rows("timestep_cond", given, width).to(self.dtype),)

    def rows(self, name: str, value: Any, *shape: int | None, dtypes: Sequence[torch.dtype] = FLOATS) -> Tensor:
        """Check and return a tensor (N, `shape`...) on the model's device. None in `shape` stands for any size."""
        beside(name, tensor(name, value, dtypes), self.device)
        self._check_shape(name, value, shape)
        if value.requires_grad and torch.is_grad_enabled():
            raise InputError(f"{name}: it requires grad, and this model is for inference only; give its .detach()")
        return value

    def _check_shape(self, name: str, value: Tensor, shape: tuple[int | None, ...]) -> None:
        wanted = (self.count, *shape)
        fits = value.ndim == len(wanted) and value.numel() > 0
        if not fits or any(size not in (None, found) for size, found in zip(wanted, value.shape, strict=True)):
            sizes = ", ".join("L" if size is None else str(size) for size in wanted)
            raise InputError(f"{name}: its shape is {tuple(value.shape)}; it must be ({sizes})")
