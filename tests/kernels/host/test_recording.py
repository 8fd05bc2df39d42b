"""A report of a model, compared with the model itself, torch's FLOP counter and a profile."""

import functools
import json
import os
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastdiff
from fastdiff.kernels.attention import attention
from fastdiff.kernels.conv2d import Shortcut, conv2d
from fastdiff.kernels.denoise import COLUMNS, StepOptions, denoise_step
from fastdiff.kernels.group_norm import group_norm
from fastdiff.kernels.host.recording import Recorder, record
from fastdiff.kernels.layer_norm import layer_norm
from fastdiff.kernels.linear import linear
from fastdiff.kernels.plans.choices import references_only
from fastdiff.kernels.plans.tuning import Table, using
from fastdiff.kernels.swiglu import swiglu
from fastdiff.pipelines.reporting import Report, report
from tests.support.planners import policy

SMALL = {
    "sample_size": 8,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "attention_head_dim": 16,
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
}
SMALLER = SMALL | {
    "block_out_channels": (32,),
    "down_block_types": ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",),
    "add_attention": False,
}
PLANNER = policy(8, 16, in_channels=3, out_channels=3)
DDPM256 = {  # google/ddpm-celebahq-256
    "sample_size": 256,
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "layers_per_block": 2,
    "attention_head_dim": None,
    "downsample_padding": 0,
    "down_block_types": ("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
}


@pytest.fixture(autouse=True)
def poisoned():
    """Turn poisoning off: filling a tensor is a torch operation, which a report counts."""


# The interpreter takes a tenth of a second for each launch.
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
slow_in_the_interpreter = pytest.mark.slow if INTERPRETER else lambda test: test


@functools.cache
def model_of(device: torch.device, small: bool = True) -> fastdiff.UNet2DModel:
    """Return a model in float16, so that some convolutions load by descriptors and others by pointers."""
    return fastdiff.UNet2DModel.from_config(SMALL if small else SMALLER).to(device, torch.float16)


@functools.cache
def report_of_two(device: torch.device) -> Report:
    return report(model_of(device), batch_size=2)


@pytest.fixture
def model(device) -> fastdiff.UNet2DModel:
    return model_of(device)


@pytest.fixture
def smaller(device) -> fastdiff.UNet2DModel:
    return model_of(device, small=False)


@pytest.fixture
def found(device) -> Report:
    """The report of the model with two pictures."""
    return report_of_two(device)


@pytest.fixture
def pipe(smaller) -> fastdiff.Pipeline:
    return fastdiff.LabelPipeline(smaller, fastdiff.DDIMScheduler())


def count(found, operation: str) -> int:
    return sum(row.count for row in found.rows if row.operation == operation)


def why(call) -> str:
    """Return the reason that the single operation in `call` gives for how it runs."""
    with record(torch.device("cpu")) as recorded:
        call()
    (only,) = [call for call in recorded.calls if not call.operation.startswith("torch.")]
    return only.why


def test_every_operation_of_the_model_is_there(model, found):
    modules = Counter(type(module).__name__ for module in model.modules())
    convolutions = modules["Conv2d"] + modules["Attention"]  # attention's output layer is a convolution
    shortcuts = sum(row.count for row in found.rows if "shortcut" in row.shape)  # fused into a call, or a call
    assert convolutions - shortcuts <= count(found, "conv2d") <= convolutions
    assert shortcuts == sum(name.endswith(".conv_shortcut") for name, _ in model.named_modules()) > 0
    assert count(found, "linear") == modules["Attention"], "Q, K and V are one"
    normed = [row for row in found.rows if "norm" in row.shape.split(", ")]
    joined = sum(row.count for row in normed if not row.kernels or row.why.endswith(", norm in its epilogue"))
    assert count(found, "group_norm") + joined == modules["GroupNorm"] > joined > 0
    assert count(found, "attention") == modules["Attention"] > 0
    assert found.what.startswith("UNet2DModel, 2x8x8x3, float16, ")


def test_flops_are_those_torch_counts_in_its_own_convolutions(model, found):
    x = torch.zeros(2, 8, 8, 3, device=model.device, dtype=model.dtype)
    conditioning = model.conditioning(torch.ones(2, device=model.device))
    with references_only(), FlopCounterMode(display=False) as counter:
        model.predict(x, conditioning)
    counts = {str(operation): flop for operation, flop in counter.get_flop_counts()["Global"].items()}
    products = [flop for name, flop in counts.items() if name in ("aten.convolution", "aten.addmm", "aten.mm")]
    assert found.flop == sum(products) > 0


def test_on_kernels_or_on_torch_and_why(model, found, runs_triton):
    convolutions = [row for row in found.rows if row.operation == "conv2d"]
    if not runs_triton:
        assert {row.why for row in found.rows} == {"no CUDA device"}
        assert (found.kernel_launches, found.share, found.variants) == (0, 0.0, None)
        assert all(row.runs_on.endswith("torch") for row in found.rows)
        return
    assert found.share == 1.0
    assert found.launches == found.kernel_launches >= len(convolutions)
    (first,) = [row for row in convolutions if row.shape.startswith("2x8x8x3,")]
    assert (first.kernels, first.torch) == (("conv_by_pointers",), ())
    assert first.why.startswith("by pointers (3 channels, not a multiple of 8), ")
    others = [row for row in convolutions if row is not first]
    assert others and all(row.kernels[0] == "conv_by_descriptors" for row in others)
    norms = [row for row in found.rows if row.operation == "group_norm"]
    assert all(row.runs_on == "normalise_kernel" and row.why == "moments from the convolution" for row in norms)
    assert (found.variants is None) == (model.device.type == "cpu")


@slow_in_the_interpreter
def test_a_step_of_a_pipeline(pipe, runs_triton):
    found = report(pipe, batch_size=2)
    assert count(found, "denoise_step") == (2 if pipe.device.type == "cpu" else 1)
    assert count(found, "conv2d") == count(report(pipe.denoiser), "conv2d") * (2 if pipe.device.type == "cpu" else 1)
    (step,) = [row for row in found.rows if row.operation == "denoise_step"]
    assert step.runs_on == "denoise_kernel" if runs_triton else step.kernels == ()


@slow_in_the_interpreter
def test_an_operation_that_torch_does_alone_is_there_too(device):
    blur = {"down_block_types": ("SkipDownBlock2D",) * 2, "up_block_types": ("SkipUpBlock2D",) * 2}
    found = report(fastdiff.UNet2DModel.from_config(SMALL | blur).to(device))
    blurs = [row for row in found.rows if row.operation == "torch.convolution"]
    assert sum(row.count for row in blurs) >= 4, "down and up, for the features and for the picture"
    assert all((row.runs_on, row.why) == ("torch", "not one of our operations") for row in blurs)
    assert all(row.flop > 0 for row in blurs)
    assert found.share < 1.0


@pytest.mark.gpu
def test_a_transformer(device):
    options = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8}
    model = fastdiff.DiTTransformer2DModel.from_config(options).to(device)
    found = report(model, batch_size=3)
    assert found.what.startswith("DiTTransformer2DModel, 3x8x8x4, float32, ")
    counts = {name: count(found, name) for name in ("linear", "layer_norm", "attention")}
    assert counts == {"linear": 2 * 4 + 2, "layer_norm": 2 * 2 + 1, "attention": 2}
    tokens, channels = 3 * 16, 32
    assert found.flop == 2 * tokens * (2 * 12 * channels**2 + 2 * 16 * channels), "blocks, input and output patches"


@slow_in_the_interpreter
def test_a_pipeline_that_drew_before_is_reported_alike(pipe):
    before = report(pipe)
    pipe(num_inference_steps=2)
    assert report(pipe) == before


@slow_in_the_interpreter
def test_it_is_called_as_documented_and_printed(smaller):
    found = fastdiff.report(smaller, height=8, width=16)
    head, columns, *_, launches, share = str(found).splitlines()
    assert head == found.what
    assert "1x8x16x3" in head
    assert columns.split() == ["operation", "tensors", "times", "GFLOP", "runs", "on", "why"]
    assert launches.startswith(f"{found.launches} launches: {found.kernel_launches} of our kernels")
    assert share.endswith("GFLOP of convolutions and linear layers on our kernels")
    assert json.loads(json.dumps(found.as_dict()))["rows"][0]["operation"] == "conv2d"


def test_it_says_what_tiles_are_chosen_by(smaller, found, runs_triton):
    assert ("tiles by the built-in rules" in str(found)) == runs_triton
    with using(Table("a-card.json")):
        assert report(smaller).tiles == ("a-card.json" if runs_triton else "")


def test_a_size_is_needed_and_checked(model):
    with pytest.raises(ValueError, match="height 9, width 9"):
        report(model, height=9, width=9)
    unsized = fastdiff.UNet2DModel.from_config(SMALL | {"sample_size": None})
    with pytest.raises(ValueError, match="height, width: "):
        report(unsized)


def test_a_horizon_is_needed_and_checked():
    planner = fastdiff.UNet1DModel.from_config(PLANNER)
    found = report(planner, batch_size=2, horizon=8)
    assert "2x1x8x3" in found.what
    assert count(found, "conv2d") == sum(isinstance(layer, torch.nn.Conv1d) for layer in planner.modules())
    assert not [row.operation for row in found.rows if row.operation != "conv2d"]
    for options, named in (
        ({}, "horizon: "),
        ({"horizon": 7}, "horizon 7: "),
        ({"height": 1, "width": 8}, "height, w"),
    ):
        with pytest.raises(ValueError, match=named):
            report(planner, **options)
    with pytest.raises(ValueError, match="horizon: this model makes pictures"):
        report(fastdiff.UNet2DModel.from_config(SMALL), horizon=8)


X, WEIGHT = torch.zeros(1, 4, 4, 8), torch.zeros(8, 8, 3, 3)
Q, ROW = torch.zeros(1, 4, 8), torch.zeros(len(COLUMNS))
THRESHOLD = StepOptions(threshold_ratio=0.9)
DECLINED = {
    "conv2d-float64": (lambda: conv2d(X.double(), WEIGHT.double(), padding=1), "no kernel for torch.float64"),
    "conv2d-nothing": (lambda: conv2d(X[:0], WEIGHT, padding=1), "empty batch, or a picture of 2^31 elements or more"),
    "group_norm-float64": (lambda: group_norm(X.double(), 2, eps=1e-5), "no kernel for torch.float64"),
    "attention-float64": (lambda: attention(*[Q.double()] * 3, heads=1), "no kernel for torch.float64"),
    "attention-wide": (
        lambda: attention(*[torch.zeros(1, 2, 320)] * 3, heads=1),
        "torch.float32: head width 320 exceeds the maximum of 256",
    ),
    "denoise-float64": (lambda: denoise_step(X, X.double(), ROW, StepOptions()), "no kernel for torch.float64"),
    "linear-float64": (lambda: linear(Q.double(), Q[0].double()), "no kernel for torch.float64 of (1, 4, 8)"),
    "layer_norm-float64": (lambda: layer_norm(Q.double(), eps=1e-5), "no kernel for torch.float64 of (1, 4, 8)"),
    "swiglu-float64": (lambda: swiglu(Q.double(), Q[0].double()), "no kernel for torch.float64 of (1, 4, 8)"),
    "denoise-threshold": (lambda: denoise_step(X, X, ROW, THRESHOLD), "dynamic thresholding needs a sort"),
}


@pytest.mark.parametrize(("call", "reason"), DECLINED.values(), ids=DECLINED)
def test_a_kernel_that_declines_says_why(call, reason, runs_triton, device):
    if not runs_triton or device.type == "cuda":
        pytest.skip("needs the interpreter, because the tensors are on the CPU")
    assert why(call) == reason


def test_the_work_of_a_call_within_a_call_counts_once(runs_triton, device):
    if not runs_triton or device.type == "cuda":
        pytest.skip("needs the interpreter, because the tensors are on the CPU")
    shortcut = Shortcut(torch.zeros(1, 5, 7, 3), torch.zeros(6, 3, 1, 1), None)  # no kernel fuses it into the sum

    def flops() -> list[int]:
        with record(torch.device("cpu")) as recorded:
            conv2d(torch.zeros(1, 5, 7, 4), torch.zeros(6, 4, 3, 3), padding=1, shortcut=shortcut)
        return [call.flop for call in recorded.calls if call.operation == "conv2d"]

    apart = flops()
    with references_only():
        together = flops()
    assert len(apart) == 2 and len(together) == 1
    assert sum(apart) == sum(together) == 2 * 35 * 6 * (36 + 3)


def test_the_work_of_a_call_is_taken_from_the_call_around_it():
    listener = Recorder()
    weight, tokens, part = torch.zeros(6, 8), torch.zeros(1, 5, 8), torch.zeros(1, 2, 8)
    with listener.call(linear, (tokens, weight), {}), listener.call(linear, (part, weight), {}):
        pass
    assert [call.flop for call in listener.calls] == [2 * 3 * 6 * 8, 2 * 2 * 6 * 8]


def test_references_are_a_reason_too():
    with references_only():
        assert why(lambda: conv2d(X, WEIGHT, padding=1)) == "references_only"


@pytest.mark.parametrize(
    ("shape", "channels", "options", "reason"),
    [
        ((1, 4, 4, 8), 8, {"padding": 1}, "by pointers (float32), "),
        ((1, 5, 7, 8), 8, {"padding": 1}, "by pointers (tiles would cross the border of 5x7 pixels), "),
        ((1, 4, 4, 8), 8, {"padding": 1, "stride": 2}, "by pointers (stride 2 with an odd size, or with "),
        ((1, 4, 4, 8), 8, {"padding": 2, "upsample": True}, "by pointers (upsampling with padding other than 1), "),
        ((1, 4, 4, 1024), 32, {"padding": 1}, "by descriptors, 64 pixels x 64 channels a program, sum in 4 parts"),
    ],
    ids=["float32", "odd", "down", "up", "chunks"],
)
def test_why_a_convolution_loads_as_it_does(shape, channels, options, reason, runs_triton, device):
    if not runs_triton or device.type == "cuda":
        pytest.skip("needs the interpreter, because the tensors are on the CPU")
    dtype = torch.float32 if "float32" in reason else torch.float16
    x, weight = torch.zeros(shape, dtype=dtype), torch.zeros(channels, shape[-1], 3, 3, dtype=dtype)
    assert why(lambda: conv2d(x, weight, **options)).startswith(reason)


def profiled(call) -> tuple[list[str], list[str]]:
    """Return the names of what runs on the device during a call, and of the host's events, such as CUDA calls."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in on_device], [event.name for event in profile.events() if event not in on_device]


@pytest.fixture(scope="module")
def ddpm256():
    with torch.device("cuda"):
        return fastdiff.UNet2DModel.from_config(DDPM256).to(torch.bfloat16)


@pytest.fixture(scope="module")
def ddpm256_report(ddpm256):
    return report(ddpm256, batch_size=8)


@pytest.mark.gpu
class TestAtDdpm256InBatchesOf8:
    def test_four_fifths_of_the_flops_and_more_are_ours(self, ddpm256_report):
        assert ddpm256_report.share >= 0.8, str(ddpm256_report)
        assert 3.9e12 < ddpm256_report.flop < 4.0e12
        assert 1 <= ddpm256_report.variants <= ddpm256_report.kernel_launches

    def test_launches_are_those_of_a_profile(self, ddpm256, ddpm256_report):
        x = torch.randn(8, 256, 256, 3, device="cuda", dtype=torch.bfloat16)
        conditioning = ddpm256.conditioning(torch.ones(8, device="cuda"))
        names, _ = profiled(lambda: ddpm256.predict(x, conditioning))
        assert ddpm256_report.launches == len(names), Counter(names)
        ours = Counter(name for row in ddpm256_report.rows for name in row.kernels * row.count)
        assert ours == Counter(name for name in names if name in ours)

    def test_a_step_is_one_graph(self, ddpm256):
        pipe = fastdiff.LabelPipeline(ddpm256, fastdiff.DDIMScheduler())
        ours = Counter(name for row in report(pipe, batch_size=8).rows for name in row.kernels * row.count)
        steps = pipe.stream(batch_size=8, num_inference_steps=4)
        next(steps), next(steps)  # eager, then captured
        names, calls = profiled(lambda: next(steps))
        assert calls.count("cudaGraphLaunch") == 1
        assert ours == Counter(name for name in names if name in ours)
        outside = [name for name in calls if "LaunchKernel" in name]
        assert len(outside) <= 8, "reads of the step's row in each table, and copies of the graph's inputs"
