"""RMSNorm and rotary position embedding of queries and keys before attention, in one launch.

A program reads some heads of a token once. It normalises each head, turns its pairs of channels and rounds once.
"""

from dataclasses import KW_ONLY, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.host.calls import Call
from fastdiff.kernels.host.launching import DTYPES, launch, side_by_side
from fastdiff.kernels.host.lazy_triton import triton
from fastdiff.kernels.plans.dispatch import Operation

HEADS = 32  # most heads of a program, a power of two; chosen, not measured
MAX_WIDTH = 512  # most channels of a head; chosen, not measured


@dataclass(frozen=True, eq=False)
class RotaryCall(Call[Tensor]):
    """RMSNorm of each head, then its pairs of channels turned by the angles of the token's position.

    RMSNorm is from Zhang and Sennrich 2019 (arXiv 1910.07467), and the embedding from Su et al. 2021 (arXiv
    2104.09864), as in diffusers' Z-Image and transformers' Qwen3. All is in float32 and rounded once.

    Args:
        x: (N, L, heads * d), float32, float16 or bfloat16: queries and keys side by side, as columns of a fused
            projection; rows may be strided.
        cos, sin: of the angles, (N, L, d / 2) or (1, L, d / 2) float32.
        norms: the weights of the queries' and of the keys' norm, (d,) of any float dtype each; None for no norm.
        queries: the number of heads that are queries; they come first.
        eps: added to the mean square.
        halves: pairs are channels i and i + d / 2, as in Qwen3, not 2 i and 2 i + 1, as in Z-Image.

    Returns:
        (N, L, heads * d), contiguous, the dtype of x.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """

    x: Tensor
    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    _: KW_ONLY
    queries: int
    eps: float
    halves: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def width(self) -> int:
        """Channels per head."""
        return 2 * self.cos.shape[-1]

    @property
    def heads(self) -> int:
        return self.x.shape[2] // self.width

    def check(self) -> None:
        x = self.x
        if x.ndim != 3 or not x.is_floating_point():
            raise ValueError(f"x: expected floats (N, L, heads * d), got {x.dtype} {tuple(x.shape)}")
        n, tokens, channels = x.shape
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if table.dtype != torch.float32 or table.device != x.device:
                raise ValueError(f"{name}: {table.dtype} on {table.device}; expected float32 on {x.device}")
            if table.ndim != 3 or table.shape[0] not in (1, n) or table.shape[1] != tokens or table.shape[2] < 1:
                raise ValueError(f"{name}: expected (N, L, d / 2) or (1, L, d / 2), got {tuple(table.shape)}")
        if self.sin.shape != self.cos.shape:
            raise ValueError(f"sin: {tuple(self.sin.shape)}, but cos is {tuple(self.cos.shape)}")
        if channels % self.width or not 0 <= self.queries <= self.heads:
            raise ValueError(f"queries: {self.queries} of {channels} channels in heads of {self.width}")
        for name, weight in zip(("queries' norm", "keys' norm"), self.norms or (), strict=False):
            if tuple(weight.shape) != (self.width,):
                raise ValueError(f"{name}: expected {(self.width,)}, got {tuple(weight.shape)}")
            if weight.device != x.device or not weight.is_floating_point():
                raise ValueError(f"{name}: {weight.dtype} on {weight.device}, but x is {x.dtype} on {x.device}")

    def reference(self) -> Tensor:
        rows = self.x.unflatten(-1, (-1, self.width)).float()  # (N, L, heads, d)
        if self.norms is not None:
            parts = rows.split((self.queries, self.heads - self.queries), dim=2)
            normed = [
                F.rms_norm(part, part.shape[-1:], weight.float(), self.eps)
                for part, weight in zip(parts, self.norms, strict=True)
            ]
            rows = torch.cat(normed, dim=2)
        pairs = rows.unflatten(-1, (2, -1)).unbind(-2) if self.halves else rows.unflatten(-1, (-1, 2)).unbind(-1)
        first, second = pairs
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        turned = (first * cos - second * sin, second * cos + first * sin)
        y = torch.cat(turned, dim=-1) if self.halves else torch.stack(turned, dim=-1).flatten(-2)
        return y.to(self.x.dtype).flatten(2)

    def obstacle(self) -> str | None:
        if self.x.dtype not in DTYPES or self.x.numel() == 0 or self.width > MAX_WIDTH:
            return f"no kernel for {self.x.dtype} of {tuple(self.x.shape)} in heads of {self.width}"
        return None

    def kernel(self) -> Tensor:
        from fastdiff.kernels.device.rotary import rotary_kernel  # imports Triton

        x, cos, sin = side_by_side(self.x), side_by_side(self.cos), side_by_side(self.sin)
        (n, tokens, channels), half, keys = x.shape, self.width // 2, self.heads - self.queries
        query, key = map(side_by_side, self.norms or (None, None))
        if query is not None and key is not None and query.dtype != key.dtype:
            query, key = query.float(), key.float()  # the kernel reads one of them
        y = torch.empty(n, tokens, channels, dtype=x.dtype, device=x.device)
        # blocks depend on the heads alone: the number of lanes sets the order of a sum
        block, pairs = (triton.next_power_of_2(size) for size in (min(HEADS, max(self.queries, keys)), half))
        blocks = triton.cdiv(self.queries, block) + triton.cdiv(keys, block)
        by_picture = [table.stride(0) if len(table) > 1 else 0 for table in (cos, sin)]
        launch(
            rotary_kernel, (n * tokens, blocks),
            y, x, cos, sin, query, key, tokens, self.heads, self.queries, self.eps,
            *x.stride()[:2], by_picture[0], cos.stride(1), by_picture[1], sin.stride(1),
            HALF=half, HALVES=self.halves, BH=block, BC=pairs, num_warps=min(4, max(1, block * pairs // 256)),
        )  # fmt: skip
        return y


rotary = Operation("rotary", RotaryCall)
