"""The benchmark of forwards on a CPU, with a tiny model."""

import json
import sys

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


@pytest.fixture
def folder(load, tmp_path):
    load("bench_cpu").save_model(tmp_path, TINY, 2)
    return tmp_path


@pytest.mark.parametrize(
    "peer, most",
    [
        ("fastdiff", 1e-5),
        ("bfloat16", 0.1),
        pytest.param("eager", 0, marks=pytest.mark.slow),
        ("channels_last", 1e-5),
    ],
)
def test_a_peer_answers(load, folder, monkeypatch, capsys, peer, most):
    peers = load("cpu_peers")
    monkeypatch.setattr(sys, "stdin", ["0", "profile"])
    monkeypatch.setattr(peers, "REPEATS", 2)
    peers.main(peer, folder, torch.get_num_threads())
    error, times, profile = (
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] in "[{0123456789"
    )
    assert error <= most and len(times) == 3 and min(times) > 0
    whole = profile.pop("whole")
    assert profile["convolutions"] > 0 and profile["norms"] > 0 and sum(profile.values()) == pytest.approx(whole)


@pytest.mark.parametrize(
    "function, expected",
    [
        ("mkldnn::_convolution_pointwise", "convolutions"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::native_group_norm", "norms"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::silu_", "activations"),
        ("aten::cat", "copies"),
        ("aten::add_", "others"),
    ],
)
def test_the_class_of_a_function(load, function, expected):
    assert load("cpu_peers").class_of_function(function) == expected


@pytest.mark.slow
def test_peers_take_turns_in_processes_of_their_own(load, folder, monkeypatch):
    bench = load("bench_cpu")
    monkeypatch.setattr(bench, "SECONDS", 0.01)
    monkeypatch.setattr(bench, "BUSY_SECONDS", 0.01)
    peers = ("fastdiff", "bfloat16")  # neither imports diffusers, and their threads wait without spinning
    row = bench.row(folder, 2, peers, rounds=1)
    for name in peers:
        assert row[f"{name}_first_s"] > 0 and row[f"{name}_ms"] > 0 and row[f"{name}_busy_ms"] > 0
    assert row["fastdiff_err"] < 1e-5 < row["bfloat16_err"] < 0.1 and row["profile_whole_ms"] > 0


def test_a_process_that_ends_early_is_named(load, folder):
    with pytest.raises(SystemExit, match=r"cpu_peers\.py nobody .* ended early"):
        load("bench_cpu").Peer("nobody", folder, 1)
