"""The experiment of benchmarks/megakernel.py: a chain of layers in one launch, against torch and the product."""

import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here")
pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FULL = {"ddpm32_b1-16x16", "ddpm32_b1-down", "ddpm32_b1-up"}
CHAINS = {
    "down-pair-up": (8, ["down", "block", "pair", "up"]),
    "block-of-256-pixels": (16, ["block"]),
    "pair-first": (4, ["pair", "down"]),
}


@pytest.fixture
def bench(monkeypatch, device):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("megakernel")
    monkeypatch.setattr(module, "DEVICE", device)
    yield module
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def needs_triton(runs_triton) -> None:
    if not runs_triton:
        pytest.skip("the kernel runs in the interpreter or on a GPU")


def poison(chain) -> None:
    for tensor in chain.memory:
        tensor.fill_(float("nan"))


def assert_chain(bench, assert_accurate, layers, x, temb, outputs) -> None:
    expected = bench.torchs(*bench.widened(layers, x.x, temb, torch.float64))
    for output, torchs, truth in zip(outputs, bench.torchs(layers, x.x, temb), expected, strict=True):
        assert_accurate(output, torchs, truth)


@torch.inference_mode()
@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize(
    "name", ["down-pair-up", "pair-first", pytest.param("block-of-256-pixels", marks=pytest.mark.slow)]
)
def test_every_layer_is_accurate(name, bench, dot_dtype, assert_accurate):
    layers, x, temb = bench.build(*CHAINS[name], width=64, groups=8, dtype=dot_dtype)
    chain = bench.Chain(bench.tensors(layers), x.x, temb)
    assert_chain(bench, assert_accurate, layers, x, temb, chain.run())


@torch.inference_mode()
@pytest.mark.usefixtures("needs_triton")
def test_a_large_mean_cancels_no_digits(bench, assert_accurate):
    layers, x, temb = bench.build(4, ["block"], width=64, groups=8, dtype=torch.float32)
    x.x.add_(1000)
    layers[0][0].conv1.bias.add_(1000)
    chain = bench.Chain(bench.tensors(layers), x.x, temb)
    assert_chain(bench, assert_accurate, layers, x, temb, chain.run())


@torch.inference_mode()
@pytest.mark.usefixtures("needs_triton")
def test_a_row_of_the_script(bench, monkeypatch):
    monkeypatch.setitem(bench.WORKLOADS, "tiny", (4, ["block"]))
    monkeypatch.setattr(bench, "compiled", lambda function: function)
    monkeypatch.setattr(bench, "measure", lambda calls, **options: dict.fromkeys(calls, 0.001))
    row = bench.row("tiny", width=64, groups=8, dtype=torch.float16)
    assert {"megakernel_us", "stages_us", "barriers_us", "fastdiff_us", "compile_us", "gain"} <= row.keys()
    assert row["stages"] == 5 and row["megakernel_max_abs_err"] < 0.01


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("graphed", [False, True], ids=["launched", "graphed"])
@pytest.mark.parametrize("name", sorted(FULL))
def test_no_race(name, graphed, bench, dtype, assert_accurate):
    """At full size: as accurate as the product, and 50 times, poisoned before each, the bits of a launch a stage."""
    layers, x, temb = bench.build(*bench.WORKLOADS[name], width=256, groups=32, dtype=dtype)
    chain = bench.Chain(bench.tensors(layers), x.x, temb)
    expected = [output.clone() for output in chain.run_stages()]
    assert_chain(bench, assert_accurate, layers, x, temb, expected)
    truth = bench.torchs(*bench.widened(layers, x.x, temb, torch.float64))[-1]
    assert_accurate(expected[-1], bench.product(layers, x, temb)[-1], truth)
    run = chain.run
    run()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    for _ in range(50):
        poison(chain)
        run()
        for output, known in zip(chain.outputs, expected, strict=True):
            assert torch.equal(output, known)


@pytest.fixture
def for_sm_90(bench, monkeypatch):
    """compile(dtype): the kernel of one launch, compiled for sm_90."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has no compiler")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import driver

    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: target))
    kernel = sys.modules["megakernel_device"].chain_kernel
    types = ["*i64", "*i64", "i32", "i32", "fp32", "constexpr", "constexpr"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    options = {"num_warps": 4, "num_stages": 4, "launch_cooperative_grid": True, "enable_fp_fusion": False}

    def compile_for(dtype: str):
        constants = {(5,): getattr(triton.language, dtype), (6,): True}
        source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constants, aligned)
        return triton.compile(source, target, options)

    return compile_for


@pytest.mark.slow
def test_compiles_for_sm_90(for_sm_90):
    """All loads and stores of tiles are of 16 bytes, and the barrier's counter is released and acquired."""
    compiled = for_sm_90("bfloat16")
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024
    assert "global.gpu.release.add.u64" in ptx and "ld.acquire.gpu.global.s64" in ptx
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx and "cg.b32" not in ptx


@pytest.mark.slow
def test_a_float32_product_of_a_step_begins_at_zero(for_sm_90):
    """Else all steps were one sum of 576 products, twice as far off as torch's."""
    ttir = for_sm_90("float32").asm["ttir"]
    zero = re.search(r"(%\w+) = arith.constant dense<0.0+e\+00> : tensor<64x32xf32>", ttir)
    product = re.search(r"tt.dot %\w+, %\w+, (%\w+) : tensor<64x64xf32>", ttir)
    assert zero and product and product[1] == zero[1]
