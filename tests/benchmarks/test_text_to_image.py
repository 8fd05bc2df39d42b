"""The benchmark of whole pictures from prompt to PNG, with folders of tiny pipelines."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastdiff.text.tokenizer import CLIPTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LEVELS = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "transformer_layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
UNET = LEVELS | {"sample_size": 16, "cross_attention_dim": 8}
VAE = {
    "block_out_channels": (4, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
    "sample_size": 32,
}
TEXT = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
TINY = {
    "SD15": UNET,
    "SD15_VAE": VAE,
    "SD15_TEXT": TEXT,
    "SDXL": UNET
    | {"cross_attention_dim": 16, "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 8 + 6 * 4},
    "SDXL_VAE": VAE,
    "SDXL_TEXT_2": TEXT | {"projection_dim": 8},
}


@pytest.fixture
def bench(load, monkeypatch):
    bench, configs = load("bench_text_to_image"), load("stable_diffusion")
    for name, config in TINY.items():
        monkeypatch.setattr(configs, name, getattr(configs, name) | config)
    monkeypatch.setattr(load("text_folders"), "DEVICE", torch.device("cpu"))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 99)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other at every tiny operation on busy cores
    yield bench
    torch.set_num_threads(threads)


@pytest.fixture(params=["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def folder(request, bench, tmp_path):
    bench.make_folder(request.param, tmp_path)
    return tmp_path


def check(numbers: dict[str, float], new_shapes: bool) -> None:
    assert numbers["first_picture_s"] > numbers["loaded_s"] > 0
    assert numbers["picture_s"] > 0
    assert numbers["peak_bytes"] == numbers["cold_peak_bytes"] == 99
    assert 0 < numbers["picture_err"] < 0.1
    assert ({"new_size_s", "new_batch_s"} <= numbers.keys()) == new_shapes
    json.dumps(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["eager", "fastdiff", "accelerate", "compile"])  # offload needs a GPU
def test_a_pipeline_alone(bench, load, monkeypatch, folder, who):
    alone = load("pictures_alone")
    monkeypatch.setattr(load("alone").torch, "compile", lambda function, **options: function)
    check(alone.measure_alone(who, folder, 3, time.time()), new_shapes=who in ("fastdiff", "accelerate"))


@pytest.mark.slow
def test_the_tokenizer_is_one_of_single_bytes(folder):
    ours = CLIPTokenizer(folder / "tokenizer")
    assert ours.length == 77
    ids = ours("a bé").ids
    assert len(set(ids[1:5])) == 4 and ids[0] == 512 and ids[5:] == (513,) * 72


def test_each_workload_has_a_process_with_empty_caches(bench, monkeypatch):
    made, run = [], []

    def new_process(command, env, **options):
        caches = [Path(env[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
        assert all(cache.parent.is_dir() and not cache.exists() for cache in caches)
        run.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='a library says hello\n{"picture_s": 7.0}\n')

    monkeypatch.setattr(bench, "make_folder", lambda name, folder: made.append((name, str(folder))))
    monkeypatch.setattr(bench.subprocess, "run", new_process)
    rows = list(bench.rows(["sd15-eager", "sdxl-fastdiff", "sd15-fastdiff"]))
    assert rows == [{"workload": name, "picture_s": 7.0} for name in ("sd15-eager", "sd15-fastdiff", "sdxl-fastdiff")]
    assert [name for name, _ in made] == ["sd15", "sdxl"]
    sd15, sdxl = (folder for _, folder in made)
    expected = [("eager", sd15, "50"), ("fastdiff", sd15, "50"), ("fastdiff", sdxl, "30")]
    script = str(BENCHMARKS / "pictures" / "pictures_alone.py")
    assert [command[:-1] for command in run] == [[sys.executable, script, *each] for each in expected]
    assert all(0 <= time.time() - float(command[-1]) < 60 for command in run)


def test_a_model_that_nobody_asks_for_is_not_made(bench, monkeypatch):
    monkeypatch.setattr(bench, "make_folder", lambda name, folder: pytest.fail(name))
    assert list(bench.rows([])) == []
