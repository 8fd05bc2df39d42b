"""The measurements of `fastdiff bench`: rows and errors, peers that fail, and the surroundings of a run."""

import os
import sys
from functools import partial

import diffusers
import pytest
import torch

import fastdiff
from fastdiff.checkpoints.configs.unet1d import UNet1DConfig
from fastdiff.errors import DeviceLostError, InputError
from fastdiff.kernels.plans.tuning import Table
from fastdiff.requests.request import Request
from fastdiff.verification import peers, speed
from fastdiff.verification.speed import Bench, Row
from tests.support.planners import policy
from tests.support.tiny import UNET, save_unet

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny model of labels."""
    return str(save_unet(tmp_path_factory.mktemp("speed") / "tiny", **UNET, num_class_embeds=3))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure short groups, and trace the model instead of compiling it."""
    monkeypatch.setattr(speed, "SECONDS", 1e-4)
    monkeypatch.setattr(peers, "compile_diffusers", lambda theirs: theirs)


def ran(model: str, **options) -> Bench:
    """Return a finished comparison on the CPU."""
    request = {name: options.pop(name) for name in ("height", "width", "dtype", "precision") if name in options}
    bench = Bench.prepare(Request(model=model, **request), "cpu", **options)
    bench.run()
    return bench


def test_each_peer_has_a_row(tiny):
    bench = ran(tiny, batch_size=2)
    assert [row.name for row in bench.rows] == ["fastdiff", "diffusers", "torch.compile"]
    for row in bench.rows:
        assert row.ms > 0 and row.first_result_s > 0 and row.failure is row.peak_bytes is None
    ours, eager, _ = bench.rows
    assert 0 < ours.error < 1e-5 and eager.error == 0
    assert bench.is_complete and bench.notes == []


def test_the_error_is_a_fraction_of_the_largest_output(tiny, monkeypatch):
    right = fastdiff.UNet2DModel.predict
    monkeypatch.setattr(fastdiff.UNet2DModel, "predict", lambda *given: 1.25 * right(*given))
    assert ran(tiny, with_compile=False).rows[0].error == pytest.approx(0.25, rel=1e-3)
    assert peers.error_of(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -4.0])) == 0.25


def test_errors_are_of_the_dtype_and_the_truth_of_float32(tiny):
    ours, eager = ran(tiny, dtype="bfloat16", with_compile=False).rows
    assert 1e-4 < ours.error < 0.1 and 1e-4 < eager.error < 0.1
    in_8_bits, _ = ran(tiny, precision="int8", with_compile=False).rows
    assert 1e-4 < in_8_bits.error < 0.1


def test_all_peers_get_the_same_inputs_and_weights(tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(speed, "call_of", lambda model, inputs: calls.append((model, inputs)) or (lambda: inputs[0]))
    bench = ran(tiny, batch_size=3, height=16, width=8)
    (ours, first), (eager, second), (_, third) = calls
    assert first is second is third
    x, timesteps, labels, prompt = first
    assert x.shape == (3, 3, 16, 8) and timesteps.tolist() == [499] * 3 and labels.tolist() == [0] * 3 and prompt == {}
    assert torch.equal(ours.conv_in.weight, eager.conv_in.weight)
    assert (bench.as_dict()["height"], bench.as_dict()["width"]) == (16, 8)


def test_models_of_all_kinds(text_folder, save_planner):
    _, planner = save_planner("DDPM", {"sample_size": 8})
    for folder, horizon in ((text_folder("sdxl"), None), (planner, 8), (planner / "unet", 8)):
        bench = ran(str(folder), with_compile=False)
        assert bench.rows[0].error < 1e-4, folder
        assert bench.as_dict()["horizon"] == horizon


def test_a_size_in_pixels_is_that_of_the_decoded_picture(text_folder):
    bench = Bench.prepare(Request(model=str(text_folder("sdxl")), height=64, width=32), "cpu")
    scale = bench.subject.scale
    assert scale > 1 and bench.size == (64 // scale, 32 // scale)
    with pytest.raises(InputError, match="height 33, width"):
        bench.subject.size(33, None)


def test_a_planner_has_no_height():
    subject = peers.Subject("plan", None, None, UNet1DConfig.from_mapping(policy(8, 16), "config"))
    with pytest.raises(InputError, match="height, width: plan plans trajectories, which have neither; leave them out"):
        subject.size(8, None)


def test_the_table_in_use_is_a_note(tiny, monkeypatch):
    monkeypatch.setattr(speed, "current", lambda device: Table("tables/nvidia-h200.json"))
    assert Bench.prepare(Request(model=str(tiny)), "cpu").notes == ["tiles by tables/nvidia-h200.json"]


def test_steps_are_the_forwards_of_a_turn(tiny, monkeypatch):
    counts = []
    monkeypatch.setattr("fastdiff.tuning.timing.seconds_each", lambda call, count, device: counts.append(count) or 0.5)
    bench = ran(tiny, steps=7, with_compile=False)
    assert counts == [7] * 2 * 5
    assert [row.ms for row in bench.rows] == [500, 500]


def test_without_diffusers_only_fastdiff_is_measured(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    bench = ran(tiny)
    (row,) = bench.rows
    assert row.ms > 0 and row.error is None
    (note,) = bench.notes
    assert note.endswith("needs diffusers, which is not installed; pip install 'fastdiff[diffusers]'")


FAILURES = {
    "compiler": (RuntimeError("no working C++ compiler\nSet CXX"), "RuntimeError: no working C++ compiler Set CXX"),
    "memory": (torch.OutOfMemoryError("CUDA out of memory.\nSee"), "out of memory for batch size 1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_peer_that_fails_has_a_reason(tiny, monkeypatch, name):
    error, reason = FAILURES[name]

    def fail(theirs):
        raise error

    monkeypatch.setattr(peers, "compile_diffusers", fail)
    ours, eager, compiled = ran(tiny).rows
    assert ours.ms > 0 and eager.ms > 0
    assert compiled == Row("torch.compile", failure=reason)


def test_a_peer_that_fails_in_its_turn_is_left_out(tiny, monkeypatch):
    calls = []

    def counted(model, inputs):
        call = peers.call_of(model, inputs)
        return partial(failing, call) if isinstance(model, diffusers.UNet2DModel) else call

    def failing(call):
        calls.append(None)
        if len(calls) == 3:
            raise ValueError("a later call")
        return call()

    monkeypatch.setattr(speed, "call_of", counted)
    ours, eager = ran(tiny, with_compile=False).rows
    assert ours.ms > 0 and ours.failure is None
    assert eager.ms is None and eager.failure == "ValueError: a later call" and eager.first_result_s > 0


def test_a_model_that_diffusers_cannot_load_is_measured_in_fastdiff(tiny, monkeypatch):
    def fail(*args, **options):
        raise KeyError("metadata")

    monkeypatch.setattr(diffusers.UNet2DModel, "from_pretrained", fail)
    bench = ran(tiny)
    ours, eager, compiled = bench.rows
    assert ours.ms > 0 and ours.error is None
    assert eager.failure == compiled.failure and eager.failure.startswith("diffusers cannot load ")
    assert bench.notes == [f"no errors: diffusers in float32 failed ({eager.failure})"]


def test_fastdiff_out_of_memory_is_a_row_and_other_errors_end_it(tiny, monkeypatch):
    right = fastdiff.UNet2DModel.from_folder

    def fail(error, *args, **options):
        raise error

    monkeypatch.setattr(fastdiff.UNet2DModel, "from_folder", partial(fail, MemoryError()))
    ours, eager, _ = ran(tiny).rows
    assert ours.failure == "out of memory for batch size 1" and eager.ms > 0
    monkeypatch.setattr(fastdiff.UNet2DModel, "from_folder", partial(fail, InputError("bad weights")))
    with pytest.raises(InputError, match="bad weights"):
        ran(tiny)
    monkeypatch.setattr(fastdiff.UNet2DModel, "from_folder", right)
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure\nSee")
    monkeypatch.setattr(peers, "compile_diffusers", partial(fail, lost))
    bench = Bench.prepare(Request(model=tiny), "cpu")
    with pytest.raises(DeviceLostError):
        bench.run()
    assert [row.name for row in bench.rows] == ["fastdiff", "diffusers", "torch.compile"] and not bench.is_complete


def test_the_times_so_far_are_kept(tiny, monkeypatch):
    """Ctrl-C may come between two rounds of groups."""
    seen = []

    def seconds_each(call, count, device):
        seen.append([row.ms for row in bench.rows])
        if len(seen) == 4:
            raise KeyboardInterrupt
        return 3e-3

    monkeypatch.setattr("fastdiff.tuning.timing.seconds_each", seconds_each)
    bench = Bench.prepare(Request(model=tiny), "cpu", steps=1, with_compile=False)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert seen == [[None, None]] * 2 + [[3.0, 3.0]] * 2 and bench.as_dict()["complete"] is False


def test_caches_are_empty_inside_and_the_settings_as_before_outside(tiny, monkeypatch):
    inside = []

    def look(theirs):
        cudnn = torch.backends.cudnn
        inside.append((cudnn.benchmark, cudnn.allow_tf32, *(os.environ[name] for name in speed.CACHES)))
        return theirs

    monkeypatch.setattr(peers, "compile_diffusers", look)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    ran(tiny)
    ((benchmark, tf32, *caches),) = inside
    assert (benchmark, tf32) == (True, False)
    assert not any(map(os.path.exists, caches)) and "mine" not in caches
    assert os.environ["TRITON_CACHE_DIR"] == "mine" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_each_peer_on_a_gpu(tiny):
    bench = Bench.prepare(Request(model=tiny), "cuda", batch_size=2, with_compile=False)
    bench.run()
    assert all(row.ms > 0 and row.peak_bytes > 0 for row in bench.rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by inductor
def test_a_compiled_peer(tiny, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(speed, "SECONDS", 1e-4)
    *_, compiled = ran(tiny).rows
    assert compiled.failure is None and compiled.ms > 0 and compiled.error < 1e-5
