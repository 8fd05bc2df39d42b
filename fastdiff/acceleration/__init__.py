"""One line that speeds up the diffusers model or pipeline a program already has: `fastdiff.accelerate(pipe)`.

The models stay the user's objects, of diffusers' classes. Their parameters keep their names, shapes and values and
move, one at a time, into the memory layout of our models, which share them. Only what computes is ours.
"""

from typing import Any, TypeVar

from torch import nn

from fastdiff.acceleration.replacement import replacement_for, replacement_of
from fastdiff.acceleration.sharing import our_class
from fastdiff.errors import InputError
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS
from fastdiff.requests.defaults import PRECISION
from fastdiff.schema import checked

Accelerated = TypeVar("Accelerated")


def accelerate(model_or_pipeline: Accelerated, precision: Precision = PRECISION) -> Accelerated:
    """Run a live diffusers model, or the denoiser and the VAE of a live pipeline, on fastdiff.

    Args:
        model_or_pipeline: a UNet2DModel, UNet2DConditionModel, UNet1DModel, DiTTransformer2DModel or AutoencoderKL, or
            a pipeline of them: StableDiffusionPipeline, StableDiffusionXLPipeline, those from image to image, with a
            ControlNet, ... A VAE of another class stays diffusers'.
        precision: int8 keeps the weights of the model, or of a pipeline's denoiser, in 8 bits; fp8 too, and multiplies
            in 8 bits, on a GPU of sm_89 or later. Diffusers' parameters give up their memory for those, so that they
            cannot be saved, changed or moved until `restore`, which gives back what the 8 bits stand for. LoRAs are
            fused before.

    Returns the same object. The pipeline's own loop runs: callbacks, schedulers, `output_type` and all other arguments
    do what they did, and so do `state_dict()`, `save_pretrained`, `config`, `to()`, tiling and slicing of the VAE, and
    `enable_model_cpu_offload`. Weights that change, a fused LoRA among them, change the output. For inference only: a
    sample that requires grad is an error.

    Raises InputError for a model of another class or one that we cannot run, and where a change to it would be passed
    over: LoRA layers that are not fused, IP-Adapter, FreeU, changed attention processors, hooks and offload of single
    layers. A change that comes later, but for a forward hook, is refused at the next call, until it is undone.
    """
    checked("precision", precision, Precision)
    models = _models_of(model_or_pipeline)
    precisions: list[Precision] = [precision, PRECISION]  # of the denoiser, and of the VAE
    # the denoiser last: once its weights have 8 bits, nothing may be refused
    for replacement in [replacement_for(*each) for each in reversed([*zip(models, precisions, strict=False)])]:
        replacement.install()
    return model_or_pipeline


def restore(model_or_pipeline: Accelerated) -> Accelerated:
    """Undo `accelerate`: diffusers computes again, over the same parameters. Returns the same object.

    Weights that had 8 bits are those that the 8 bits stand for.
    """
    models = _models_of(model_or_pipeline)
    replacements = [replacement for model in models if (replacement := replacement_of(model)) is not None]
    if not replacements:
        raise InputError("restore: this model is not accelerated")
    for replacement in replacements:
        replacement.remove()
    return model_or_pipeline


def _models_of(model_or_pipeline: Any) -> list[nn.Module]:
    """The models to run: that which was given, or the denoiser of a pipeline, and its VAE where it is one of ours."""
    denoisers = (getattr(model_or_pipeline, kind.part.name, None) for kind in DENOISERS.values())
    model = next((part for part in denoisers if part is not None), model_or_pipeline)
    if our_class(model) is None:
        raise InputError(
            f"model_or_pipeline: {type(model).__name__} cannot be accelerated; give diffusers' "
            f"{', '.join(DENOISERS)} or AutoencoderKL, or a pipeline of them"
        )
    vae: Any = getattr(model_or_pipeline, AutoencoderKL.part.name, None)
    return [model, vae] if our_class(vae) is not None else [model]
