"""Scaled dot-product attention over tokens, read in place from a fused projection (no transposes, no head copies).

The kernel is FlashAttention (Dao 2023, arXiv 2307.08691): a block of queries loops over the keys with a running maximum
and sum, so the scores never leave the chip. A head width that is not a power of two is split into two products where
that saves padding.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import DTYPES, launch, side_by_side, stages_for_two
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.host.recording import because
from fastdiff.kernels.plans import hopper_attention as on_hopper
from fastdiff.kernels.plans.choices import Choice, attention_plan, plan_of
from fastdiff.kernels.plans.dispatch import Operation
from fastdiff.kernels.plans.tuning import named, tuned

# The widest head that fits registers and shared memory.
MAX_WIDTH = {torch.float32: 256, torch.float16: 512, torch.bfloat16: 512}


@dataclass(frozen=True, eq=False)
class AttentionCall(Call[Tensor]):
    """softmax(q k^T / sqrt(d) + bias) v + residual for each head, Vaswani et al. 2017 (arXiv 1706.03762).

    The computation of diffusers' AttnProcessor2_0. Scores are float32 for every dtype, so they do not overflow.

    Args:
        q: (N, L, heads * d), float32, float16 or bfloat16; rows may be strided (a slice of a fused projection).
        k, v: (N, L_keys, key_heads * d), the dtype of q. key_heads divides heads: each head of keys and values serves
            heads / key_heads heads of queries, in order (grouped-query attention, Ainslie et al. 2023, arXiv
            2305.13245).
        causal: token i attends to keys 0 to i only.
        bias: (N, L_keys), the dtype of q, finite: added to the scores of each key, for every query and head. A large
            negative value masks the key.
        residual: (N, L, heads * d), the dtype of q: added in float32, before the result is rounded.
        lengths: (N,) int32, from 1 to L_keys, not with a bias: how many keys a picture attends to, from its first. The
            others may be NaN. The range is not checked. For at least 64 keys, the kernel gives the same bits as for the
            first keys alone.

    Returns:
        (N, L, heads * d), contiguous, the dtype of q.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    name = "attention"

    q: Tensor
    k: Tensor
    v: Tensor
    _: KW_ONLY
    heads: int
    causal: bool = False
    bias: Tensor | None = None
    residual: Tensor | None = None
    lengths: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def width(self) -> int:
        """Channels per head."""
        return self.q.shape[2] // self.heads

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return self.q.shape[2] // self.k.shape[2]

    def check(self) -> None:
        q, k, heads = self.q, self.k, self.heads
        if q.ndim != 3 or not q.is_floating_point():
            raise ValueError(f"q: expected floats (N, L, heads * d), got {q.dtype} {tuple(q.shape)}")
        if heads < 1 or not q.shape[2] or q.shape[2] % heads:
            raise ValueError(f"heads: {heads} does not divide the width {q.shape[2]}")
        for name, tensor in (("k", k), ("v", self.v)):
            if (tensor.dtype, tensor.device) != (q.dtype, q.device):
                raise ValueError(f"{name}: {tensor.dtype} on {tensor.device}, but q is {q.dtype} on {q.device}")
            if tensor.ndim != 3 or tensor.shape != k.shape or len(tensor) != len(q) or not all(tensor.shape[1:]):
                raise ValueError(
                    f"{name}: {tuple(tensor.shape)} does not fit q {tuple(q.shape)} (N, L, heads * d), "
                    "or k and v differ"
                )
        if k.shape[2] % self.width or heads % (k.shape[2] // self.width):
            raise ValueError(f"k: {k.shape[2]} channels; q has {heads} heads of {self.width}, and k's must divide them")
        self._check_bias()
        self._check_lengths()
        self._check_added("residual", self.residual, q.shape)

    def _check_bias(self) -> None:
        if self.bias is not None and self.causal:
            raise ValueError("bias: it cannot be combined with causal; leave one of them out")
        self._check_added("bias", self.bias, self.k.shape[:2])

    def _check_lengths(self) -> None:
        lengths = self.lengths
        if lengths is None:
            return
        if self.bias is not None:
            raise ValueError("lengths: they cannot be combined with bias; leave one of them out")
        if lengths.shape != self.q.shape[:1]:
            raise ValueError(f"lengths: expected {tuple(self.q.shape[:1])}, got {tuple(lengths.shape)}")
        if (lengths.dtype, lengths.device) != (torch.int32, self.device):
            raise ValueError(f"lengths: {lengths.dtype} on {lengths.device}; expected int32 on {self.device}")

    def _check_added(self, name: str, added: Tensor | None, shape: torch.Size) -> None:
        if added is None:
            return
        if added.shape != shape:
            raise ValueError(f"{name}: expected {tuple(shape)}, got {tuple(added.shape)}")
        if (added.dtype, added.device) != (self.q.dtype, self.device):
            given, wanted = f"{added.dtype} on {added.device}", f"{self.q.dtype} on {self.device}"
            raise ValueError(f"{name}: {given}, but q is {wanted}")

    def reference(self) -> Tensor:
        k, v, mask = self.k, self.v, None if self.bias is None else self.bias[:, None, None]
        if self.lengths is not None:
            k, v, mask = self._hidden(self.lengths)
        # (N, heads, L, d), views
        q, k, v = (tensor.unflatten(-1, (-1, self.width)).transpose(1, 2) for tensor in (self.q, k, v))
        causal = self.causal and self.lengths is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.group > 1)
        y = y.transpose(1, 2).flatten(2)
        return y if self.residual is None else self.residual + y

    def _hidden(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, v and a mask, True for keys that are seen. The host reads no length: a graph holds any of them."""
        keys = torch.arange(self.k.shape[1], device=self.device)
        seen = keys < lengths[:, None]  # (N, L_keys)
        k, v = (tensor.masked_fill(~seen[..., None], 0) for tensor in (self.k, self.v))  # beyond, they may be NaN
        mask = seen[:, None, None]
        if self.causal:
            mask = mask & (keys <= torch.arange(self.q.shape[1], device=self.device)[:, None])
        return k, v, mask

    def obstacle(self) -> str | None:
        dtype = self.q.dtype
        if dtype not in DTYPES:
            return f"no kernel for {dtype}"
        if self.width > MAX_WIDTH[dtype]:
            return f"{dtype}: head width {self.width} exceeds the maximum of {MAX_WIDTH[dtype]}"
        return None

    def facts(self) -> dict[str, Any]:
        width, itemsize = self.width, self.q.itemsize
        mask = "causal" if self.causal else "" if self.bias is None else "masked"
        return {
            "bits": 8 * itemsize, "width": width, "head_bytes": width * itemsize, "keys": self.k.shape[1], "mask": mask,
            "elements": self.q.numel(), "residual": self.residual is not None,
            "group": self.group, "lengths": self.lengths is not None,
        }  # fmt: skip

    def _plan(self) -> Choice | None:
        """Return the row whose plan covers these sizes, for any mask."""
        sizes = {"width": self.width, "keys": self.k.shape[1], "elements": self.q.numel()}
        sizes |= {"group": self.group, "lengths": self.lengths is not None}
        return plan_of("attention", bits=8 * self.q.itemsize, residual=self.residual is not None, **sizes)

    @property
    def in_gluon(self) -> bool:
        plan = self._plan()
        return plan is not None and plan.tiles.in_gluon

    def hopper_plan(self) -> str | None:
        plan = self._plan()
        return None if plan is None else attention_plan(plan.plan, self.facts()["mask"])

    def _side_by_side(self) -> tuple[Tensor, Tensor, Tensor]:
        return side_by_side(self.q), side_by_side(self.k), side_by_side(self.v)

    def hopper_obstacle(self) -> str | None:
        plan = self._plan()
        return "no plan" if plan is None else on_hopper.obstacle(plan.tiles, self.heads, *self._side_by_side())

    def hopper(self) -> Tensor:
        plan = self._plan()
        if plan is None:
            raise NotImplementedError("no plan for this shape")
        bias = None if self.bias is None else self.bias.contiguous()
        lengths, inputs = side_by_side(self.lengths), self._side_by_side()
        return on_hopper.launch_plan(plan.tiles, *inputs, self.heads, causal=self.causal, bias=bias, lengths=lengths)

    def kernel(self) -> Tensor:
        from fastdiff.kernels.device.attention import LOG2_E, attention_kernel  # imports Triton

        (n, queries, channels), keys = self.q.shape, self.k.shape[1]
        q, k, v = self._side_by_side()
        group, lengths = self.group, side_by_side(self.lengths)
        bias, residual = (None if each is None else each.contiguous() for each in (self.bias, self.residual))
        aligned = all(tensor.stride(1) % 16 == 0 for tensor in (q, k, v))
        first, second = _split(self.width, q.dtype, aligned=aligned)
        usual = _blocks(self.width, first + second, q.dtype, queries, keys, q.device)
        kind = ("causal" if self.causal else "all") + ("" if aligned else "-unaligned")
        blocks = tuned(
            "attention", q.device,
            lambda: named(
                n, queries, keys, self.heads, self.width, q.dtype, kind, f"group-{group}" if group > 1 else None,
                bias=bias, residual=residual, lengths=lengths,
            ),
            usual, lambda: _alternatives(usual, queries),
        )  # fmt: skip
        out = q.new_empty(n, queries, channels)
        because(
            lambda: f"{blocks.queries} queries x {blocks.keys} keys a step, {self.width} columns as {first} + {second}"
        )
        launch(
            attention_kernel, (n * self.heads * triton.cdiv(queries, blocks.queries),),
            out, q, k, v, bias, residual, lengths, self.heads, group, queries, keys, self.width**-0.5 * LOG2_E.value,
            *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
            CAUSAL=self.causal, D=self.width, D1=first, D2=second, BM=blocks.queries, BN=blocks.keys,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        return out


attention = Operation("attention", AttentionCall)


class Blocks(NamedTuple):
    """Queries per program, keys per step of its loop, and launch options."""

    queries: int
    keys: int
    warps: int
    stages: int


def _blocks(width: int, columns: int, dtype: torch.dtype, queries: int, keys: int, device: torch.device) -> Blocks:
    """Choose block sizes from the picture's shape, never from the batch: key blocks set the order of every sum.

    columns: of a head in shared memory, at least its width.
    """
    if dtype == torch.float32:
        blocks = Blocks(32, 32, 4, 1) if width <= 80 else Blocks(32, 16, 8, 1)
    elif width <= 64:
        blocks = Blocks(64, 64, 4, 3)
    elif width <= 256:
        blocks = Blocks(64, 32, 4, 3)
    else:
        blocks = Blocks(16, 32, 4, 3)
    blocks = blocks._replace(
        queries=min(blocks.queries, max(16, triton.next_power_of_2(queries))),
        keys=min(blocks.keys, max(16, triton.next_power_of_2(keys))),
    )
    # q stays in shared memory, and the weights of the values pass through it
    step, rest = 2 * blocks.keys * columns, blocks.queries * (columns + blocks.keys)
    stages = stages_for_two(blocks.stages, step * dtype.itemsize, rest * dtype.itemsize, device)
    return blocks._replace(stages=stages)


def _alternatives(usual: Blocks, queries: int) -> list[Blocks]:
    """Return tuning candidates that keep the order of every sum: same key block, whole rows of scores per warp."""
    sizes = {(usual.queries, usual.warps)}
    if usual.queries >= 16 * usual.warps:
        sizes |= {size for size in ((64, 4), (128, 4), (128, 8)) if size[0] <= triton.next_power_of_2(queries)}
    return [Blocks(rows, usual.keys, warps, stages) for rows, warps in sorted(sizes) for stages in (2, 3, 4)]


def _split(width: int, dtype: torch.dtype, *, aligned: bool) -> tuple[int, int]:
    """Split the head width into two powers of two that cover it; the second is 0 if one is enough.

    Each part has at least 16 columns, the minimum for tensor cores. float32 uses two parts even where one would do,
    because shorter sums round less; beyond 128 columns registers do not allow it. 16-bit dtypes use one part if rows
    are not `aligned` to 16 elements: on an H200 (Triton 3.6, heads of 40 and 160) the second part was wrong in that
    case, as if most keys were missing from the sum. The generated code up to PTX shows no fault.
    """
    whole = max(16, triton.next_power_of_2(width))
    if not aligned and dtype != torch.float32:
        return whole, 0
    rest = max(16, triton.next_power_of_2(max(1, width - whole // 2)))
    halves = whole // 2 + rest < whole or (dtype == torch.float32 and 16 < whole <= 128)
    return (whole // 2, rest) if halves else (whole, 0)
