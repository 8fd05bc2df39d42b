"""Kernels compiled by `only_compiling`, in interpreters of their own: without a GPU, whose driver is a stand-in."""

import hashlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from contextvars import ContextVar
from pathlib import Path
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
        with Path(os.environ["TRITON_CACHE_DIR"], f"launcher of {metadata.name}").open("a") as file:
            file.write("\\n".join(lines))
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

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
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
def workers(monkeypatch) -> Iterator[list[compiling._Worker]]:
    """Those started; afterwards they have ended, and the threads that fed them."""
    started, threads = [], threading.active_count()

    class Recorded(compiling._Worker):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(compiling, "_Worker", Recorded)
    compiling._end_forge()
    yield started
    assert all(worker.socket.fileno() == -1 for worker in started)
    assert threading.active_count() == threads
    numbers = [worker.number for worker in started if worker.number is not None]
    compiling._end_forge()
    wait_until(lambda: not any(map(is_running, numbers)))


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{number}/stat").read_text().split()[2] != "Z"


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def normalise(activation: str = "silu") -> None:
    group_norm.kernel(torch.empty(2, 64, 64, 64, device="meta"), 32, eps=1e-5, activation=activation)


def wait_for(*paths: Path) -> None:
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths))


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
    assert set(processes) == {str(workers[0].number)}
    assert set(torches) == {"False"}


def cached(name: str) -> list:
    """The compiled kernels of this name that this process holds."""
    caches = vars(device_group_norm)[name].device_caches.values()
    return [kernel for each in caches for kernel in each[0].values()]


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


def test_variants_of_a_first_result_are_few(made, monkeypatch):
    """And their C code, which takes as long as a kernel. More of them are seconds: see that they are worth it."""
    config = read_json(hub.resolve("emoji64") / "unet" / "config.json")
    model = fastdiff.UNet2DModel.from_config(config).to("meta", torch.bfloat16)
    monkeypatch.setattr(dispatch, "_unavailable", lambda device: None)
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


def test_a_worker_hears_the_hash_of_triton(made, workers, monkeypatch, tmp_path):
    """It would take every worker 0.2 s to make its own."""
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "of this process")
    with only_compiling():
        normalise()
        wait_for(*launchers(tmp_path))
    assert made == {"read": 2}


def test_c_code_is_compiled_once_for_equal_arguments(made, workers, tmp_path):
    """And a constant is no argument."""
    with only_compiling():
        for activation in ("silu", "none", "mish"):
            normalise(activation)
        wait_for(*launchers(tmp_path))
    _, normalises = launchers(tmp_path)
    assert sum(made.values()) == 4 and normalises.read_text().count("False") == 1


def test_jobs_of_c_code_come_first():
    queue, launcher = compiling._Queue(), type("Launcher", (), {})
    jobs = [compiling._Job(None, described()._replace(launcher=each)) for each in (None, launcher, None, launcher)]
    for job in jobs:
        queue.put(job)
    assert [queue.get_if_any() for _ in range(5)] == [jobs[1], jobs[3], jobs[0], jobs[2], None]
    queue.put(jobs[0])
    queue.end_one()
    assert [queue.get(), queue.get()] == [None, jobs[0]]


def described(**signature) -> compiling.Description:
    return compiling.Description("module", "name", signature, {}, {}, {}, None, None, "")


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


def test_nothing_is_started_where_all_is_cached(made, workers, monkeypatch, tmp_path):
    with only_compiling():
        normalise()
    forget_kernels(monkeypatch)
    made.clear()
    started = len(workers)
    with only_compiling():
        normalise()
    assert made == {"read": 2} and len(workers) == started


def test_the_next_block_has_workers_of_the_same_process(made, workers, monkeypatch, tmp_path):
    forges = set()
    for at, activation in enumerate(("silu", "none")):
        with only_compiling():
            normalise(activation)
            wait_until(lambda at=at: workers[at].was_ready)
        forges.add(compiling._forge.process.pid)
    assert len(workers) == 2 and len(forges) == 1 and workers[0].number != workers[1].number


def test_the_process_has_the_environment_of_now(made, workers, monkeypatch, tmp_path):
    """As where Triton keeps files: others would go where nobody reads them."""
    with only_compiling():
        normalise()
        wait_for(*launchers(tmp_path))
    made.clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    (tmp_path / "moved").mkdir()
    with only_compiling():
        normalise("mish")
        wait_for(*launchers(tmp_path / "moved")[1:])
    assert made == {"read": 1}


def test_a_process_that_was_idle_for_long_is_replaced(made, workers, monkeypatch, tmp_path):
    with only_compiling():
        normalise()
        wait_for(*launchers(tmp_path))
    compiling._forge.process.kill()
    compiling._forge.process.wait()
    with only_compiling():
        normalise("mish")
        wait_until(lambda: workers[1].was_ready)
    assert len(workers) == 2


@pytest.mark.parametrize("cached", [False, True], ids=["nothing-cached", "something-cached"])
def test_what_comes_before_the_first_kernel_is_made_ready_in_the_background(
    made, workers, monkeypatch, tmp_path, cached
):
    """And waited for. The process of the workers too, where Triton has no files of anything yet."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    if cached:
        (tmp_path / "cache" / "kernel").mkdir(parents=True)
    go, events, threads = threading.Event(), [], threading.active_count()

    class Driver:
        @property
        def active(self):
            assert go.wait(60)
            events.append("driver")

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    monkeypatch.setattr(compiling, "_readiness", None)
    compiling.get_ready()
    compiling.get_ready()
    wait_until(lambda: cached or compiling._forge is not None)
    events.append("weights")
    threading.Timer(0.1, go.set).start()
    with only_compiling():
        assert events == ["weights", "driver"] and (compiling._forge is None) == cached
    wait_until(lambda: threading.active_count() == threads)


def test_no_more_workers_than_cores_that_this_process_leaves(made, workers, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    with only_compiling():
        normalise()
    assert made == {"compiled": 2} and workers == []
    assert all(path.exists() for path in launchers(tmp_path))


READS_A_KERNEL = """
import os, socket, sys, time
from pathlib import Path
worker = socket.socket(fileno=socket.recv_fds(socket.socket(fileno=0), 1, 1)[1][0])
worker.sendall(b"%d\\n" % os.getpid())
worker.recv(1)
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

    compiling._end_forge()
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


def test_workers_find_the_package_where_it_is(monkeypatch, tmp_path):
    """Also where this process found it by other means than `sys.path`."""
    root = str(Path(sys.modules["fastdiff"].__file__).parents[1])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != Path(root)])
    monkeypatch.chdir(tmp_path)
    forge = compiling._Forge(compiling._worker_command())
    with closing(forge), forge.fork() as worker, worker.makefile("rb") as answers:
        assert int(answers.readline()) > 0


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
        launch(layer_norm_kernel, (1,), x, x, x, *[None] * 6, 1, 3, *zeros, 1e-6, RMS=False, BC=3, num_warps=4)

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
    assert made == {} and len(workers) == 1
    with only_compiling():
        normalise()
    assert made == {"compiled": 2}
