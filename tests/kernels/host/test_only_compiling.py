"""Kernels compiled by `only_compiling`, in interpreters of their own: without a GPU, whose driver is a stand-in."""

import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from contextvars import ContextVar
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace

import pytest
import torch

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.kernels.attention import attention
from fastdiff.kernels.device import group_norm as device_group_norm
from fastdiff.kernels.device.layer_norm import layer_norm_kernel
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host import compiling, dispatch, launching
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.launching import launch

triton = pytest.importorskip("triton", reason="no Triton here")
tl = triton.language
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver"),
]
KERNELS = ["moments_kernel", "normalise_kernel"]  # what `normalise` launches
# Stands for the class that makes C code of a kernel's launch: it writes down who made it of what, and with which torch.
LAUNCHER = """
import os, sys
from pathlib import Path

class Launcher:
    def __init__(self, src, metadata):
        lines = [metadata.hash, str(os.getpid()), str("torch" in sys.modules)]
        Path(os.environ["TRITON_CACHE_DIR"], f"launcher of {metadata.name}").write_text("\\n".join(lines))
"""


@triton.jit
def broken(x_ptr):
    tl.static_assert(False, "this kernel is broken")


@pytest.fixture
def made(monkeypatch, tmp_path) -> Counter:
    """How many kernels this process compiled, and how many it read from Triton's files."""
    from triton.backends.compiler import GPUTarget

    (tmp_path / "stand_in_launcher.py").write_text(LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stand_in_launcher", raising=False)
    from stand_in_launcher import Launcher

    counts = Counter()
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=Launcher,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def listener(*, cache_hit, **_):
        counts["read" if cache_hit else "compiled"] += 1

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    forget_kernels(monkeypatch)
    return counts


def forget_kernels(monkeypatch) -> None:
    """Drop what this process holds of them, not their files."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fastdiff.kernels.device.")]
    for kernel in [broken, *(value for module in modules for value in vars(module).values())]:
        if isinstance(kernel, triton.JITFunction):
            monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
            monkeypatch.setattr(kernel, "hash", None)
            monkeypatch.setattr(kernel, "used_global_vals", {})


@pytest.fixture
def workers(monkeypatch) -> list[Popen]:
    """Those started; afterwards they have ended, and the threads that fed them."""
    started, threads = [], threading.active_count()

    class Recorded(Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(compiling, "Popen", Recorded)
    yield started
    assert all(worker.returncode is not None for worker in started)
    assert all(worker.stdin.closed and worker.stdout.closed for worker in started)
    assert threading.active_count() == threads


def normalise() -> None:
    group_norm.kernel(torch.empty(2, 64, 64, 64, device="meta"), 32, eps=1e-5, activation="silu")


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"nobody wrote {paths}"
        time.sleep(0.01)


def launchers(tmp_path) -> list[Path]:
    return [tmp_path / f"launcher of {name}" for name in KERNELS]


def test_workers_compile_while_the_block_runs_and_this_process_reads(made, workers, tmp_path, capfd):
    with only_compiling():
        normalise()
        wait_for(*launchers(tmp_path))
        assert made == {}
    assert made == {"read": 2} and len(workers) == 1
    assert capfd.readouterr() == ("", "")
    hashes, processes, torches = zip(*(path.read_text().split("\n") for path in launchers(tmp_path)), strict=True)
    kernels = [kernel for name in KERNELS for kernel in cached(name)]
    assert [kernel.hash for kernel in kernels] == list(hashes)
    assert set(processes) == {str(workers[0].pid)}
    assert set(torches) == {"False"}


def cached(name: str) -> list:
    """The compiled kernels of this name that this process holds."""
    caches = vars(device_group_norm)[name].device_caches.values()
    return [kernel for each in caches for kernel in each[0].values()]


KEYS = """
import hashlib, pickle, sys
from triton.compiler import get_cache_key, make_backend
from triton._C.libtriton import get_cache_invalidating_env_vars

for description in reversed(pickle.load(sys.stdin.buffer)):
    told = pickle.loads(description)
    source, backend = told.source(), make_backend(told.target)
    key = get_cache_key(source, backend, backend.parse_options(told.options), get_cache_invalidating_env_vars())
    print(hashlib.sha256(key.encode()).hexdigest())
assert "torch" not in sys.modules
"""


class Keeping(triton.AsyncCompileMode):
    """Compiles nothing: it keeps Triton's key of each kernel, and what a worker would be told of it."""

    def __init__(self):
        super().__init__(executor=None)
        self.keys, self.descriptions = [], []

    def submit(self, key, make, *_):
        self.keys.append(hashlib.sha256(key.encode()).hexdigest())
        self.descriptions.append(compiling._description(make))


@pytest.mark.parametrize("name", ["emoji64", "emoji64-dit"])
def test_a_worker_finds_the_same_key_for_every_kernel(made, monkeypatch, name):
    """A worker is another process, and hears of the kernels in another order."""
    folder = hub.resolve(name)
    kind = fastdiff.UNet2DModel if (folder / "unet").is_dir() else fastdiff.DiTTransformer2DModel
    model = kind.from_config(read_json(folder / kind.part.name / "config.json")).to("meta", torch.bfloat16)
    zeros = torch.zeros(2, dtype=torch.int64, device="meta")
    x = torch.empty(2, model.config.sample_size, model.config.sample_size, 3, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(dispatch, "_unavailable", lambda device: None)
    assert_same_keys(lambda: model.predict(x, model.conditioning(zeros, zeros)), monkeypatch, at_least=6)


def test_a_worker_finds_the_same_key_for_gluon(made, monkeypatch):
    q, k, v = torch.empty(1, 256, 3 * 1152, dtype=torch.bfloat16, device="meta").chunk(3, dim=-1)
    assert_same_keys(lambda: attention.hopper(q, k, v, heads=16), monkeypatch, at_least=1)


def assert_same_keys(run, monkeypatch, at_least: int) -> None:
    """For every kernel that `run` launches, here and in the program of a worker."""
    monkeypatch.setattr(launching, "only_compiles", ContextVar("only_compiles", default=True))
    with Keeping() as kept:
        run()
    command = compiling._worker_command()
    command[command.index(compiling.WORKER)] = "import sys; sys.path[:] = sys.argv[1:]\n" + KEYS
    found = subprocess.run(command, input=pickle.dumps(kept.descriptions), stdout=subprocess.PIPE, timeout=60)
    assert found.returncode == 0
    assert len(set(kept.keys)) >= at_least and found.stdout.decode().split() == kept.keys[::-1]


def test_nothing_is_started_where_all_is_cached(made, workers, monkeypatch, tmp_path):
    with only_compiling():
        normalise()
    forget_kernels(monkeypatch)
    made.clear()
    started = len(workers)
    with only_compiling():
        normalise()
    assert made == {"read": 2} and len(workers) == started


def test_no_more_workers_than_cores_that_this_process_leaves(made, workers, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2} and workers == []


READS_A_KERNEL = """
import sys, time
from pathlib import Path
sys.stdout.write("\\n")
sys.stdout.flush()
sys.stdin.buffer.read(1)
Path(sys.argv[1], "read").write_text("a kernel")
"""


@pytest.mark.parametrize("ending", ["raise SystemExit(1)", "time.sleep(600)"], ids=["fails", "hangs"])
def test_a_worker_that_comes_to_nothing_costs_time_alone(made, workers, monkeypatch, tmp_path, ending):
    monkeypatch.setattr(compiling, "WORKER", READS_A_KERNEL + ending)
    monkeypatch.setattr(compiling, "PATIENCE", 0.5)
    with only_compiling():
        normalise()
        wait_for(tmp_path / "read")
    assert made == {"compiled": 2} and len(workers) == 1


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import time; time.sleep(600)"], ids=["fails", "hangs"])
def test_a_worker_that_is_never_ready_is_not_waited_for(made, workers, monkeypatch, program):
    monkeypatch.setattr(compiling, "WORKER", program)
    monkeypatch.setattr(compiling, "PATIENCE", 600)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2} and len(workers) == 1


def test_where_no_worker_can_be_started(made, monkeypatch):
    def popen(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr(compiling, "Popen", popen)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2}


@pytest.mark.parametrize("executable", [None, "", "/opt/painter/bin/painter"])
def test_where_python_is_part_of_another_program(made, workers, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2} and workers == []


def test_workers_find_the_package_where_it_is(monkeypatch):
    """Also where this process found it by other means than `sys.path`."""
    root = str(Path(sys.modules["fastdiff"].__file__).parents[1])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != Path(root)])
    command = compiling._worker_command()
    done = subprocess.run(command, input=b"", capture_output=True, cwd="/", timeout=60)
    assert done.stdout == b"\n" and done.stderr == b"" and done.returncode == 0


def test_a_kernel_that_does_not_compile_is_an_error_where_it_is_launched(made, workers, tmp_path):
    def run():
        launch(broken, (1,), torch.empty(1, device="meta"), num_warps=4)

    with only_compiling():
        normalise()
        run()  # it is not of the package: no worker is asked
        wait_for(*launchers(tmp_path))
    assert made == {"read": 2}
    with pytest.raises(triton.CompilationError, match="this kernel is broken"):
        run()


def test_a_kernel_that_no_worker_can_compile_is_an_error_where_it_is_launched(made, workers, tmp_path):
    def run():
        x, zeros = torch.empty(1, 1, 3, device="meta"), [0] * 7
        pointers, options = (x, None, x, x, *[None] * 6), {"RMS": False, "BC": 3, "STEP": 1.0, "LEAST": 1.0}
        launch(layer_norm_kernel, (1,), *pointers, 1, 3, *zeros, 1e-6, **options, num_warps=4)

    with only_compiling():
        run()  # its range of 3 is no power of two
        normalise()
        wait_for(*launchers(tmp_path))
    assert made == {"read": 2} and len(workers) == 1
    with pytest.raises(triton.CompilationError, match="power of 2"):
        run()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_inside_the_block_is_raised_at_once(made, workers, monkeypatch, error):
    """Triton waits for all that was submitted, so it hears that nothing comes; the next block compiles it."""
    monkeypatch.setattr(compiling, "WORKER", "import time; time.sleep(600)")
    monkeypatch.setattr(compiling, "PATIENCE", 600)
    with pytest.raises(error), only_compiling():
        normalise()
        raise error
    assert made == {} and all(worker.returncode < 0 for worker in workers)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2}
