"""Fast, trustworthy diffusion image generation in plain PyTorch and Triton.

Importing the package is cheap: each public name is imported on first use.
"""

import os.path
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

__version__ = "0.2.0"

_EXPORTS = {
    "AutoencoderKL": "fastdiff.models.autoencoder",
    "AutoencoderTiny": "fastdiff.models.autoencoder_tiny",
    "CLIPTextModel": "fastdiff.models.clip",
    "CLIPTextModelWithProjection": "fastdiff.models.clip",
    "CLIPVisionModelWithProjection": "fastdiff.models.clip_vision",
    "ControlNetModel": "fastdiff.models.controlnet",
    "DiTTransformer2DModel": "fastdiff.models.dit",
    "Engine": "fastdiff.engine",
    "InputError": "fastdiff.errors",
    "LabelPipeline": "fastdiff.pipelines",
    "NonFiniteError": "fastdiff.errors",
    "Pipeline": "fastdiff.pipelines",
    "Qwen3Model": "fastdiff.models.qwen3",
    "Styles": "fastdiff.requests.styles",
    "TextToImagePipeline": "fastdiff.pipelines",
    "TrajectoryPipeline": "fastdiff.pipelines",
    "UNet1DModel": "fastdiff.models.unet1d",
    "UNet2DConditionModel": "fastdiff.models.unet2d_condition",
    "UNet2DModel": "fastdiff.models.unet2d",
    "ZImagePipeline": "fastdiff.pipelines",
    "ZImageTransformer2DModel": "fastdiff.models.z_image",
    "accelerate": "fastdiff.acceleration",
    "draw_many": "fastdiff.bulk.launching",
    "report": "fastdiff.pipelines.reporting",
    "restore": "fastdiff.acceleration",
}


def _exports() -> dict[str, str]:
    """Return the module of each public name: the names above, and the scheduler of each file in fastdiff/samplers."""
    samplers = import_module("fastdiff.sampler_names").SAMPLERS
    return {**_EXPORTS, **{sampler.class_name: sampler.module for sampler in samplers.values()}}


def __getattr__(name: str):
    module = _EXPORTS.get(name) or _exports().get(name)
    if name == "__all__":
        return ["__version__", *_exports()]
    if module is None:
        raise AttributeError(f"module 'fastdiff' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_exports()])


class _KernelsBesideThePackage:
    """The finder of `fastdiff.kernels` where fastdiff/kernels is not a folder.

    In a checkout fastdiff/kernels is a symbolic link to the folder beside the package, and an installed package has the
    folder itself. An unpacked source distribution has neither, nor does a checkout whose git creates no symbolic links,
    as on Windows. There this finder makes the folder beside the package the same namespace package.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if name != "fastdiff.kernels":
            return None
        spec = ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [os.path.join(os.path.dirname(__path__[0]), "kernels")]
        return spec


if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    sys.meta_path.append(_KernelsBesideThePackage())
