"""The benchmarks of whole models with a tiny one: rows, a model alone in its process, and profiles by class."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch

import fastdiff
from tests.support.planners import policy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "num_class_embeds": 3,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
}
TINY_PLANNER = policy(
    8, 16, _class_name="UNet1DModel", sample_size=8, in_channels=5, out_channels=5, extra_in_channels=0
)


TINY_TEXT = TINY | {
    "num_class_embeds": None,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
TINY_SDXL = TINY_TEXT | {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 10 + 6 * 4,
}


TINY_SAVED = {
    name: value for name, value in diffusers.UNet2DConditionModel(**TINY_TEXT).config.items() if name[0] != "_"
}
TINY_SAVED |= {"in_channels": 8, "out_channels": 8}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TINY_TEXT, id="sd"),
        pytest.param(TINY_SDXL, id="sdxl", marks=pytest.mark.slow),
        pytest.param(TINY_SAVED, id="saved", marks=pytest.mark.slow),
    ],
)
def test_models_of_a_text(harness, load, config):
    bench = load("bench_models")
    bench.WORKLOADS["tiny"] = (config, 2, None)
    row = bench.row("tiny", 1.0)
    assert row["max_abs_err"] < 2e-5 and row["fastdiff_ms"] > 0 and row["text_outside_ms"] > 0
    ours, given = bench.build(config, torch.float32)[1], bench.inputs(config, 2)
    assert torch.equal(bench.with_text_outside(ours, given)(), ours(*given).sample)
    sample, t, text, *rest = bench.in_dtype(bench.inputs(config, 2), torch.bfloat16)
    assert {each.dtype for each in (sample, text, *(rest[-1].values() if rest else ()))} == {torch.bfloat16}
    assert t.dtype == torch.int64


@pytest.mark.parametrize(
    ("config", "loops"),
    [
        pytest.param(TINY, "pictures_s", id="pictures"),
        pytest.param(TINY_PLANNER, "plans_s", id="plans", marks=pytest.mark.slow),
    ],
)
def test_models(harness, load, monkeypatch, config, loops):
    bench = load("bench_models")
    bench.WORKLOADS["tiny"] = (config, 2, 1e-3)
    row = bench.row("tiny", 1.0)
    assert row.keys() >= {"workload", "fastdiff_ms", "eager_ms", "speedup", "floor_ms", "max_abs_err", "eager_err"}
    assert row["max_abs_err"] < 2e-5
    assert row["floor_ms"] == pytest.approx(1e-3)
    assert row["speedup"] == pytest.approx(row["eager_ms"] / row["fastdiff_ms"])

    numbers = {"fastdiff": {"first_result_s": 1.0, "weights_bytes": 2, "peak_bytes": 3}}
    numbers |= {"eager": {"peak_bytes": 4}, "compile": {"peak_bytes": 5}}
    monkeypatch.setattr(bench, "GPU", True)
    monkeypatch.setattr(bench, "in_new_process", lambda who, name: numbers[who])
    monkeypatch.setattr(bench, "compile_diffusers", lambda theirs: theirs)
    monkeypatch.setattr(bench.sampling, "STEPS", 2)
    monkeypatch.setattr(bench.sampling, "PLAN_STEPS", 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = bench.row("tiny", 1.0)
    assert [row[f"{who}peak_bytes"] for who in ("", "eager_", "compile_")] == [3, 4, 5]
    assert row["weights_bytes"] == 2
    assert {"launches", "compile_ms", "compile_first_s"} <= row.keys()
    assert all(row[f"{who}_{loops}"] > 0 for who in ("fastdiff", "eager", "compile"))
    json.dumps(row)


@pytest.mark.slow
def test_precisions(harness, load, monkeypatch):
    bench = load("bench_precision")
    bench.WORKLOADS["tiny"] = (TINY, 2, None)
    monkeypatch.setattr(bench, "held_bytes", lambda call: call() and 0)
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    builds = {who: partial(bench.ours, precision=who) for who in ("int8", "fp8")}
    row = bench.row("tiny", {"fastdiff": bench.ours, **builds, "eager": bench.diffusers_model})
    assert row["fp8_weights"] == row["int8_weights"] < row["fastdiff_weights"] == row["eager_weights"]
    assert 0 < row["fastdiff_err"] < row["int8_err"] < 0.05 and row["int8_err"] < row["fp8_err"] < 0.2
    assert all(row[f"{who}_ms"] > 0 for who in ("fastdiff", "int8", "fp8", "eager"))


def test_a_model_alone_in_a_new_process(harness, load, monkeypatch):
    bench, run = load("bench_models"), []

    def new_process(command, env, **options):
        assert Path(env["TRITON_CACHE_DIR"]).is_dir() and not list(Path(env["TRITON_CACHE_DIR"]).iterdir())
        run.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='a library says hello\n{"peak_bytes": 7}\n')

    monkeypatch.setattr(bench.subprocess, "run", new_process)
    assert bench.in_new_process("eager", "ddpm32_b1") == {"peak_bytes": 7}
    assert run == [[sys.executable, str(BENCHMARKS / "models" / "alone.py"), "eager", "ddpm32_b1"]]


@pytest.mark.parametrize(
    "config",
    [pytest.param(TINY, id="pictures"), pytest.param(TINY_PLANNER, id="plans", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("who", ["fastdiff", "eager", "compile"])
def test_the_memory_of_a_model_alone(harness, load, monkeypatch, who, config):
    """The peak is that of warm calls, after the first ones release memory; the weights are the parameters."""
    alone, events = load("alone"), []
    alone.WORKLOADS["tiny"] = (config, 2, None)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: events.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: events.append("peak") or 99)
    monkeypatch.setattr(alone, "compile_diffusers", lambda theirs: theirs)
    of_zeros = alone.of_zeros

    def watched(kind, config, dtype):
        model = of_zeros(kind, config, dtype)
        model.register_forward_hook(lambda *_: events.append("call"))
        return model

    monkeypatch.setattr(alone, "of_zeros", watched)
    numbers = alone.measure_alone(who, "tiny")
    ours = ["call"] if who == "fastdiff" else []  # at another resolution
    assert events == ["call"] * 4 + ["empty_cache", "reset_peak_memory_stats"] + ["call"] * 3 + ["peak"] + ours
    assert numbers["peak_bytes"] == 99
    model = getattr(fastdiff if who == "fastdiff" else diffusers, alone.class_name(config)).from_config(config)
    assert numbers["weights_bytes"] == sum(parameter.nbytes for parameter in model.parameters())
    assert ("new_resolution_s" in numbers) == (who == "fastdiff")
    assert numbers["first_result_s"] > 0


def test_the_time_of_a_replay_by_class(load):
    pytest.importorskip("triton", reason="no Triton here")
    bench = load("profile_models")
    kernels = [
        bench.Kernel("conv_by_descriptors", 10.0, 20.0),
        bench.Kernel("normalise_kernel", 18.0, 25.0),  # starts before its inputs are ready
        bench.Kernel("merge_kernel", 19.0, 20.0),  # inside another
        bench.Kernel("Memcpy DtoD (Device -> Device)", 30.0, 31.0),
        bench.Kernel("linear_kernel", 31.0, 35.0),
    ]
    found = bench.breakdown(kernels[::-1])
    times = {name.removesuffix("_us"): value for name, value in found.items() if name.endswith("_us")}
    assert times == {
        "profiled": 25,
        "convolutions": 10,
        "norms": 8,
        "attention": 0,
        "products": 4,
        "others": 1,
        "gaps": 5,
        "overlap": 3,
    }
    assert times["profiled"] == sum(times[kind] for kind in bench.CLASSES) + times["gaps"] - times["overlap"]
    assert [found[f"{kind}_launches"] for kind in bench.CLASSES] == [1, 2, 0, 1, 1]


def test_the_profile_of_a_forward(harness, load, monkeypatch):
    """The profile is the one of median length, of a graph that contains only the forward."""
    pytest.importorskip("triton", reason="no Triton here")
    bench, graphs, lengths = load("profile_models"), [], iter([3.0, 9.0, 1.0, 5.0, 7.0])
    bench.MODELS_GPU["tiny"] = (TINY, 2, None)

    def capture(call):
        with torch.inference_mode():
            graphs.append(call().sample.shape)
        return call

    monkeypatch.setattr(bench, "capture", capture)
    monkeypatch.setattr(bench, "profiled", lambda replay: [bench.Kernel("conv_by_pointers", 0.0, next(lengths))])
    row = bench.row("tiny")
    assert graphs == [(2, 3, 8, 8)]
    assert row["workload"] == "tiny" and row["replay_us"] > 0
    assert row["profiled_us"] == row["convolutions_us"] == 5.0
    json.dumps(row)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("conv_by_pointers", "convolutions"),
        ("layer_norm_kernel", "norms"),
        ("attention_kernel", "attention"),
        ("denoise_kernel", "others"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float, 128, 16>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_cga1x1x1", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96, 128, 64, 4>>", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolutions"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>", "norms"),
        ("void at::native::elementwise_kernel<128, 4, at::native::silu_kernel>", "others"),
        ("Memset (Device)", "others"),
    ],
)
def test_the_class_of_a_kernel(load, kernel, expected):
    pytest.importorskip("triton", reason="no Triton here")
    assert load("profile_models").class_of(kernel) == expected


@pytest.mark.parametrize("half", ["decode", pytest.param("encode", marks=pytest.mark.slow)])
def test_an_autoencoder(harness, load, monkeypatch, half):
    bench = load("bench_autoencoder")
    levels = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    monkeypatch.setattr(bench, "SDXL_VAE", levels | {"block_out_channels": (8, 16), "norm_num_groups": 4})
    monkeypatch.setattr(bench.torch, "compile", lambda function, mode: function)
    bench.WORKLOADS["tiny"] = (half, 2, 16, "bf16")
    row = bench.row("tiny")
    assert all(row[f"{who}_ms"] > 0 for who in ("fastdiff", "eager", "compile"))
    assert 0 < row["max_abs_err"] <= 2 * row["eager_err"] + 1e-2
    assert row["launches"] > 0
    json.dumps(row)
