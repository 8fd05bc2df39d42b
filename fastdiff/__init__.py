"""Fast, trustworthy diffusion image generation in plain PyTorch and Triton.

Importing the package does no work: each public name is loaded when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "DDIMScheduler": "fastdiff.diffusion.schedulers",
    "DDPMScheduler": "fastdiff.diffusion.schedulers",
    "DiTTransformer2DModel": "fastdiff.models.dit",
    "InputError": "fastdiff.errors",
    "NonFiniteError": "fastdiff.errors",
    "Pipeline": "fastdiff.pipeline",
    "UNet2DModel": "fastdiff.models.unet2d",
    "accelerate": "fastdiff.acceleration",
    "report": "fastdiff.reporting",
    "restore": "fastdiff.acceleration",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fastdiff' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
