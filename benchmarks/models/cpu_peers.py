"""One forward of a model on the CPU, by one of the peers of `bench_cpu.py`, in a process of its own.

    python benchmarks/models/cpu_peers.py PEER FOLDER THREADS

FOLDER has `model` as diffusers saves it, `model.onnx`, and `inputs.npz`. The process prints a line of JSON after its
first forward: the largest error, as a fraction of the largest expected output. For each number N on stdin it runs
forwards for N seconds and prints their milliseconds. For `profile` it prints the milliseconds of a forward by class.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Forward = Callable[[], np.ndarray]
Arrays = dict[str, np.ndarray]

CLASSES = {  # classes of torch's functions, by a part of their names; the first that fits counts
    "convolutions": ("convolution", "conv2d"),
    "products": ("linear", "addmm", "mm"),
    "norms": ("norm",),
    "attention": ("scaled_dot_product", "softmax"),
    "activations": ("silu", "gelu", "sigmoid"),
    "copies": ("cat", "copy", "clone", "upsample", "strided", "empty", "pad", "permute", "contiguous"),
}
REPEATS, CALLS = 8, 5  # `profile` runs REPEATS times and keeps the shortest; each run has CALLS forwards


def by_torch(model: Any, arrays: Arrays, threads: int, *, dtype: str = "float32", channels_last: bool = False) -> Any:
    """Return a call of a torch model with the arrays, which returns a tensor."""
    import torch

    torch.set_num_threads(threads)
    given = [torch.from_numpy(each) for name, each in arrays.items() if name != "expected"]
    given = [each.to(getattr(torch, dtype)) if each.is_floating_point() else each for each in given]
    if channels_last:
        given[0] = given[0].to(memory_format=torch.channels_last)
    return torch.inference_mode()(lambda: model(*given).sample)


def as_arrays(call: Callable[[], Any]) -> Forward:
    return lambda: call().float().numpy()


def fastdiff(folder: Path, arrays: Arrays, threads: int, dtype: str = "float32") -> Forward:
    import torch

    import fastdiff as library

    torch.set_num_threads(threads)
    loads = getattr(library, class_of(folder)).from_pretrained
    return as_arrays(by_torch(loads(folder / "model", torch_dtype=getattr(torch, dtype)), arrays, threads, dtype=dtype))


def bfloat16(folder: Path, arrays: Arrays, threads: int) -> Forward:
    return fastdiff(folder, arrays, threads, "bfloat16")


def diffusers_model(folder: Path) -> Any:
    import diffusers

    return getattr(diffusers, class_of(folder)).from_pretrained(folder / "model").eval()


def eager(folder: Path, arrays: Arrays, threads: int) -> Forward:
    return as_arrays(by_torch(diffusers_model(folder), arrays, threads))


def channels_last(folder: Path, arrays: Arrays, threads: int) -> Forward:
    import torch

    model = diffusers_model(folder).to(memory_format=torch.channels_last)
    return as_arrays(by_torch(model, arrays, threads, channels_last=True))


def compiled(folder: Path, arrays: Arrays, threads: int) -> Forward:
    import torch
    import torch._inductor.config as inductor

    inductor.freezing = True
    model = torch.compile(diffusers_model(folder).to(memory_format=torch.channels_last))
    return as_arrays(by_torch(model, arrays, threads, channels_last=True))


def onnxruntime(folder: Path, arrays: Arrays, threads: int) -> Forward:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    given = {name: arrays[name] for name in names}
    return lambda: session.run(None, given)[0]


def openvino(folder: Path, arrays: Arrays, threads: int) -> Forward:
    import openvino as ov

    options = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # otherwise bfloat16 where the CPU has it
    }
    model = ov.Core().compile_model(folder / "model.onnx", "CPU", options)
    names = [(each.names & arrays.keys()).pop() for each in model.inputs]  # an input may have other names too
    given = [arrays[name] for name in names]
    return lambda: model(given)[0]


PEERS: dict[str, Callable[[Path, Arrays, int], Forward]] = {
    "fastdiff": fastdiff,
    "spinning": fastdiff,  # in an environment where threads wait as torch lets them
    "bfloat16": bfloat16,
    "eager": eager,
    "channels_last": channels_last,
    "compile": compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


def export(folder: Path) -> None:
    """Write diffusers' model as `model.onnx`, for the shapes of the inputs."""
    import torch

    class Sample(torch.nn.Module):
        def __init__(self, model: torch.nn.Module):
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            return self.model(*given).sample

    arrays = read_arrays(folder)
    names = [name for name in arrays if name != "expected"]
    given = tuple(torch.from_numpy(arrays[name]) for name in names)
    file = str(folder / "model.onnx")
    torch.onnx.export(
        Sample(diffusers_model(folder)).eval(),
        given,
        file,
        input_names=names,
        output_names=["y"],
        dynamo=True,
        verbose=False,
    )


def class_of(folder: Path) -> str:
    return json.loads((folder / "model" / "config.json").read_text())["_class_name"]


def read_arrays(folder: Path) -> Arrays:
    with np.load(folder / "inputs.npz") as saved:
        return dict(saved)


def timed(forward: Callable[[], Any], seconds: float) -> list[float]:
    """Return the milliseconds of forwards for so many seconds, of three at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        forward()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def profiled(forward: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of a forward by class of torch's functions, and the rest, which is mostly Python."""
    from torch.profiler import ProfilerActivity, profile

    best: dict[str, float] = {}
    for _ in range(REPEATS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            whole = sum(timed_once(forward) for _ in range(CALLS)) / CALLS
        found = {name: 0.0 for name in (*CLASSES, "others")}
        for event in profiler.key_averages():
            found[class_of_function(event.key)] += event.self_cpu_time_total / 1e3 / CALLS
        found |= {"rest": whole - sum(found.values()), "whole": whole}
        best = found if not best or whole < best["whole"] else best
    return best


def timed_once(forward: Callable[[], Any]) -> float:
    start = time.perf_counter()
    forward()
    return 1e3 * (time.perf_counter() - start)


def class_of_function(name: str) -> str:
    """Return the class of a torch function, such as `aten::silu_`."""
    name = name.rpartition("::")[2]
    return next((each for each, parts in CLASSES.items() if any(part in name for part in parts)), "others")


def main(peer: str, folder: Path, threads: int) -> None:
    if peer == "export":
        return export(folder)
    arrays = read_arrays(folder)
    forward = PEERS[peer](folder, arrays, threads)
    expected = arrays["expected"]
    say(float(np.abs(forward() - expected).max() / np.abs(expected).max()))
    timed(forward, 0)  # a model may trace or compile at its next calls too
    for line in sys.stdin:
        say(profiled(forward) if line.strip() == "profile" else timed(forward, float(line)))


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
