"""The arguments of diffusers' pipelines in their order, so that ours can be called by position as diffusers' are."""

from fastdiff.arguments import by_name as by_name

_INPAINTED = ("image", "mask_image", "masked_image_latents", "height", "width", "padding_mask_crop", "strength")
_CONTROLLED = ("image", "mask_image", "control_image", "height", "width", "padding_mask_crop", "strength")
_CONTROL = ("controlnet_conditioning_scale", "guess_mode", "control_guidance_start", "control_guidance_end")
_STEPS = ("num_inference_steps", "timesteps", "sigmas")
_LAST = ("output_type", "return_dict")
_PROMPTS = ("prompt_embeds", "negative_prompt_embeds")
_POOLED = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
_ADAPTERS = ("ip_adapter_image", "ip_adapter_image_embeds")
_CALLBACK = ("clip_skip", "callback_on_step_end", "callback_on_step_end_tensor_inputs")
_SIZE = ("original_size", "crops_coords_top_left", "target_size")
_NOISE = ("num_images_per_prompt", "eta", "generator", "latents")
_CAPTIONS = (
    *("num_inference_steps", "sigmas", "guidance_scale", "cfg_normalization", "cfg_truncation", "negative_prompt"),
    *("num_images_per_prompt", "generator", "latents", *_PROMPTS, *_LAST, "joint_attention_kwargs", *_CALLBACK[1:]),
    "max_sequence_length",
)

CALLS: dict[str, tuple[str, ...]] = {  # the arguments of __call__, by diffusers' class
    "DDPMPipeline": ("batch_size", "generator", "num_inference_steps", *_LAST),
    "DDIMPipeline": (
        *("batch_size", "generator", "eta", "num_inference_steps", "use_clipped_model_output"),
        *_LAST,
    ),
    "DiTPipeline": ("class_labels", "guidance_scale", "generator", "num_inference_steps", *_LAST),
    "ValueGuidedRLPipeline": ("obs", "batch_size", "planning_horizon", "n_guide_steps", "scale"),
    "StableDiffusionPipeline": (
        *("prompt", "height", "width", "num_inference_steps", "timesteps", "sigmas", "guidance_scale"),
        *("negative_prompt", *_NOISE, *_PROMPTS, *_ADAPTERS, *_LAST),
        *("cross_attention_kwargs", "guidance_rescale", *_CALLBACK),
    ),
    "StableDiffusionXLPipeline": (
        *("prompt", "prompt_2", "height", "width", "num_inference_steps", "timesteps", "sigmas", "denoising_end"),
        *("guidance_scale", "negative_prompt", "negative_prompt_2", *_NOISE, *_PROMPTS, *_POOLED, *_ADAPTERS, *_LAST),
        *("cross_attention_kwargs", "guidance_rescale", *_SIZE, *(f"negative_{name}" for name in _SIZE), *_CALLBACK),
    ),
    "StableDiffusionXLImg2ImgPipeline": (
        *("prompt", "prompt_2", "image", "strength", "num_inference_steps", "timesteps", "sigmas", "denoising_start"),
        *("denoising_end", "guidance_scale", "negative_prompt", "negative_prompt_2", *_NOISE, *_PROMPTS, *_POOLED),
        *(*_ADAPTERS, *_LAST, "cross_attention_kwargs", "guidance_rescale", *_SIZE),
        *(*(f"negative_{name}" for name in _SIZE), "aesthetic_score", "negative_aesthetic_score", *_CALLBACK),
    ),
    "StableDiffusionInpaintPipeline": (
        *("prompt", *_INPAINTED, *_STEPS, "guidance_scale", "negative_prompt", *_NOISE, *_PROMPTS, *_ADAPTERS),
        *(*_LAST, "cross_attention_kwargs", *_CALLBACK),
    ),
    "StableDiffusionXLInpaintPipeline": (
        *("prompt", "prompt_2", *_INPAINTED, *_STEPS, "denoising_start", "denoising_end", "guidance_scale"),
        *("negative_prompt", "negative_prompt_2", *_NOISE, *_PROMPTS, *_POOLED, *_ADAPTERS, *_LAST),
        *("cross_attention_kwargs", "guidance_rescale", *_SIZE, *(f"negative_{name}" for name in _SIZE)),
        *("aesthetic_score", "negative_aesthetic_score", *_CALLBACK),
    ),
    "StableDiffusionControlNetPipeline": (
        *("prompt", "image", "height", "width", *_STEPS, "guidance_scale", "negative_prompt", *_NOISE, *_PROMPTS),
        *(*_ADAPTERS, *_LAST, "cross_attention_kwargs", *_CONTROL, *_CALLBACK),
    ),
    "StableDiffusionControlNetImg2ImgPipeline": (
        *("prompt", "image", "control_image", "height", "width", "strength", "num_inference_steps", "guidance_scale"),
        *("negative_prompt", *_NOISE, *_PROMPTS, *_ADAPTERS, *_LAST, "cross_attention_kwargs", *_CONTROL, *_CALLBACK),
    ),
    "StableDiffusionControlNetInpaintPipeline": (
        *("prompt", *_CONTROLLED, "num_inference_steps", "guidance_scale", "negative_prompt", *_NOISE, *_PROMPTS),
        *(*_ADAPTERS, *_LAST, "cross_attention_kwargs", *_CONTROL, *_CALLBACK),
    ),
    "StableDiffusionXLControlNetPipeline": (
        *("prompt", "prompt_2", "image", "height", "width", *_STEPS, "denoising_end", "guidance_scale"),
        *("negative_prompt", "negative_prompt_2", *_NOISE, *_PROMPTS, *_POOLED, *_ADAPTERS, *_LAST),
        *("cross_attention_kwargs", *_CONTROL, *_SIZE, *(f"negative_{name}" for name in _SIZE), *_CALLBACK),
    ),
    "StableDiffusionXLControlNetImg2ImgPipeline": (
        *("prompt", "prompt_2", "image", "control_image", "height", "width", "strength", "num_inference_steps"),
        *("guidance_scale", "negative_prompt", "negative_prompt_2", *_NOISE, *_PROMPTS, *_POOLED, *_ADAPTERS, *_LAST),
        *("cross_attention_kwargs", *_CONTROL, *_SIZE, *(f"negative_{name}" for name in _SIZE)),
        *("aesthetic_score", "negative_aesthetic_score", *_CALLBACK),
    ),
    "StableDiffusionXLControlNetInpaintPipeline": (
        *("prompt", "prompt_2", *_CONTROLLED, "num_inference_steps", "denoising_start", "denoising_end"),
        *("guidance_scale", "negative_prompt", "negative_prompt_2", *_NOISE, *_PROMPTS, *_ADAPTERS, *_POOLED, *_LAST),
        *("cross_attention_kwargs", *_CONTROL, "guidance_rescale", *_SIZE),
        *("aesthetic_score", "negative_aesthetic_score", *_CALLBACK),
    ),
    "ZImagePipeline": ("prompt", "height", "width", *_CAPTIONS),
    "ZImageImg2ImgPipeline": ("prompt", "image", "strength", "height", "width", *_CAPTIONS),
    "ZImageInpaintPipeline": (
        *("prompt", "image", "mask_image", "masked_image_latents", "strength", "height", "width"),
        *_CAPTIONS,
    ),
}
ENCODE_PROMPT: dict[str, tuple[str, ...]] = {  # the arguments of encode_prompt, by diffusers' class
    "StableDiffusionPipeline": (
        *("prompt", "device", "num_images_per_prompt", "do_classifier_free_guidance", "negative_prompt"),
        *(*_PROMPTS, "lora_scale", "clip_skip"),
    ),
    "StableDiffusionXLPipeline": (
        *("prompt", "prompt_2", "device", "num_images_per_prompt", "do_classifier_free_guidance", "negative_prompt"),
        *("negative_prompt_2", *_PROMPTS, *_POOLED, "lora_scale", "clip_skip"),
    ),
}
ENCODE_PROMPT["StableDiffusionXLImg2ImgPipeline"] = ENCODE_PROMPT["StableDiffusionXLPipeline"]
for _kind in ("StableDiffusion", "StableDiffusionXL"):
    for _name in ("Inpaint", "ControlNet", "ControlNetImg2Img", "ControlNetInpaint"):
        ENCODE_PROMPT[f"{_kind}{_name}Pipeline"] = ENCODE_PROMPT[f"{_kind}Pipeline"]
