"""The benchmarks of operations on tiny shapes, their report, and the parsing of compute-sanitizer's output."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastdiff

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPILED = {"compile_ms", "compile_max_abs_err"}
KEYS = {"workload", "fastdiff_ms", "eager_ms", "floor_ms", "share", "max_abs_err", "eager_max_abs_err"}
KEYS |= {"launches", "peak_bytes"} | COMPILED


@pytest.fixture
def reports(harness, load):
    return load("reports")


def check(row: dict, rate: str, keys: set[str] = KEYS) -> None:
    assert keys | {rate, f"ceiling_{rate}"} <= row.keys()
    assert row["share"] == pytest.approx(row[rate] / row[f"ceiling_{rate}"])
    assert row["share"] == pytest.approx(row["floor_ms"] / row["fastdiff_ms"])
    assert 0 <= row["max_abs_err"] < 0.1
    json.dumps(row)


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_wrong_result_has_no_time(harness, wrong):
    truth = torch.ones(2, 3)
    calls = {"fastdiff": lambda: truth + wrong, "eager": lambda: truth.bfloat16()}
    with pytest.raises(ArithmeticError, match="tiny: ours is off by"):
        harness.kernel_row("tiny", calls, truth, ceiling=1.0, moved=1.0)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((1, 4, (8,), 8, 3), {"temb": True}),
        pytest.param((1, 4, (8, 8), 8, 1), {"residual": True}, marks=pytest.mark.slow),
        pytest.param((1, 4, (8,), 8, 3), {"upsample": True}, marks=pytest.mark.slow),
    ],
    ids=["temb", "pair-residual", "up"],
)
def test_conv2d(harness, load, size, options):
    bench = load("bench_conv2d")
    bench.CONVOLUTIONS["tiny"] = (*size, options)
    row = bench.row("tiny", 100.0)
    check(row, "tflops")
    side = 8 if "upsample" in options else 4
    assert row["floor_ms"] == pytest.approx(2 * side**2 * 8 * sum(size[2]) * size[4] ** 2 / 100e9)


@pytest.mark.parametrize("options", [{}, {"shortcut": (8, 8)}], ids=["plain", "shortcut"])
def test_a_convolution_on_sm_90(harness, load, monkeypatch, options):
    bench = load("bench_conv2d")
    for way in ("hopper", "kernel"):
        monkeypatch.setattr(bench.conv2d, way, bench.conv2d.reference)
    bench.HOPPER_CONVOLUTIONS["tiny"] = (2, 16, 16, (32,), 32, options)
    row = bench.hopper_row("tiny", 100.0)
    times = {"hopper_ms", "hopper_moments_ms", "kernel_ms", "kernel_moments_ms", "eager_ms"}
    residual = {"hopper_residual_ms", "kernel_residual_ms", "eager_residual_ms"}
    assert times <= row.keys() and (residual <= row.keys()) == (not options)
    assert row["plan"] == "conv2d-same-256-128" + "-shortcut" * bool(options)
    json.dumps(row)


def test_a_planners_block(harness, load):
    bench = load("bench_conv2d")
    bench.CONV1D_BLOCKS["tiny"] = (2, 4, 8, 16)
    row = bench.block_row("tiny", 100.0)
    check(row, "tflops")
    assert row["floor_ms"] == pytest.approx(2 * 2 * 4 * 16 * 8 * 5 / 100e9)


@pytest.mark.parametrize(
    "widths", [pytest.param((32,), id="one", marks=pytest.mark.slow), pytest.param((32, 32), id="pair")]
)
def test_group_norm(harness, load, widths):
    bench = load("bench_group_norm")
    bench.GROUP_NORMS["tiny"] = (2, 4, widths)
    given, alone = bench.rows("tiny", 4.0)
    check(given, "tbps")
    check(alone, "tbps")
    assert (given["workload"], alone["workload"]) == ("tiny-given", "tiny-alone")
    assert given["floor_ms"] == pytest.approx(2 * 2 * 16 * 2 * sum(widths) / 4e9), "read once, written once"
    assert alone["floor_ms"] == pytest.approx(1.5 * given["floor_ms"])


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        pytest.param(6, {}, id="full", marks=pytest.mark.slow),
        pytest.param(6, {"bias": True}, id="bias"),
        pytest.param(4, {"causal": True}, id="causal", marks=pytest.mark.slow),
        pytest.param(4, {"causal": True, "key_heads": 1}, id="grouped"),
        pytest.param(6, {"lengths": 2}, id="lengths"),
    ],
)
def test_attention(harness, load, monkeypatch, keys, options):
    bench = load("bench_attention")
    monkeypatch.setattr(bench.attention, "kernel", bench.attention.reference)
    bench.ATTENTIONS["tiny"] = (2, 4, keys, 2, 8, options)
    row = bench.row("tiny", 100.0)
    assert row["max_abs_err"] < 0.05
    check(row, "tflops")
    assert {"kernel_ms", "kernel_max_abs_err", "extra_bytes", "kernel_extra_bytes"} <= row.keys()
    assert row["extra_bytes"] == row["kernel_extra_bytes"] == -(2 * 4 * 2 * 8) * 2, "the output is taken off"


@pytest.mark.parametrize(
    ("sampler", "outputs", "noisy"),
    [
        pytest.param("ddim", 1, False, marks=pytest.mark.slow),
        ("ddim-guided", 2, False),
        ("ddim-eta1", 1, True),
        pytest.param("ddpm", 1, True, marks=pytest.mark.slow),
    ],
)
def test_denoise(harness, load, sampler, outputs, noisy):
    bench = load("bench_denoise")
    bench.DENOISES["tiny"] = (2, 4)
    row = bench.row("tiny", sampler, 4.0)
    check(row, "tbps", KEYS - COMPILED if noisy else KEYS)  # torch.compile cannot compile Philox
    read, written = 4 + 2 * outputs, 4 + 4  # bytes per element: x_t and the model's output; x_{t-1} and x0
    assert row["floor_ms"] == pytest.approx((2 * 48 * (read + written) + (2 * 8 if noisy else 0)) / 4e9)
    assert row["diffusers_ms"] > 0
    assert row["parity_max_abs_err"] < 1e-5


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 4.0])
def test_the_denoise_step_is_the_one_of_a_pipeline(harness, load, monkeypatch, scale):
    """The benchmark and the sampling loop call the step with the same arguments, by dtype and shape."""
    called = []

    def spy(operation):
        def step(*args, **options):
            given = [*args, *(options[name] for name in sorted(options) if options[name] is not None)]
            called.append([(each.dtype, each.shape) if torch.is_tensor(each) else each for each in given])
            return operation(*args, **options)

        step.reference = operation.reference
        return step

    steps, bench = importlib.import_module("fastdiff.diffusion.step"), load("bench_denoise")
    monkeypatch.setattr(steps, "denoise_step", spy(steps.denoise_step))
    monkeypatch.setattr(bench, "denoise_step", spy(bench.denoise_step))
    pipe = fastdiff.Pipeline.from_pretrained("emoji64", device="cpu", dtype=torch.bfloat16)
    pipe.scheduler = fastdiff.DDIMScheduler()
    options = {"num_inference_steps": bench.STEPS, "eta": 1.0, "guidance_scale": scale, "height": 16, "width": 16}
    next(pipe.stream(class_labels=0, **options))
    bench.SAMPLERS["tiny"] = bench.SAMPLERS["ddim-eta1"]._replace(guidance_scale=scale)
    bench.DENOISES["tiny"] = (1, 16)
    bench.row("tiny", "tiny", 4.0)
    in_the_pipeline, in_the_benchmark = called[0], called[-1]
    assert in_the_benchmark == in_the_pipeline


@pytest.mark.parametrize(
    ("name", "table", "workload"),
    [
        ("linear", "LINEARS", (2, 4, 8, 8, {"gate": True, "residual": True, "activation": "gelu_tanh"})),
        ("layer_norm", "LAYER_NORMS", (2, 4, 8, "rms weight residual branch_norm gate scale shift")),
        ("rotary", "ROTARIES", (2, 4, 3, 1, 8, True)),
        ("swiglu", "SWIGLUS", (2, 4, 8, 8)),
        ("geglu", "GEGLUS", (2, 4, 8, 8)),
    ],
    ids=["linear", "layer_norm", "rotary", "swiglu", "geglu"],
)
def test_transformer_operations(harness, load, monkeypatch, name, table, workload):
    bench = load(f"bench_{name}")
    if name != "layer_norm":
        monkeypatch.setattr(getattr(bench, name), "kernel", getattr(bench, name).reference)
    getattr(bench, table)["tiny"] = workload
    row = bench.row("tiny", 100.0)
    assert {"workload", "share", "max_abs_err", "eager_max_abs_err"} <= row.keys()
    assert 0 <= row["max_abs_err"] < 0.1


@pytest.mark.parametrize(
    ("name", "options", "plan"),
    [
        ("fp8-tiny", {"shortcut": (8,)}, "conv2d-same-256-128-shortcut, fp8"),
        ("int8-tiny", {}, "conv2d-same-256-128, int8"),
    ],
)
def test_convolutions_in_8_bits(harness, load, monkeypatch, name, options, plan):
    bench = load("bench_conv2d_8bit")
    for way in ("hopper", "kernel"):
        monkeypatch.setattr(bench.conv2d, way, bench.conv2d.reference)
    monkeypatch.setattr(bench, "ceilings", lambda: {"matmul_bf16_tflops": 100.0})  # as on a GPU; a CPU would take long
    bench.CONVOLUTIONS_8BIT[name] = (2, 16, 16, (32, 32), 32, options)
    gains = {}
    (row,) = bench.rows([name], gains)
    assert gains == {plan: [row["gain"]]} and row["share"] > 0


def test_activations_in_8_bits(harness, load):
    bench = load("bench_to_fp8")
    bench.TO_FP8["tiny"] = (2, 4, 8)
    assert bench.row("tiny", 4.0)["share"] > 0


def test_weights_of_int8(harness, load):
    bench = load("bench_from_int8")
    bench.WORKLOADS["tiny"] = (4, 8)
    assert bench.row("tiny", 4.0)["share"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "linear 320 to 320, fp8",
        "linear 1280 to 320, residual, fp8",
        "geglu 320 to 2560, fp8",
        "linear 320 to 320, int8",
        "geglu 320 to 2560, int8",
    ],
)
def test_products_in_8_bits(harness, load, monkeypatch, name):
    bench = load("bench_linear_8bit")
    operation, *_ = bench.PLANS[name]
    monkeypatch.setattr(operation, "kernel", operation.reference)
    row = bench.row(name, 8)
    assert {"bf16_ms", "kernel_ms"} < row.keys() and ("to_fp8_ms" in row) == name.endswith("fp8")
    json.dumps(row)


def test_results_are_saved_with_their_machine(reports, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--save", str(tmp_path)])
    reports.report("some", [{"workload": "a", "fastdiff_ms": 1.0}, {"workload": "b", "compile_ms": None}])
    rows = json.loads((tmp_path / "some.json").read_text())
    assert [row["workload"] for row in rows] == ["a", "b"]
    assert {"gpu", "torch", "triton", "diffusers", "commit"} <= rows[0].keys()
    *table, document = capsys.readouterr().out.splitlines()
    assert json.loads(document) == rows
    assert [line.split() for line in table] == [
        ["workload", "fastdiff_ms"],
        ["a", "1"],
        ["workload", "fastdiff_ms", "compile_ms"],
        ["b"],
    ]


def test_a_row_is_printed_and_saved_before_the_next_is_measured(reports, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", "--save", str(tmp_path)])

    def rows():
        yield {"workload": "a", "fastdiff_ms": 1.5}
        header, line = capsys.readouterr().out.splitlines()
        assert line.split() == ["a", "1.5"]
        assert len(header) == len(line), "a cell stands under its column's name"
        assert [row["workload"] for row in json.loads((tmp_path / "some.json").read_text())] == ["a"]
        yield {"workload": "b", "fastdiff_ms": 2.0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reports.report("some", rows())
    assert [row["workload"] for row in json.loads((tmp_path / "some.json").read_text())] == ["a", "b"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["b", "2"]


@pytest.mark.parametrize(("named", "expected"), [([], ["a", "b"]), (["b"], ["b"]), (["b", "--save", "x"], ["b"])])
def test_workloads_are_chosen_by_name(reports, monkeypatch, named, expected):
    monkeypatch.setattr(sys, "argv", ["bench", *named])
    assert reports.chosen({"a": 1, "b": 2}) == expected


def test_a_workload_that_there_is_not_is_named(reports, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench", "c"])
    with pytest.raises(SystemExit, match="no workload 'c'; there are a, b"):
        reports.chosen({"a": 1, "b": 2})


def test_what_needs_a_gpu_says_so_and_succeeds(reports, capsys):
    with pytest.raises(SystemExit) as ended:
        reports.needs_gpu()
    assert ended.value.code is None
    assert capsys.readouterr().out == "this benchmark needs a GPU: on a CPU every operation runs its torch reference\n"


def test_launches_are_counted(harness):
    x = torch.ones(3)
    assert harness.launches(lambda: (x + x).view(3, 1) * x) == 2


SAID = """\
========= COMPUTE-SANITIZER
{}41 passed, 2 skipped, 7 deselected in 50.13s
========= ERROR SUMMARY: {} errors
"""


@pytest.mark.parametrize(
    ("output", "code", "clean"),
    [
        (SAID.format("", 0), 0, True),
        (SAID.format("========= Invalid __global__ read of size 4 bytes\n", 1), 9, False),
        (SAID.format("1 failed, ", 0), 1, False),
        ("no such device\n", 0, False),
        ("..========= Internal Sanitizer Error: a hardware exception.\n", 1, False),
    ],
    ids=["clean", "an-error", "a-test-failed", "not-run", "broke-off"],
)
def test_what_the_sanitizer_found(load, monkeypatch, output, code, clean):
    pytest.importorskip("triton", reason="no Triton here")
    sanitize = load("sanitize")
    asked = []

    def run(command, env, cwd, **options):
        asked.extend(command)
        assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        return subprocess.CompletedProcess(command, code, stdout=output)

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    found = sanitize.check("compute-sanitizer", "memcheck", ["a::b", "c::d"])
    assert asked[:3] == ["compute-sanitizer", "--tool", "memcheck"]
    ran = [sys.executable, "-m", "pytest", "-q", "-W", "default", "a::b", "c::d"]
    assert asked[-len(ran) :] == ran and "python" not in asked
    assert {"kne=conv_by_descriptors", "kne=normalise_kernel", "kne=attention_kernel"} <= set(asked)
    assert (found.clean, found.broke_off) == (clean, "Internal" in output)
    tests = next((line for line in output.splitlines() if "passed" in line), None)
    said = [line for line in output.splitlines() if "=====" in line]
    assert found.lines == ([tests] if tests else []) + said or found.lines == [output.strip()]
    command, *lines = sanitize.summary([found]).splitlines()
    assert command.startswith("$ compute-sanitizer --tool memcheck ")
    if clean:
        assert lines == ["nothing found in 2 tests:", "    a::b", "    c::d"]
    else:
        what = "the tool broke off at" if found.broke_off else "FOUND in"
        assert lines == ["nothing found in 0 tests:", f"{what} a::b, c::d:", *(f"    {line}" for line in found.lines)]


HAZARD = """========= Error: Potential RAW hazard detected at __shared__ 0xcda8 in block ({block},0,0) :
=========     Write Thread (31,0,0) at hopper_conv+0x18c0 in conv2d.py:{line}
=========     Read Thread (128,0,0) at hopper_conv+0xf0 in conv2d.py:{line}
=========     Current Value : 1
=========
"""


ANOTHER = HAZARD.format(block=3, line=1)
IN_OTHER_WORDS = "========= Error: Race reported between Write access and Read access in hopper_conv\n"


@pytest.mark.parametrize(
    "beyond", ["", ANOTHER, IN_OTHER_WORDS], ids=["the-hand-over-alone", "and-another", "and-an-error-in-other-words"]
)
def test_hazards_of_the_hand_over_to_warps_are_counted_apart(load, monkeypatch, beyond):
    pytest.importorskip("triton", reason="no Triton here")
    sanitize = load("sanitize")
    source = (BENCHMARKS.parent / "kernels" / "device" / "hopper" / "conv2d.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if text.startswith("def hopper_conv("))
    output = SAID.format(
        "".join(HAZARD.format(block=block, line=line) for block in range(3)) + beyond, 3 + bool(beyond)
    )
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 9, stdout=output))
    found = sanitize.check("compute-sanitizer", "racecheck", ["a::b"])
    assert (found.clean, found.handed_over) == (not beyond, 3)
    places = f"Potential RAW hazard hopper_conv conv2d.py:{line} hopper_conv conv2d.py:{line}"
    assert f"3 times {places}" in found.lines
    assert [line for line in found.lines if "Error" in line] == [IN_OTHER_WORDS.strip()] * (beyond == IN_OTHER_WORDS)
    assert ("but 3 times Triton's hand-over" in sanitize.summary([found])) == found.clean


@pytest.mark.slow
def test_the_sanitizer_runs_each_kernel_test_file(load):
    """The selected tests include an odd shape of every operation, of sm_90's convolutions and of fp8."""
    pytest.importorskip("triton", reason="no Triton here")
    selected = {test.partition("::")[0] for test in load("sanitize").selected_tests() if "odd" in test}
    operations = {path.stem for path in (BENCHMARKS.parent / "kernels").glob("[!_]*.py")} - {"report"}
    files = (*(f"test_{name}.py" for name in (*operations, "conv2d_hopper")), "quantised/test_fp8.py")
    assert selected == {f"tests/kernels/{file}" for file in files}
