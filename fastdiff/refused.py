"""The public names of diffusers' classes that fastdiff refuses, with the reason for each.

Calling one raises an InputError, never an AttributeError. A class takes the names of its table that it does not define,
so a new method replaces a refusal.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

from fastdiff.errors import InputError

_HUB = "fastdiff uploads nothing; save with save_pretrained, then upload the folder with `hf upload`"
_FROZEN = "a config is frozen; build another object with from_config(config, option=value)"
_CODE = "fastdiff never runs a model's own code; use the classes of fastdiff"
_LORA = "only text-to-image pipelines take adapters; load them with the pipeline's load_lora_weights"
_SAVING_LORA = "fastdiff does not save adapters; save them with diffusers"
_TRAINING = "fastdiff is for inference only; train with diffusers, and load the saved folder"
_FREEU = "FreeU is not supported yet; leave it out"
_QUANTISATION = "fastdiff has its own 8-bit weights; load the model with precision='int8' or precision='fp8'"
_HOOKS = "fastdiff moves whole models; load the pipeline with offload=True, or call enable_model_cpu_offload"
_PARALLEL = "a model runs on one GPU; use fastdiff.draw_many to draw on many"
_PROCESSORS = "attention processors are not supported yet; fastdiff computes attention itself"
_FORWARD = "it is a part of diffusers' own forward; call the model instead"
_CALL = "it is a part of diffusers' own call; call the pipeline, or loop over its stream"
_IP_ADAPTER = "only text-to-image pipelines take IP-Adapters; draw without them"
_TEXTUAL_INVERSION = "embeddings are tokens of a prompt, and this pipeline takes none; leave it out"
_STEP = "it is a part of diffusers' own step; call step instead"

REFUSED_CLASSES = {  # models that a folder may name, and why they are refused
    "ControlNetUnionModel": "fastdiff does not run it yet, as it needs control_mode, an embedding of each mode and the "
    "transformer that mixes the control pictures; use a ControlNetModel for each kind of picture",
}

# Arguments of diffusers' calls that text-to-image pipelines do not take
OF_TEXT_CALLS = {
    "class_labels": "this model takes prompts; leave it out",
    "num_images": "text-to-image pipelines use num_images_per_prompt; give that",
    "callback": "callback_on_step_end replaces it; give that",
    "callback_steps": "callback_on_step_end is called after each step; leave it out",
    "control_mode": f"it is of a ControlNetUnionModel, and {REFUSED_CLASSES['ControlNetUnionModel']}",
}

# ConfigMixin and PushToHubMixin
OF_ALL = {
    "push_to_hub": _HUB,
    "register_for_auto_class": _CODE,
    "register_to_config": _FROZEN,
    "extract_init_dict": "it is a part of diffusers' from_config; call from_config instead",
    "get_config_dict": "diffusers removed it; call load_config instead",
}

# ModelMixin, PeftAdapterMixin, the mixins of attention and of single files, and transformers' PreTrainedModel
OF_MODELS = {
    **OF_ALL,
    **dict.fromkeys(
        (
            *("active_adapters", "add_adapter", "delete_adapter", "delete_adapters", "disable_adapters"),
            *("disable_lora", "enable_adapters", "enable_lora", "enable_lora_hotswap", "enable_peft_hotswap"),
            *("fuse_lora", "get_adapter_state_dict", "load_adapter", "load_attn_procs", "load_lora_adapter"),
            *("save_attn_procs", "save_lora_adapter", "set_adapter", "set_adapters", "text_encoder_name"),
            *("unet_name", "unfuse_lora", "unload_lora"),
        ),
        _LORA,
    ),
    **dict.fromkeys(
        (
            *("enable_gradient_checkpointing", "gradient_checkpointing_enable", "activation_checkpointing_enable"),
            *("enable_input_require_grads", "resize_token_embeddings", "set_input_embeddings"),
        ),
        _TRAINING,
    ),
    "enable_freeu": _FREEU,
    "enable_group_offload": _HOOKS,
    "enable_layerwise_casting": _QUANTISATION,
    "dequantize": _QUANTISATION,
    "enable_parallelism": _PARALLEL,
    "attn_processors": _PROCESSORS,
    **dict.fromkeys(
        (
            *("get_aug_embed", "get_class_embed", "get_time_embed", "process_encoder_hidden_states"),
            *("create_coordinate_grid", "patchify_and_embed", "patchify_and_embed_omni", "unpatchify"),
        ),
        _FORWARD,
    ),
}

OF_SCHEDULERS = {
    **OF_ALL,
    **dict.fromkeys(
        (
            *("convert_model_output", "dpm_solver_first_order_update", "deis_first_order_update"),
            *("multistep_deis_second_order_update", "multistep_deis_third_order_update"),
            *("multistep_dpm_solver_second_order_update", "multistep_dpm_solver_third_order_update"),
            *("singlestep_dpm_solver_second_order_update", "singlestep_dpm_solver_third_order_update"),
            *("singlestep_dpm_solver_update", "get_order_list", "multistep_uni_c_bh_update"),
            *("multistep_uni_p_bh_update", "get_lms_coefficient", "step_plms", "step_prk", "state_in_first_order"),
            *("get_scalings_for_boundary_condition_discrete", "previous_timestep", "stretch_shift_to_terminal"),
            "time_shift",
        ),
        _STEP,
    ),
}

# DiffusionPipeline and the mixins of StableDiffusionPipeline and StableDiffusionXLPipeline
OF_PIPELINES = {
    **OF_ALL,
    "download": "load with from_pretrained, which downloads what it needs",
    "from_config": "load with from_pretrained",
    "register_modules": "set the part instead, such as pipe.vae = vae",
    "enable_sequential_cpu_offload": "fastdiff moves whole models; call enable_model_cpu_offload() instead",
    "enable_group_offload": "fastdiff moves whole models; call enable_model_cpu_offload() instead",
    "enable_freeu": _FREEU,
    **dict.fromkeys(
        (
            *("load_lora_weights", "unload_lora_weights", "fuse_lora", "unfuse_lora", "set_adapters", "enable_lora"),
            *("get_active_adapters", "get_list_adapters", "delete_adapters", "disable_lora", "enable_lora_hotswap"),
            *("set_lora_device", "lora_state_dict", "load_lora_into_unet", "load_lora_into_text_encoder"),
        ),
        _LORA,
    ),
    **dict.fromkeys(
        ("save_lora_weights", "write_lora_layers", "pack_weights"),
        _SAVING_LORA,
    ),
    **dict.fromkeys(
        (
            *("load_ip_adapter", "unload_ip_adapter", "set_ip_adapter_scale", "prepare_ip_adapter_image_embeds"),
            "encode_image",
        ),
        _IP_ADAPTER,
    ),
    **dict.fromkeys(
        ("load_textual_inversion", "unload_textual_inversion", "maybe_convert_prompt"),
        _TEXTUAL_INVERSION,
    ),
    **dict.fromkeys(
        (
            *("check_inputs", "prepare_extra_step_kwargs", "prepare_latents", "run_safety_checker", "decode_latents"),
            *("get_guidance_scale_embedding", "upcast_vae", "normalize", "de_normalize", "to_torch", "reset_x0"),
            "run_diffusion",
        ),
        _CALL,
    ),
}

# Names that diffusers' users read, and do not call
ATTRIBUTES = frozenset({"attn_processors", "text_encoder_name", "unet_name", "state_in_first_order"})


class Refusing:
    """A class with the interface of a diffusers class, of which it refuses some names."""

    refused: ClassVar[Mapping[str, str]] = {}  # name -> reason

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, reason in cls.refused.items():
            if not hasattr(cls, name):
                function = refusal(name, reason)
                setattr(cls, name, property(function) if name in ATTRIBUTES else function)


def refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that takes any arguments and raises an InputError with the name and the reason."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(f"{name}: {reason}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise InputError: {reason}."
    return refuse
