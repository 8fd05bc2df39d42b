"""Adapters of peft in live pipelines on a GPU: diffusers' pictures without a new CUDA graph, and errors in 16 bits."""

import pytest
import torch

import fastdiff
from tests.support.live.loras import random_lora
from tests.support.live.pairs import Pair, away, draw
from tests.support.text_pipelines import KINDS

pytest.importorskip("peft")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # peft, at a second adapter
]


@pytest.fixture(params=KINDS)
def pair(request):
    made = Pair(request.param, accelerated=False)
    made.both(lambda pipe: pipe.to("cuda"))
    fastdiff.accelerate(made.fast)
    return made


def graphs(pair):
    return [id(graph) for each in pair.ours._graphs.values() for graph in each._graphs.values()]


def test_no_change_of_adapters_makes_a_graph(pair):
    for _ in range(2):  # the second run uses CUDA graphs from its first step
        plain = pair.check()
    before = graphs(pair)
    assert before
    pair.load("first", "second")
    pair.both(lambda pipe: pipe.set_adapters(["first", "second"], [0.7, -0.4]))
    mixed = pair.check()
    assert away(mixed, plain)
    half = pair.check(cross_attention_kwargs={"scale": 0.5})
    assert away(half, mixed)
    assert torch.equal(pair.check(), mixed)
    for seed, rank in ((10, 4), (11, 2), (12, 6)):  # of equal rank: nothing but the values changes
        pair.hotswap(random_lora(pair.plain.unet, seed, rank))
        swapped = pair.check()
        assert away(swapped, mixed)
        mixed = swapped
    pair.both(lambda pipe: pipe.fuse_lora())
    pair.check()
    pair.both(lambda pipe: pipe.unfuse_lora())
    pair.both(lambda pipe: pipe.disable_lora())
    assert not away(pair.check(), plain)  # peft's unfuse rounds
    pair.both(lambda pipe: pipe.unload_lora_weights())
    pair.check()
    assert graphs(pair) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_error_of_16_bits_is_diffusers(pair, dtype):
    pair.load("first")
    exact = draw(pair.plain)
    pair.both(lambda pipe: pipe.to(dtype))
    theirs, ours = draw(pair.plain), draw(pair.fast)
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
