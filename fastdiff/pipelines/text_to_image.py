"""TextToImagePipeline: prompts in, pictures out, of Stable Diffusion 1, 2 and SDXL.

Prompts -> text encoders -> conditions; seeds -> noise; the denoising loop -> VAE -> pictures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from fastdiff.arguments import instance
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.decoding import OutputType, check_finite, with_mean_and_std
from fastdiff.diffusion.pictures import Subjects
from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.kinds import Fraction
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from fastdiff.models.model import Model
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.base import Pipeline
from fastdiff.pipelines.callbacks import Callback, RunningPipeline, StepCallback, check_callback
from fastdiff.pipelines.drawing import DrawingOptions
from fastdiff.pipelines.encoding import TextEncoders
from fastdiff.pipelines.guiding import make_conditions
from fastdiff.pipelines.prompts import PromptOptions, Prompts, Texts
from fastdiff.pipelines.sizes import SizeOptions
from fastdiff.requests.defaults import LIBRARY
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer

AnyOptions = TypeVar("AnyOptions", DrawingOptions, PromptOptions, SizeOptions)

LATENT = "latent"  # an output type: what the U-Net ends with
NOT_HERE = {  # arguments of other pipelines and of diffusers', and why they are refused
    "class_labels": "this model draws from prompts",
    "num_images": "pictures are counted by num_images_per_prompt",
    "callback": "callback_on_step_end has taken its place",
    "callback_steps": "callback_on_step_end is called after each step",
    "timesteps": "steps of one's own are not supported",
    "sigmas": "sigmas of one's own are not supported",
    "denoising_end": "SDXL's refiner, which would go on from there, is not supported",
    "ip_adapter_image": "IP-Adapters are not supported",
    "ip_adapter_image_embeds": "IP-Adapters are not supported",
    "cross_attention_kwargs": "there is no attention processor to take them",
}


class TextToImagePipeline(Pipeline):
    """Text encoders, a U-Net, a VAE and a scheduler: draws as diffusers' StableDiffusionPipeline and its SDXL kin.

    The picture of a prompt and a seed has the same bits alone, in any batch and at any place in it (given `seed`; a
    `generator` draws as diffusers does). A safety checker is not run, and pictures get no watermark.
    """

    reads_text: ClassVar[bool] = True
    denoiser: UNet2DConditionModel

    def __init__(
        self,
        unet: UNet2DConditionModel,
        scheduler: Any,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel | None = None,
        tokenizer: CLIPTokenizer | None = None,
        text_encoder_2: CLIPTextModelWithProjection | None = None,
        tokenizer_2: CLIPTokenizer | None = None,
        *,
        force_zeros_for_empty_prompt: bool = True,
        info: ModelInfo | None = None,
        name: str = "model",
    ):
        """The parts as fastdiff's classes; SDXL has a second encoder, and may have none, for prompt_embeds alone.

        force_zeros_for_empty_prompt: of SDXL; without a negative prompt guidance leads away from zeros, rather than
        from an empty text. InputError where the parts do not fit together.
        """
        instance("unet", unet, UNet2DConditionModel, "a UNet2DConditionModel of fastdiff")
        instance("vae", vae, AutoencoderKL, "an AutoencoderKL of fastdiff")
        _check_unet(unet, vae)
        encoders = [(text_encoder, tokenizer), (text_encoder_2, tokenizer_2)]
        for (model, words), name_of_model in zip(encoders, ("text_encoder", "text_encoder_2"), strict=True):
            if (model is None) != (words is None):
                raise InputError(f"{name_of_model}: it goes with a tokenizer of its own; give both")
        there = [(model, words) for model, words in encoders if model is not None and words is not None]
        self.encoders = TextEncoders([model for model, _ in there], [words for _, words in there], unet.config)
        zeros = checked("force_zeros_for_empty_prompt", force_zeros_for_empty_prompt, bool)
        self.zeros_for_no_prompt = zeros and self.encoders.of_sdxl
        super().__init__(unet, scheduler, info, name, vae)

    @classmethod
    def _of_card(cls, card: ModelCard, models: Mapping[str, Any], scheduler: Scheduler) -> "TextToImagePipeline":
        unet = models[card.denoiser.name]
        unet.config = card.config  # whose sample_size is mended
        tokenizers = {part.name: CLIPTokenizer(card.folder / part.name) for part in card.tokenizers}
        return cls(
            unet,
            scheduler,
            models["vae"],
            text_encoder=models.get("text_encoder"),
            text_encoder_2=models.get("text_encoder_2"),
            **tokenizers,
            force_zeros_for_empty_prompt=card.zeros_for_no_prompt,
            info=card.info,
            name=card.name,
        )

    @property
    def models(self) -> tuple[Model, ...]:
        return (*super().models, *self.encoders.models)

    def __call__(self, prompt: Texts = None, *, return_dict: bool = True, **options: Any) -> Any:
        """Draw pictures. Takes the options of `stream`; see `Pipeline.__call__`."""
        return super().__call__(prompt=prompt, return_dict=return_dict, **options)

    def stream(
        self,
        prompt: Texts = None,
        *,
        negative_prompt: Texts = None,
        guidance_rescale: float = 0.0,
        num_images_per_prompt: int = LIBRARY.pictures,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        **options: Any,
    ) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has the finished `images`.

        The pictures are prompts x seeds, in that order. With `batch_size` (or a list of generators, or latents) they
        are that many, each with a seed and a prompt of its own.

        Args:
            prompt: one, or a list. Its end is cut, with a warning, where it is longer than the tokenizer's length.
            negative_prompt: what guidance leads away from: one, or one for each prompt.
            guidance_rescale: 0 to 1, Lin et al. 2024 (arXiv 2305.08891), section 3.4.
            num_images_per_prompt: picture i of a prompt has seed + i. A list of seeds takes its place.
            callback_on_step_end: called after each step as diffusers', with the pipeline, the number of the step, its
                timestep, and the tensors that `callback_on_step_end_tensor_inputs` names; see `callbacks.StepCallback`.
                The callbacks of diffusers.callbacks fit.
            options: those that every pipeline has, see `Pipeline.stream`, but use_clipped_model_output; further fields
                of PromptOptions (prompt_2, prompt_embeds, clip_skip ...) and, of SDXL, those of SizeOptions
                (original_size ...). A guidance_scale up to 1 is unguided; the default is 7.5, and 5 for SDXL, where the
                model has none of its own; a U-Net that has time_cond_proj_dim, of LCM, is told the scale instead.
                output_type may be latent, for what the U-Net ends with, (N, C, h, w) float32.

        Raises as `Pipeline.stream`, and NonFiniteError naming the part whose output is NaN or infinite.
        """
        asked, prompts, sizes = self._read({"prompt": prompt, "negative_prompt": negative_prompt} | options)
        of_sdxl = self.encoders.of_sdxl
        tensor_names = check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, of_sdxl=of_sdxl)
        rescale = checked("guidance_rescale", guidance_rescale, Fraction)
        subjects = Subjects("prompt", range(prompts.count), "num_images_per_prompt", num_images_per_prompt)
        drawing = self._begin(asked, subjects)
        scale = drawing.sampling.guidance_scale
        with naming_lost_device(), self._working(*self.encoders.models):
            time_ids = sizes.time_ids(*self._told_size(asked, drawing.shape)) if of_sdxl else None
            conditions = make_conditions(
                prompts, drawing.subjects, scale, rescale, time_ids, self.denoiser, self.device
            )
        after_step = None
        if callback_on_step_end is not None:
            running = RunningPipeline(self, len(drawing.schedule), scale)
            timesteps = drawing.schedule.timesteps
            after_step = StepCallback(running, callback_on_step_end, tensor_names, timesteps, conditions)
        return self._run(drawing, drawing.denoise(self.denoiser, conditions, after_step=after_step))

    def _read(self, options: Mapping[str, Any]) -> tuple[DrawingOptions, Prompts, SizeOptions]:
        """Return the arguments of a call by what they are for. Raises InputError for what the model cannot be told."""
        kinds = DrawingOptions, PromptOptions, SizeOptions
        known = {field.name for kind in kinds for field in fields(kind)} - {"use_clipped_model_output", "horizon"}
        for name in sorted(options.keys() - known - {name for name in NOT_HERE if options.get(name) is None}):
            raise InputError(
                f"{name}: {NOT_HERE.get(name, 'text-to-image pipelines have no such argument')}; leave it out"
            )
        sizes = _options_of(SizeOptions, options)
        if not self.encoders.of_sdxl:
            sizes.check_unused()
        told, zeros = _options_of(PromptOptions, options), self.zeros_for_no_prompt
        prompts = Prompts(told, self.encoders, self.denoiser.config, zeros_for_none=zeros)
        return _options_of(DrawingOptions, options), prompts, sizes

    def _told_size(self, options: DrawingOptions, shape: tuple[int, int, int]) -> tuple[int, int]:
        """Return the height and width that SDXL is told: of latents alone not theirs but the default, as diffusers'."""
        sides = self.denoiser.config.trained_size or shape[1:]
        return options.height or self.scale * sides[0], options.width or self.scale * sides[1]

    def _output_type(self, output_type: Any) -> str:
        checked("output_type", output_type, Literal[OutputType, "latent"] | None)
        return LATENT if output_type == LATENT else super()._output_type(output_type)

    def _begin_decode(self, x: Tensor, output_type: str) -> Callable[[], Any]:
        """As Parts'; `latent` returns x as (N, C, H, W)."""
        if output_type != LATENT:
            assert self.vae is not None
            return super()._begin_decode(with_mean_and_std(self.vae, x) if self.encoders.of_sdxl else x, output_type)

        def end() -> Tensor:
            check_finite(x)
            return x.permute(0, 3, 1, 2)

        return end


def _options_of(kind: type[AnyOptions], options: Mapping[str, Any]) -> AnyOptions:
    """Return those of the options that are fields of a kind."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in names})


def _check_unet(unet: UNet2DConditionModel, vae: AutoencoderKL) -> None:
    """InputError for a U-Net that draws from more than a prompt."""
    channels = unet.config.in_channels
    if channels != vae.config.latent_channels and channels > unet.config.out_channels:
        raise InputError(
            f"unet: it takes {channels} channels, as those that paint into a picture or change one do; give a model "
            f"that draws from a prompt alone, of {vae.config.latent_channels}"
        )
    if unet.config.takes_labels:
        raise InputError(
            "unet: it takes class labels beside a prompt, which no pipeline of diffusers gives; use it bare"
        )
