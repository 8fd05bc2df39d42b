"""LayerNorm and RMSNorm with what is fused into them: ours, eager and compiled torch, on bfloat16.

    python benchmarks/bench_layer_norm.py [--save [DIR]]

`tbps` counts each tensor of tokens once; `share` is its fraction of what a large copy reaches (small tensors stay in
the cache and beat it).
"""

from typing import Any

import torch
from harness import DEVICE, ceilings, compiled, measure, needs_gpu, report
from shapes import LAYER_NORMS

from fastdiff.kernels.layer_norm import layer_norm


def main() -> None:
    needs_gpu("torch's own function")
    copy = ceilings()["copy_tbps"]
    report("layer_norm", (row(name, copy) for name in LAYER_NORMS))


@torch.inference_mode()
def row(name: str, copy_tbps: float) -> dict[str, Any]:
    n, tokens, channels, added, modulated, rms = LAYER_NORMS[name]
    x = randn(n, tokens, channels)
    options = {"eps": 1e-6, "rms": rms}
    if added:
        options["residual"] = randn(n, tokens, channels)
    if modulated:
        options["shift"], options["scale"], *_ = randn(n, 6 * channels).chunk(6, dim=1)
    plain = compiled(layer_norm.reference)
    calls = {
        "fastdiff": lambda: layer_norm(x, **options),
        "eager": lambda: layer_norm.reference(x, **options),
        "compile": lambda: plain(x, **options),
    }
    widened = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    truth = first(layer_norm.reference(x.float(), **widened))
    errors = {who: (first(call()).float() - truth).abs().max().item() for who, call in calls.items()}
    times = measure(calls)
    rate = (2 + 2 * added) * x.nbytes / times["fastdiff"] / 1e9
    return {
        "workload": name,
        **{f"{who}_us": 1e3 * milliseconds for who, milliseconds in times.items()},
        "tbps": rate,
        "share": rate / copy_tbps,
        "max_abs_err": errors["fastdiff"],
        "eager_max_abs_err": errors["eager"],
    }


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
