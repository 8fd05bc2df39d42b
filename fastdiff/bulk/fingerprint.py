"""The fingerprint: everything besides the plan that a picture's bits depend on.

Workers with equal fingerprints draw the same bits.
"""

import hashlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import fastdiff
from fastdiff.requests.png import NUMERICS, canonical_json

if TYPE_CHECKING:
    from fastdiff.pipelines import Pipeline

Fingerprint = Mapping[str, str | None]


def take_fingerprint(pipe: "Pipeline", model_files: str) -> Fingerprint:
    """Return the fingerprint of this process. `model_files` is the SHA-256 of the files of `pipe`."""
    import torch

    from fastdiff.execution.devices import device_name, dtype_name
    from fastdiff.kernels.plans import confirmation

    on_gpu = pipe.device.type == "cuda"
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    verdict = confirmation.in_force(pipe.device)
    decided = {} if verdict is None else {"fast kernels": verdict.digest}  # no entry, as in older folders
    return {
        "fastdiff": fastdiff.__version__,
        "numerics": str(NUMERICS),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "CUDA": torch.version.cuda if on_gpu else None,
        "cuDNN": str(cudnn.version()) if on_gpu else None,
        "device": device_name(pipe.device) if on_gpu else f"CPU {instructions}",
        "dtype": dtype_name(pipe.dtype),
        "float32 products": f"{torch.get_float32_matmul_precision()}, TF32 {matmul.allow_tf32} and {cudnn.allow_tf32}",
        "model files": model_files,
        **decided,
    }


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Return a text for each entry that differs, such as "torch 2.13.0, not 2.12.1"."""
    names = dict.fromkeys([*ours, *theirs])
    pairs = [(name, ours.get(name), theirs.get(name)) for name in names]
    return [f"{name} {_shown(mine)}, not {_shown(other)}" for name, mine, other in pairs if mine != other]


def digest(fingerprint: Fingerprint) -> str:
    """Return a short hash of a fingerprint."""
    return hashlib.sha256(canonical_json(dict(fingerprint)).encode()).hexdigest()[:16]


def _shown(value: object) -> str:
    return f"{value!s:.80}" if value is not None else "none"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
