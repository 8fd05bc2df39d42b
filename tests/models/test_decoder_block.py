"""A decoder block made of the denoisers' kernels, compared with torch: RMSNorm, causal attention, SwiGLU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.kernels.attention import attention
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.swiglu import swiglu

HEADS, WIDTH, HIDDEN, EPS = 4, 128, 320, 1e-6
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def decoder_block(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """x (N, L, C) -> (N, L, C), in seven launches."""
    qkv = linear(x, w["qkv"], rms_norm=(w["norm1"], EPS))
    x = linear(attention(*qkv.chunk(3, dim=-1), heads=HEADS, causal=True), w["out"], residual=x)
    return linear(swiglu(layer_norm(x, w["norm2"], eps=EPS, rms=True), w["gate_up"]), w["down"], residual=x)


def plain(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """The same block in plain torch, as in Llama (Touvron et al. 2023, arXiv 2302.13971) but without positions."""
    h = F.rms_norm(x, (WIDTH,), w["norm1"], EPS)
    q, k, v = (F.linear(h, part).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in w["qkv"].chunk(3))
    scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    h = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = x + F.linear(h, w["out"])
    gate, up = w["gate_up"].chunk(2)
    h = F.rms_norm(x, (WIDTH,), w["norm2"], EPS)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), w["down"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request):
    return request.param


@pytest.fixture
def block():
    """Tokens (2, 77, C) and the weights of a block, float64 on the CPU."""
    shapes = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {name: normal(*shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    return normal(2, 77, WIDTH), weights | {f"norm{i}": 1 + 0.1 * normal(WIDTH) for i in (1, 2)}


def cast(block, dtype, device="cpu"):
    x, weights = block
    return x.to(device, dtype), {name: tensor.to(device, dtype) for name, tensor in weights.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
def test_against_plain_torch(block, dtype, device):
    rounded = cast(block, dtype)
    truth = plain(*cast(rounded, torch.float64))
    actual = decoder_block(*cast(rounded, dtype, device)).cpu()
    error, torchs = ((y.double() - truth).norm() for y in (actual, plain(*cast(rounded, dtype, device)).cpu()))
    assert actual.dtype == dtype
    assert error <= 2 * torchs, f"{error / truth.norm():.2e} against torch's {torchs / truth.norm():.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_no_token_sees_a_later_one(block, dtype, device):
    x, weights = cast(block, dtype, device)
    later = x.clone()
    later[:, 40:] += 1
    before, after = decoder_block(x, weights), decoder_block(later, weights)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40], after[:, 40])
