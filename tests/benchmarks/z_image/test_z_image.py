"""The benchmark of Z-Image, with tiny models on the CPU."""

import json
import sys

import pytest
import torch

from fastdiff.requests import png_pixels


@pytest.fixture
def bench(load, harness, monkeypatch, tmp_path):
    """The benchmark's module, and what its workloads share."""
    monkeypatch.setattr(sys, "argv", ["bench_z_image.py", "--tiny"])
    module = load("bench_z_image")
    module.PARSER.add_argument("--tiny", action="store_true")
    return module, module.Bench(tmp_path)


def test_a_step_is_timed_without_the_rest_of_the_call(bench, monkeypatch):
    module, shared = bench
    monkeypatch.setattr(module, "seconds_of", lambda call: 1 + 0.25 * call.keywords["steps"])
    assert module.step(shared) == {"bf16_ms": 250}


def test_the_peer_has_our_weights(bench, monkeypatch):
    module, shared = bench
    row = module.peer(shared, compiled=False)
    assert row.keys() == {"first_s", "fastdiff_ms", "peer_ms", "difference"} and 0 < row["difference"] < 0.03
    ours = next(shared.pipelines())[1].denoiser
    monkeypatch.setattr(shared.parts, "transformer", {k: v / 2 for k, v in shared.parts.transformer.items()})
    monkeypatch.setattr(shared, "pipelines", lambda: iter([("bf16", type("", (), {"denoiser": ours}))]))
    assert module.peer(shared, compiled=False)["difference"] > 0.1


def test_each_picture_has_a_prompt_of_its_own(bench, monkeypatch):
    module, shared = bench
    seen, encoded = [], []
    draw = shared.draw
    monkeypatch.setattr(shared, "draw", lambda pipe, **options: seen.append(options["prompt"]) or draw(pipe, **options))
    monkeypatch.setattr(
        module, "encode_pixels", lambda image: encoded.append(image.size) or png_pixels.encode_pixels(image)
    )
    row = module.png(shared)
    assert row.keys() == {"bf16_s", "bf16_latents_s"}
    assert len({*seen}) == len(seen) == 12 and len({*map(len, seen)}) == 1  # they share a CUDA graph
    assert encoded == [(64, 64)] * 8


def test_the_folder_draws_in_8_bits(bench, load):
    module, shared = bench
    row = load("limited").measure_limited(str(shared.folder), 64, 2, module.LIMIT)
    assert json.loads(json.dumps(row))["limit_bytes"] == 14e9 and row["picture_s"] > 0


def test_operations_of_a_full_step(bench):
    module, shared = bench
    shared.parts.sizes, shared.side = module.FULL, 1024
    assert module.operations(shared) == pytest.approx(55.6e12, rel=0.01)


def test_weights_keep_the_size_of_what_they_read(bench):
    _, shared = bench
    product = shared.parts.transformer["layers.0.feed_forward.w1.weight"].float()
    assert (product @ torch.ones(128)).std().item() == pytest.approx(1, rel=0.2)
    norm = shared.parts.transformer["layers.0.attention_norm1.weight"].float()
    assert (norm - 1).abs().max() < 0.1
