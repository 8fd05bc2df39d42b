"""`encode_prompt` of text-to-image pipelines, as diffusers' pipelines have it."""

from typing import Any, ClassVar

from torch import Tensor

from fastdiff.execution.devices import naming_lost_device, resolve_device
from fastdiff.kinds import Pictures
from fastdiff.pipelines.drawing import accepted, names_of, options_of
from fastdiff.pipelines.encoding import TextEncoders
from fastdiff.pipelines.last_call import LastCall
from fastdiff.pipelines.prompts import PromptOptions, Prompts
from fastdiff.pipelines.signatures import ENCODE_PROMPT, by_name
from fastdiff.schema import checked


class EncodingPrompts(LastCall):
    """A pipeline whose text encoders can be called alone."""

    refused: ClassVar[dict[str, str]]  # arguments of other pipelines and of diffusers, and why they are refused
    encoders: TextEncoders
    zeros_for_no_prompt: bool

    def encode_prompt(self, *args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """Encode prompts, as `encode_prompt` of diffusers' StableDiffusionPipeline or StableDiffusionXLPipeline.

        Args:
            args: the arguments by position, in the order of diffusers' class; see `signatures.ENCODE_PROMPT`.
            options: `prompt`, `negative_prompt`, `prompt_embeds`, `negative_prompt_embeds`, `clip_skip`,
                `prompt_syntax` and `emphasis`, for SDXL also `prompt_2`, `negative_prompt_2` and the pooled embeddings,
                as in a call. `device` defaults to the pipeline's, `num_images_per_prompt` (rows for each prompt) to 1,
                and `do_classifier_free_guidance` (whether to encode the negative prompts) to True. `lora_scale`
                multiplies the weights of all active adapters.

        Returns:
            (prompt_embeds, negative_prompt_embeds), each (N, L, C); for SDXL also (pooled_prompt_embeds,
            negative_pooled_prompt_embeds), each (N, C). The negative ones are None without guidance.

        Raises InputError for an argument that is wrong, and NonFiniteError as `stream`.
        """
        options = by_name(ENCODE_PROMPT[self._usual_class()], args, options, "encode_prompt")
        known = names_of(PromptOptions) | {
            "device",
            "num_images_per_prompt",
            "do_classifier_free_guidance",
            "lora_scale",
        }
        options = accepted(options, known, self.refused, "text encoders")
        device = options.get("device")
        device = self.device if device is None else resolve_device(device)
        count = checked("num_images_per_prompt", options.get("num_images_per_prompt", 1), Pictures | None) or 1
        guided = checked("do_classifier_free_guidance", options.get("do_classifier_free_guidance", True), bool)
        scale = checked("lora_scale", options.get("lora_scale"), float | None)
        told, zeros = options_of(PromptOptions, options), self.zeros_for_no_prompt
        prompts = Prompts(told, self.encoders, self.denoiser.config, zeros_for_none=zeros)
        with naming_lost_device(), self._encoding(self._call_of(1.0 if scale is None else scale, prompts.loras)):
            return prompts.stacked(count, device, negative=guided)
