"""`fastdiff.accelerate(pipe)`: one line that speeds up a diffusers model or pipeline that a program already has.

The models stay the user's objects, of diffusers' classes. Their parameters keep their names, shapes and values. They
move, one at a time, into the memory layout of our models, which share their memory. Only the computation changes.
"""

from typing import Any, TypeVar

from torch import nn

from fastdiff.acceleration import stepping
from fastdiff.acceleration.replacement import check_replaceable, replacement_for, replacement_of
from fastdiff.acceleration.sharing import our_class
from fastdiff.errors import InputError
from fastdiff.kinds import Precision
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import DENOISERS
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.requests.defaults import PRECISION
from fastdiff.schema import checked

Accelerated = TypeVar("Accelerated")


def accelerate(model_or_pipeline: Accelerated, precision: Precision = PRECISION) -> Accelerated:
    """Run a live diffusers model, or the denoiser, ControlNets and VAE of a live diffusers pipeline, on fastdiff.

    For example::

        pipe = diffusers.StableDiffusionXLPipeline.from_pretrained(name).to("cuda")
        fastdiff.accelerate(pipe)
        image = pipe("a cat").images[0]

    The diffusers pipeline still runs its own loop, so callbacks, schedulers, `output_type` and all other arguments work
    as before. So do `state_dict()`, `save_pretrained`, `config`, `to()`, tiling and slicing of the VAE, and
    `enable_model_cpu_offload`. Changed weights change the output.

    So do LoRAs that diffusers loads with peft, before or after `accelerate`: `load_lora_weights` with or without
    `hotswap`, `set_adapters`, `disable_lora`, `delete_adapters`, `fuse_lora`, `unload_lora_weights` and
    `cross_attention_kwargs={"scale": ...}`, or `joint_attention_kwargs` with Z-Image. fastdiff merges the adapters
    (LoRA, DoRA, LoHa, LoKr) into its own weights: it adds them in float32 and rounds the sum once. The parameters of
    the diffusers model keep the plain values, and a layer with an adapter has its weight twice in memory.

    So do plain, plus and full IP-Adapters, several at once: `load_ip_adapter`, `set_ip_adapter_scale` and
    `unload_ip_adapter`, before or after `accelerate`. Their layers stay diffusers', and run once for a loop.

    A scheduler of diffusers that fastdiff has too gets each timestep on the CPU, so that its `step` does not wait for
    the GPU. Call `accelerate` again after you replaced the scheduler.

    What depends on time, text, labels and control pictures only is computed once for the steps of a loop. An edit of a
    prompt, a picture or a weight counts at the next step. torch does not see some edits: through `.data`, through
    numpy, or by a CUDA graph. Such an edit counts when the loop starts again, if it is of a prompt, a picture, an
    adapter, or a layer that has an adapter or reads time, text, labels or control pictures only.

    For inference only: a sample that requires grad is an error.

    Args:
        model_or_pipeline: a UNet2DModel, UNet2DConditionModel, UNet1DModel, DiTTransformer2DModel,
            ZImageTransformer2DModel, AutoencoderKL, ControlNetModel or MultiControlNetModel, or a pipeline with a
            denoiser of these, such as StableDiffusionPipeline, StableDiffusionXLPipeline, ZImagePipeline, an
            image-to-image pipeline, a ControlNet pipeline or a T2I-Adapter pipeline. VAEs and ControlNets of other
            classes, and T2I-Adapters, still run on diffusers.
        precision: `"int8"` stores the weights of the model, or of the pipeline's denoiser and ControlNets, in 8 bits.
            `"fp8"` also multiplies in 8 bits, and needs a GPU of sm_89 or later. With either, the diffusers parameters
            lose their memory: they cannot be saved, changed or moved until `restore`, which returns the 8-bit values.
            Fuse LoRAs and unload them before.

    Returns:
        The same object.

    Raises:
        InputError: the model's class is not supported, fastdiff cannot run the model, or the model has changes that
            fastdiff would ignore: adapters of other kinds, or of any kind with 8 bits, IP-Adapters FaceID, FreeU, other
            attention processors, hooks, or offload of single layers. Such a change after `accelerate` is refused at the
            next call, until it is undone; a forward hook that is added later is not noticed.
    """
    checked("precision", precision, Precision)
    vae = getattr(model_or_pipeline, AutoencoderKL.part.name, None)
    models = [(model, PRECISION if model is vae else precision) for model in _models_of(model_or_pipeline)]
    if precision != PRECISION:  # weights cannot go back from 8 bits if another model is refused
        for each in models:
            check_replaceable(*each)
    for replacement in [replacement_for(*each) for each in models]:
        replacement.install()
    stepping.install(getattr(model_or_pipeline, "scheduler", None))
    return model_or_pipeline


def restore(model_or_pipeline: Accelerated) -> Accelerated:
    """Undo `accelerate`: diffusers' own code runs again, with the same parameters.

    Weights that were in 8 bits keep the values of the 8 bits, in their old dtype.

    Args:
        model_or_pipeline: what `accelerate` was given.

    Returns:
        The same object.

    Raises:
        InputError: the model is not accelerated.
    """
    models = _models_of(model_or_pipeline)
    replacements = [replacement for model in models if (replacement := replacement_of(model)) is not None]
    if not replacements:
        raise InputError("restore: this model is not accelerated")
    for replacement in replacements:
        replacement.remove()
    stepping.remove(getattr(model_or_pipeline, "scheduler", None))
    return model_or_pipeline


def _models_of(model_or_pipeline: Any) -> list[nn.Module]:
    """Return the models to run: the model itself, or a pipeline's VAE, ControlNets and denoiser, if we run them."""
    given = _controlnets(model_or_pipeline)
    if given:
        return given
    denoisers = (getattr(model_or_pipeline, kind.part.name, None) for kind in DENOISERS.values())
    model = next((part for part in denoisers if part is not None), model_or_pipeline)
    if our_class(model) is None:
        names = [*DENOISERS, *ControlNetModel.part.classes]
        raise InputError(
            f"model_or_pipeline: {type(model).__name__} cannot be accelerated; give diffusers' "
            f"{', '.join(names)} or AutoencoderKL, or a pipeline of them"
        )
    vae: Any = getattr(model_or_pipeline, AutoencoderKL.part.name, None)
    vaes = [vae] if our_class(vae) is not None else []
    return [*vaes, *_controlnets(getattr(model_or_pipeline, ControlNetModel.part.name, None)), model]


def _controlnets(part: Any) -> list[nn.Module]:
    """Return the ControlNetModels of a part: a ControlNetModel, or a MultiControlNetModel. Each counts once."""
    nets = getattr(part, "nets", [part])
    return [*dict.fromkeys(net for net in nets if our_class(net) is ControlNetModel)]
