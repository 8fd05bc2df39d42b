"""Compute what an adapter adds to the weight of a layer: LoRA, DoRA, LoHa and LoKr.

The tensors of a file stay in its dtype, and all arithmetic is float32.

A weight (out, in) or a filter (out, in, kh, kw) is changed as a matrix (out, in kh kw). An adapter adds
`factor * scale * delta`. `scale` comes from the file (alpha and rank), `factor` from the user.
"""

from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

AnyUpdate = TypeVar("AnyUpdate", bound="Update")


@dataclass(frozen=True, eq=False)
class Update:
    """The change of one weight by an adapter. Updates compare by identity."""

    scales_weight: ClassVar[bool] = False  # whether the update also scales the weight and the updates before it

    def add_to(self, total: Tensor, weight: Tensor, factor: float, *, is_first: bool = False) -> None:
        """Add the update to `total` in place.

        Args:
            total: (out, in kh kw) float32: the updates of other adapters. With an update that `scales_weight` among
                them, it also has the weight.
            weight: the same shape: the weight without any adapter. Only updates that scale it read it.
            factor: the user's weight of the adapter.
            is_first: replace `total`, whose values mean nothing yet.
        """
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(each.device for each in vars(self).values() if isinstance(each, Tensor))

    def to(self: AnyUpdate, device: torch.device) -> AnyUpdate:
        """Return the update with all tensors on a device, contiguous."""
        tensors = {
            name: value.to(device).contiguous()
            for name in (each.name for each in fields(self))
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **tensors)


Recipe = tuple[tuple[Update, float], ...]  # what is added to a weight: updates and the user's factors


@dataclass(frozen=True, eq=False)
class LoRA(Update):
    """Hu et al. 2021 (arXiv 2106.09685): up @ down. With `mid`, the product of three convolutions (LoCon)."""

    down: Tensor  # (rank, in kh kw), or with `mid` (rank, in)
    up: Tensor  # (out, rank)
    scale: float
    mid: Tensor | None = None  # (rank, rank, kh, kw)

    def add_to(self, total: Tensor, weight: Tensor, factor: float, *, is_first: bool = False) -> None:
        down = self.down.float()
        if self.mid is not None:
            down = torch.einsum("rshw,si->rihw", self.mid.float(), down).flatten(1)
        total.addmm_(self.up.float(), down, beta=0 if is_first else 1, alpha=self.scale * factor)


@dataclass(frozen=True, eq=False)
class DoRA(LoRA):
    """Liu et al. 2024 (arXiv 2402.09353): LoRA that also sets the norm of each output, as peft's DoRA layers do."""

    magnitude: Tensor = field(default_factory=lambda: torch.empty(0))  # (out,)

    scales_weight = True

    def add_to(self, total: Tensor, weight: Tensor, factor: float, *, is_first: bool = False) -> None:
        changed = weight.clone()
        super().add_to(changed, weight, factor)
        super().add_to(total, weight, factor)  # with several adapters, each scales the sum so far, as in peft
        total *= (self.magnitude.float() / torch.linalg.vector_norm(changed, dim=1))[:, None]


@dataclass(frozen=True, eq=False)
class LoHa(Update):
    """Hyeon-Woo et al. 2021 (arXiv 2108.06098), as LyCORIS has it: the elementwise product of two low-rank matrices."""

    w1_a: Tensor  # (out, rank), or with t1 (rank, out)
    w1_b: Tensor  # (rank, in kh kw), or with t1 (rank, in)
    w2_a: Tensor
    w2_b: Tensor
    scale: float
    t1: Tensor | None = None  # (rank, rank, kh, kw)
    t2: Tensor | None = None

    def add_to(self, total: Tensor, weight: Tensor, factor: float, *, is_first: bool = False) -> None:
        if is_first:
            total.zero_()
        first = _product(self.w1_a, self.w1_b, self.t1).reshape(total.shape)
        second = _product(self.w2_a, self.w2_b, self.t2).reshape(total.shape)
        total.addcmul_(first, second, value=self.scale * factor)


@dataclass(frozen=True, eq=False)
class LoKr(Update):
    """LyCORIS's LoKr (Yeh et al. 2023, arXiv 2309.14859): a Kronecker product, whose factors may be low-rank."""

    scale: float
    w1: Tensor | None = None  # (a, b); None: w1_a @ w1_b
    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    w2: Tensor | None = None  # (out / a, in / b) or (out / a, in / b, kh, kw); None: w2_a @ w2_b
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None
    t2: Tensor | None = None  # (rank, rank, kh, kw)

    def add_to(self, total: Tensor, weight: Tensor, factor: float, *, is_first: bool = False) -> None:
        if is_first:
            total.zero_()
        first = self.w1.float() if self.w1 is not None else _product(self.w1_a, self.w1_b)
        second = self.w2.float() if self.w2 is not None else _product(self.w2_a, self.w2_b, self.t2)
        first = first.reshape(*first.shape, *(1,) * (second.ndim - 2))
        total.add_(torch.kron(first, second.contiguous()).reshape(total.shape), alpha=self.scale * factor)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (out, in kh kw) of the product."""
        rows, columns = (1, 1) if self.w1 is None else self.w1.shape
        if self.w1_a is not None and self.w1_b is not None:
            rows, columns = len(self.w1_a), self.w1_b.shape[1]
        if self.w2 is not None:
            return rows * len(self.w2), columns * prod(self.w2.shape[1:])
        assert self.w2_a is not None and self.w2_b is not None
        if self.t2 is not None:
            return rows * self.w2_a.shape[1], columns * self.w2_b.shape[1] * prod(self.t2.shape[2:])
        return rows * len(self.w2_a), columns * prod(self.w2_b.shape[1:])


def _product(left: Tensor | None, right: Tensor | None, core: Tensor | None = None) -> Tensor:
    """Return left @ right (out, in), or with a `core` (rank, rank, kh, kw) the filter (out, in, kh, kw)."""
    assert left is not None and right is not None
    left, right = left.float(), right.float()
    return left @ right if core is None else torch.einsum("ijhw,jr,ip->prhw", core.float(), right, left)
