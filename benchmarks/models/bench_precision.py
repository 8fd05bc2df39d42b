"""Forwards of models with 8-bit weights, against our own in bfloat16: times, errors and memory.

    python benchmarks/models/bench_precision.py [WORKLOAD ...] [--peers] [--save [DIR]]

`--peers` adds diffusers under torch.compile (reduce-overhead), in bfloat16 and, if torchao is installed, with torchao's
int8 weights and fp8 with a factor per row; torchao quantises linear layers only. The models are measured one after the
other, each alone on the GPU. `peak` is the peak of the memory that torch reserves while a model is called, CUDA graphs
included. Errors are against diffusers in float32: the RMS of the error over the RMS of the output. Random weights are
not a hard case; `fastdiff verify` measures the errors of a real model.
"""

import gc
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import fastdiff
from benchmarks.harness.reports import PARSER, chosen, command_line, needs_gpu, report
from benchmarks.models.forwards import MODELS_GPU
from fastdiff.checkpoints.quantisation import formats
from fastdiff.checkpoints.weights import load_weights
from fastdiff.kinds import Precision
from fastdiff.tuning.forwards import in_dtype, inputs
from fastdiff.tuning.models import class_name
from fastdiff.tuning.timing import DEVICE, measure
from fastdiff.verification.peers import compile_diffusers, held_bytes

WORKLOADS = {name: MODELS_GPU[name] for name in ("sdxl_b2", "sd15_b16", "dit_b2", "dit_b32", "ddpm256_b8")}
DTYPE = torch.bfloat16
TORCHAO = {  # torchao's configurations and their arguments
    "int8": ("Int8WeightOnlyConfig", {}),
    "fp8": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
}

Weights = Mapping[str, Tensor]
Build = Callable[[dict, Weights], nn.Module]


def main() -> None:
    needs_gpu()
    PARSER.add_argument("--peers", action="store_true", help="also measure torch.compile and torchao")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # errors are measured against float32
    builds: dict[str, Build] = {"fastdiff": ours, "int8": partial(ours, precision="int8")}
    builds |= {"fp8": partial(ours, precision="fp8")}
    if command_line().peers:
        builds |= {"compile": compiled}
        if importlib.util.find_spec("torchao"):
            builds |= {f"torchao_{name}": partial(compiled_by_torchao, name=name) for name in TORCHAO}
    report("precision", (row(name, builds) for name in chosen(WORKLOADS)))


@torch.inference_mode()
def row(name: str, builds: Mapping[str, Build]) -> dict[str, Any]:
    """Return a workload's times, errors and memory with each of the builds."""
    config, batch, _ = WORKLOADS[name]
    given, weights, expected = truth(config, batch)
    numbers: dict[str, Any] = {"workload": name}
    for who, build in builds.items():
        model = build(config, weights)
        error = model(*given).sample.float() - expected
        numbers |= {
            f"{who}_ms": measure({who: lambda model=model: model(*given)}, graph=False)[who],
            f"{who}_err": (error.square().mean() / expected.square().mean()).sqrt().item(),
            f"{who}_weights": sum(each.nbytes for each in model.parameters()),
            f"{who}_peak": held_bytes(lambda model=model: model(*given)),
        }
        del model
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return numbers


def truth(config: dict, batch: int) -> tuple[tuple, Weights, Tensor]:
    """Return a forward's arguments, diffusers' weights on the CPU, and diffusers' output in float32."""
    torch.manual_seed(0)
    with DEVICE:  # the CPU takes long to draw the numbers of a large model
        theirs = getattr(diffusers, class_name(config))(**config).eval()
    exact = inputs(config, batch)
    expected = theirs(*exact).sample
    return in_dtype(exact, DTYPE), {name: each.to("cpu", DTYPE) for name, each in theirs.state_dict().items()}, expected


def ours(config: dict, weights: Weights, precision: Precision = "full") -> nn.Module:
    """Return our model in bfloat16, with its weights in `precision`."""
    with torch.device("meta"):
        model = getattr(fastdiff, class_name(config)).from_config(config)
    in_8_bits = formats(model, precision)
    load_weights(model, dict(weights), source="benchmark", dtype=DTYPE, device=DEVICE, in_8_bits=in_8_bits)
    return model


def diffusers_model(config: dict, weights: Weights) -> nn.Module:
    with DEVICE:
        model = getattr(diffusers, class_name(config))(**config).eval().to(DTYPE)
    model.load_state_dict(weights)
    return model.to(memory_format=torch.channels_last)


def compiled(config: dict, weights: Weights) -> nn.Module:
    return compile_diffusers(diffusers_model(config, weights))


def compiled_by_torchao(config: dict, weights: Weights, name: str) -> nn.Module:
    from torchao import quantization

    model = diffusers_model(config, weights)
    kind, options = TORCHAO[name]
    options = {key: getattr(quantization, value)() for key, value in options.items()}
    quantization.quantize_(model, getattr(quantization, kind)(**options))
    return torch.compile(model, mode="reduce-overhead", fullgraph=True)


if __name__ == "__main__":
    main()
