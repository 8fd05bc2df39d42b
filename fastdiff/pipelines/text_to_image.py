"""TextToImagePipeline: prompts in, pictures out, of Stable Diffusion 1, 2 and SDXL.

Prompts -> text encoders -> conditions; seeds -> noise; the denoising loop -> VAE -> pictures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Literal, cast

from torch import Tensor

from fastdiff.arguments import instance
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.decoding import OutputType, check_finite, with_mean_and_std
from fastdiff.diffusion.loop import denoise
from fastdiff.diffusion.noise import Generators, Noise, check_generators
from fastdiff.diffusion.pictures import check_latents, list_pictures, picture_shape
from fastdiff.diffusion.schedulers import Scheduler
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.execution.memory import Portions, or_explain
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.classes import Models
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from fastdiff.models.model import Model
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.base import BasePipeline
from fastdiff.pipelines.callbacks import Callback, RunningPipeline, StepCallback, check_callback
from fastdiff.pipelines.encoding import TextEncoders
from fastdiff.pipelines.guiding import GuidanceOptions, make_conditions
from fastdiff.pipelines.prompts import PromptOptions, Prompts, Texts
from fastdiff.pipelines.results import Step
from fastdiff.pipelines.sizes import SizeOptions
from fastdiff.requests.defaults import LIBRARY, SEED, ModelFacts, Sampling, SamplingOptions, complete_sampling
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer

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


class TextToImagePipeline(BasePipeline):
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
    def _of_card(cls, card: ModelCard, models: Models, scheduler: Scheduler) -> "TextToImagePipeline":
        unet, vae = models.denoiser, models.vae
        assert isinstance(unet, UNet2DConditionModel) and vae is not None  # the registry's to see
        unet.config = cast(UNet2DConditionConfig, card.config)  # whose sample_size is mended
        tokenizers = {part.name: CLIPTokenizer(card.folder / part.name) for part in card.tokenizers}
        return cls(
            unet,
            scheduler,
            vae,
            text_encoder=models.text_encoder,
            text_encoder_2=models.text_encoder_2,
            **tokenizers,
            force_zeros_for_empty_prompt=card.zeros_for_no_prompt,
            info=card.info,
            name=card.name,
        )

    @property
    def models(self) -> tuple[Model, ...]:
        return (*super().models, *self.encoders.models)

    def __call__(self, prompt: Texts = None, *, return_dict: bool = True, **options: Any) -> Any:
        """Draw pictures. Takes the options of `stream`, and returns PipelineOutput or a plain tuple of what that holds.

        Where memory runs out it computes fewer of them at a time, and logs a warning.
        """
        return self._call({"prompt": prompt} | options, return_dict)

    def stream(
        self,
        prompt: Texts = None,
        *,
        negative_prompt: Texts = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_rescale: float = 0.0,
        eta: float | None = None,
        num_images_per_prompt: int = LIBRARY.pictures,
        seed: int | Sequence[int] = SEED,
        batch_size: int | None = None,
        height: int | None = None,
        width: int | None = None,
        generator: Generators | None = None,
        latents: Tensor | None = None,
        output_type: str | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        wait: bool = True,
        **prompt_and_sizes: Any,
    ) -> Iterator[Step]:
        """Draw pictures and yield a Step after each step; the last one has the finished `images`.

        The pictures are prompts x seeds, in that order. With `batch_size` (or a list of generators, or latents) they
        are that many, each with a seed and a prompt of its own.

        Args:
            prompt: one, or a list. Its end is cut, with a warning, where it is longer than the tokenizer's length.
            negative_prompt: what guidance leads away from: one, or one for each prompt.
            num_inference_steps: default: the model's own, else 50. A few samplers call the model more often.
            guidance_scale: up to 1 is unguided. Default: the model's own, else 7.5, and 5 for SDXL. A U-Net that has
                time_cond_proj_dim, of LCM, is told the scale instead.
            guidance_rescale: 0 to 1, Lin et al. 2024 (arXiv 2305.08891), section 3.4.
            eta: of DDIM.
            num_images_per_prompt: picture i of a prompt has seed + i.
            seed: 0 to 2^32 - 1, or a list of seeds instead of `num_images_per_prompt`.
            height, width: pixels. Default: those of the model's sample_size.
            generator: torch draws all noise, in the order diffusers' pipelines draw, instead of `seed`.
            latents: (N, C, h, w), the starting noise.
            output_type: pil, np, pt, or latent for what the U-Net ends with, (N, C, h, w) float32.
            callback_on_step_end: called after each step as diffusers', with the pipeline, the number of the step, its
                timestep, and the tensors that `callback_on_step_end_tensor_inputs` names; see `callbacks.StepCallback`.
                Those of diffusers.callbacks are such.
            wait: for the GPU, whose queue has a few steps then, and for the pictures of the last one. If not, all steps
                are queued at once, and `Step.images` waits.
            prompt_and_sizes: the further fields of PromptOptions (prompt_2, prompt_embeds, clip_skip ...) and, of SDXL,
                those of SizeOptions (original_size ...).

        Raises InputError naming what cannot be drawn, at once; NonFiniteError naming the step or the part whose output
        is NaN or infinite; OutOfMemoryError and DeviceLostError as Pipeline.stream.
        """
        prompts, sizes = self._read(prompt, negative_prompt, prompt_and_sizes)
        of_sdxl = self.encoders.of_sdxl
        tensor_names = check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, of_sdxl=of_sdxl)
        output_type = self._output_type(output_type)
        check_generators(generator, self.device)
        check_latents(latents, self.denoiser.config)
        counts = {
            "batch_size": batch_size,
            "generator": len(generator) if isinstance(generator, list) else None,
            "latents": len(latents) if latents is not None else None,
        }
        of_pictures, seeds = list_pictures(
            seed, num_images_per_prompt, range(prompts.count), counts, ("prompt", "num_images_per_prompt")
        )
        sampling = self._complete(num_inference_steps, eta, guidance_scale)
        schedule = self._schedule(sampling)
        shape = picture_shape(self.denoiser.config, self.scale, height, width, latents)
        guidance = GuidanceOptions(sampling.guidance_scale, guidance_rescale)
        noise = Noise(seeds, shape, generator, self.device, self.dtype)
        portions = Portions(len(seeds), self.device, self.dtype, halves=generator is None, release=self._release_graphs)
        with naming_lost_device():
            x_t = or_explain(partial(noise.start, latents), portions.problem) * schedule.init_noise_sigma
            time_ids = sizes.time_ids(*self._told_size(height, width, shape)) if of_sdxl else None
            with self._working(*self.encoders.models):
                of_prompts = cast(list[int], of_pictures)
                conditions = make_conditions(prompts, of_prompts, guidance, time_ids, self.denoiser, self.device)
            from_steps = noise.of_steps(schedule.noise_dtype)
        after_step = None
        if callback_on_step_end is not None:
            running = RunningPipeline(self, len(schedule), guidance.guidance_scale)
            after_step = StepCallback(running, callback_on_step_end, tensor_names, schedule.timesteps, conditions)
        steps = denoise(
            self.denoiser, x_t, schedule, conditions, noise=from_steps, portions=portions, after_step=after_step
        )
        return self._run(steps, schedule, portions, output_type, wait=wait)

    def _read(self, prompt: Texts, negative_prompt: Texts, others: Mapping[str, Any]) -> tuple[Prompts, SizeOptions]:
        """Return the prompts of a call and its sizes. Raises InputError for what the model cannot be told."""
        of_prompts, of_sizes = ({field.name for field in fields(kind)} for kind in (PromptOptions, SizeOptions))
        unknown = others.keys() - of_prompts - of_sizes - {name for name in NOT_HERE if others.get(name) is None}
        for name in sorted(unknown):
            raise InputError(
                f"{name}: {NOT_HERE.get(name, 'text-to-image pipelines have no such argument')}; leave it out"
            )
        options = {"prompt": prompt, "negative_prompt": negative_prompt} | {
            name: value for name, value in others.items() if name in of_prompts
        }
        sizes = SizeOptions(**{name: value for name, value in others.items() if name in of_sizes})
        if not self.encoders.of_sdxl:
            sizes.check_unused()
        zeros = self.zeros_for_no_prompt
        return Prompts(PromptOptions(**options), self.encoders, self.denoiser.config, zeros_for_none=zeros), sizes

    def _told_size(self, height: int | None, width: int | None, shape: tuple[int, int, int]) -> tuple[int, int]:
        """Return the height and width that SDXL is told: of latents alone not theirs but the default, as diffusers'."""
        sides = self.denoiser.config.trained_size or shape[1:]
        return height or self.scale * sides[0], width or self.scale * sides[1]

    def _complete(self, steps: int | None, eta: float | None, guidance_scale: float | None) -> Sampling:
        return complete_sampling(
            SamplingOptions(self.scheduler_name, steps, eta, None, guidance_scale),
            ModelFacts(self.info, self.scheduler_name, len(self.scheduler), reads_text=True),
            LIBRARY,
            labelled=True,
        )

    def _output_type(self, output_type: Any) -> str:
        checked("output_type", output_type, Literal[OutputType, "latent"] | None)
        return LATENT if output_type == LATENT else super()._output_type(output_type)

    def _begin_decode(self, x: Tensor, output_type: str) -> Callable[[], Any]:
        """As BasePipeline's; `latent` returns x as (N, C, H, W)."""
        if output_type != LATENT:
            assert self.vae is not None
            return super()._begin_decode(with_mean_and_std(self.vae, x) if self.encoders.of_sdxl else x, output_type)

        def end() -> Tensor:
            check_finite(x)
            return x.permute(0, 3, 1, 2)

        return end


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
