"""A worker writes exactly the files that this process looks for, and no two workers write the same file."""

import hashlib
import os
import pickle
import subprocess
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import conv2d
from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host import compiling, launching
from fastdiff.kernels.host.compiling import Turn, only_compiling
from fastdiff.kernels.host.weights import FP8, quantise
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans import choices
from tests.kernels.host.compiling.stand_ins import launchers, narrow, wait_for
from tests.support.waiting import TIMEOUT

pytest.importorskip("triton", reason="no Triton here")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver"),
]


KEYS = """
import hashlib, pickle, sys
from triton.compiler import get_cache_key, make_backend
from triton._C.libtriton import get_cache_invalidating_env_vars

for told in reversed(pickle.load(sys.stdin.buffer)):
    source, backend = told.source(), make_backend(told.target)
    key = get_cache_key(source, backend, backend.parse_options(told.options), get_cache_invalidating_env_vars())
    print(hashlib.sha256(key.encode()).hexdigest())
assert "torch" not in sys.modules
"""


class Keeping(triton.AsyncCompileMode):
    """Compile nothing, but keep Triton's key of each kernel and the description that a worker would get."""

    def __init__(self):
        super().__init__(executor=None)
        self.keys, self.descriptions = [], []

    def submit(self, key, make, *_):
        self.keys.append(hashlib.sha256(key.encode()).hexdigest())
        self.descriptions.append(compiling._description(make))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emoji64", "emoji64-dit"])
def test_a_worker_finds_the_same_key_for_every_kernel(made, monkeypatch, name):
    """A worker is another process, and gets the kernels in another order."""
    folder = hub.resolve(name)
    kind = fastdiff.UNet2DModel if (folder / "unet").is_dir() else fastdiff.DiTTransformer2DModel
    model = (
        kind.from_config(read_json(folder / kind.part.name / "config.json")).to(torch.bfloat16).to_empty(device="meta")
    )
    zeros = torch.zeros(2, dtype=torch.int64, device="meta")
    x = torch.empty(2, model.config.sample_size, model.config.sample_size, 3, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    assert_same_keys(lambda: model.predict(x, model.conditioning(zeros, zeros)), monkeypatch, at_least=6)


def test_variants_of_a_first_result_are_few(made, monkeypatch):
    """So is their C code, which compiles as long as a kernel. More variants cost seconds: add them only if needed."""
    config = read_json(hub.resolve("emoji64") / "unet" / "config.json")
    model = fastdiff.UNet2DModel.from_config(config).to(torch.bfloat16).to_empty(device="meta")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    monkeypatch.setattr(launching, "INTERPRETER_MULTIPROCESSORS", 132)
    monkeypatch.setattr(launching, "only_compiles", ContextVar("only_compiles", default=True))
    zeros, known, found = torch.zeros(1, dtype=torch.int64, device="meta"), set(), []
    for side in (64, 96):  # its own size, then another
        x = torch.empty(1, side, side, 3, dtype=torch.bfloat16, device="meta")
        with Keeping() as kept:
            model.predict(x, model.conditioning(zeros, zeros))
        new = {key: told for key, told in zip(kept.keys, kept.descriptions, strict=True) if key not in known}
        known |= new.keys()
        found.append((len(new), len({told.arguments() for told in new.values()})))
    (kernels, launches), (more_kernels, more_launches) = found
    assert kernels <= 33 and launches <= 17
    assert more_kernels <= 24 and more_launches <= 13


@pytest.mark.slow
def test_a_worker_finds_the_same_key_for_gluon(made, monkeypatch):
    q, k, v = torch.empty(1, 256, 3 * 1152, dtype=torch.bfloat16, device="meta").chunk(3, dim=-1)
    weight = quantise(torch.empty(4608, 1152, device="meta"), FP8)
    x, taps = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 16, 16, 64), (64, 64, 3, 3)))

    def run() -> None:
        attention.hopper(q, k, v, heads=16)
        linear.hopper(q, weight)
        conv2d.hopper(x, quantise(taps, FP8), padding=1)

    assert_same_keys(run, monkeypatch, at_least=3)


def test_a_launch_that_compiles_alone_hashes_callees_first(made, monkeypatch):
    """Otherwise Triton 3.6 and 3.7 give the kernel another key than workers and `fastdiff warm` do."""
    hashed = []
    monkeypatch.setattr(launching, "settle_key", hashed.append)
    kernel = SimpleNamespace(run=lambda *args, **options: hashed.append("run"))
    launching.launch(kernel, (1,), torch.empty(1), num_warps=1)
    assert hashed == [kernel, "run"]


def assert_same_keys(run, monkeypatch, at_least: int) -> None:
    """Assert that every kernel that `run` launches has the same key here and in a worker's program."""
    monkeypatch.setattr(launching, "only_compiles", ContextVar("only_compiles", default=True))
    with Keeping() as kept:
        run()
    command = compiling._worker_command()
    command[command.index(compiling.WORKER)] = "import sys; sys.path[:] = sys.argv[1:]\n" + KEYS
    found = subprocess.run(command, input=pickle.dumps(kept.descriptions), stdout=subprocess.PIPE, timeout=TIMEOUT)
    assert found.returncode == 0
    assert len(set(kept.keys)) >= at_least and found.stdout.decode().split() == kept.keys[::-1]


@pytest.mark.slow
def test_a_worker_hears_the_hash_of_triton(made, workers, monkeypatch, tmp_path):
    """Otherwise each worker would take 0.2 s to compute it."""
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "of this process")
    with only_compiling():
        narrow()
        wait_for(*launchers(tmp_path))
    assert made == {"read": 2}


def test_c_code_is_compiled_once_for_equal_arguments(made, workers, tmp_path):
    """Constants are not arguments."""
    with only_compiling():
        for shares in (16, 32, 64):
            narrow(shares)
        wait_for(*launchers(tmp_path))
    _, scales = launchers(tmp_path)
    assert sum(made.values()) == 4 and scales.read_text().count("\n") == 1


def test_the_longest_jobs_are_taken_first():
    queue, turns = compiling._Queue(), [Turn.C, Turn.TRITON, Turn.GLUON, Turn.TRITON]
    jobs = [compiling._Job(None, None) for _ in turns]
    for job, turn in zip(jobs, turns, strict=True):
        queue.put(job, turn)
    assert [queue.get_if_any() for _ in range(5)] == [jobs[2], jobs[1], jobs[3], jobs[0], None]
    queue.put(jobs[0], Turn.GLUON)
    queue.end_one()
    assert [queue.get(), queue.get()] == [None, jobs[0]]


def described(**signature) -> compiling.Description:
    return compiling.Description("module", "name", signature, {}, {}, {}, None, "")


def test_arguments_of_c_code_know_the_dimensions_of_a_descriptor_alone():
    tile, other = (described(x=f"tensordesc<bf16[{shape}]>", n="i32") for shape in ("64, 128", "16, 64"))
    assert tile.arguments() == other.arguments()
    for kinds in (
        {"x": "tensordesc<bf16[1, 64, 128]>", "n": "i32"},
        {"x": "tensordesc<fp16[64, 128]>", "n": "i32"},
        {"x": "tensordesc<bf16[64, 128]>", "n": "i64"},
        {"x": "tensordesc<bf16[64, 128]>", "n": "constexpr"},
        {"x": ("*bf16", "i32"), "n": "i32"},
    ):
        assert described(**kinds).arguments() != tile.arguments()
