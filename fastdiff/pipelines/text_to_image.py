"""TextToImagePipeline: draws pictures from prompts with Stable Diffusion 1, 2 and SDXL.

Prompts -> text encoders -> conditions; seeds -> noise; the denoising loop -> VAE -> pictures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from fastdiff.arguments import instance
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import CONTROLNET, TEXT_ENCODER, UNET_CONDITION, pipeline_class
from fastdiff.diffusion.decoding import with_mean_and_std
from fastdiff.diffusion.pictures import Subjects
from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.kinds import Fraction
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from fastdiff.models.coding import Autoencoder
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.model import Model
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.pipelines.adapting import scale_of
from fastdiff.pipelines.callbacks import Callback, RunningPipeline, StepCallback, check_callback, tensor_names_of
from fastdiff.pipelines.control_calls import ControlCalls
from fastdiff.pipelines.controlling import ControlOptions
from fastdiff.pipelines.drawing import DrawingOptions, accepted, names_of, options_of
from fastdiff.pipelines.encoding import TextEncoders
from fastdiff.pipelines.encoding_prompts import EncodingPrompts
from fastdiff.pipelines.fitting import check_unet, checked_nets
from fastdiff.pipelines.guiding import Guiding, checked_interval, make_groups
from fastdiff.pipelines.hires import UpscaleOptions, go_on_larger
from fastdiff.pipelines.image_processor import ImageProcessor
from fastdiff.pipelines.image_prompts import ImagePrompting, ImagePromptOptions
from fastdiff.pipelines.image_to_image import Encoding, ImageOptions, ImageStart, read_image_to_image
from fastdiff.pipelines.inpainting import InpaintStart, MaskOptions, read_inpainting
from fastdiff.pipelines.inversion import TextualInversion
from fastdiff.pipelines.parts import VAE_KINDS
from fastdiff.pipelines.prompted import check_groups, denoise_groups
from fastdiff.pipelines.prompts import PromptOptions, Prompts, Texts
from fastdiff.pipelines.refining import PartOptions
from fastdiff.pipelines.sizes import SizeOptions
from fastdiff.refused import OF_TEXT_CALLS as REFUSED
from fastdiff.requests.defaults import LIBRARY
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer

TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


class TextToImagePipeline(TextualInversion, EncodingPrompts, ImagePrompting, ControlCalls):
    """Text-to-image pictures, as diffusers' StableDiffusionPipeline and StableDiffusionXLPipeline draw them.

    A prompt and a seed give the same bits whatever the batch size, and wherever in the batch they are. A `generator`
    gives the noise that diffusers draws with it. The safety checker is not run, and pictures get no watermark.
    """

    reads_text: ClassVar[bool] = True
    returns_latents: ClassVar[bool] = True
    refused = REFUSED
    text_encoder_name, unet_name = TEXT_ENCODER.name, UNET_CONDITION.name
    interrupt = False  # a run is interrupted by leaving the loop over `stream`
    safety_checker = None  # not run
    optional_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer", CONTROLNET.name)
    denoiser: UNet2DConditionModel

    def __init__(
        self,
        unet: UNet2DConditionModel,
        scheduler: Any,
        vae: Autoencoder,
        text_encoder: CLIPTextModel | None = None,
        tokenizer: CLIPTokenizer | None = None,
        text_encoder_2: CLIPTextModelWithProjection | None = None,
        tokenizer_2: CLIPTokenizer | None = None,
        *,
        controlnet: ControlNetModel | Sequence[ControlNetModel] | None = None,
        force_zeros_for_empty_prompt: bool = True,
        info: ModelInfo | None = None,
        name: str = "model",
    ):
        """Make a pipeline of loaded parts, which are objects of fastdiff's classes.

        Args:
            unet: a UNet2DConditionModel.
            scheduler: a scheduler of fastdiff or of diffusers.
            vae: an AutoencoderKL or AutoencoderTiny.
            text_encoder: without text encoders, every call needs `prompt_embeds`.
            tokenizer: the tokenizer of `text_encoder`.
            text_encoder_2: the second text encoder of SDXL.
            tokenizer_2: the tokenizer of `text_encoder_2`.
            controlnet: a ControlNetModel, or a list of them. Every call then needs a control picture for each.
            force_zeros_for_empty_prompt: for SDXL. Without a negative prompt, the unconditional embeddings are zeros
                rather than those of an empty text.
            info: the prompts and the defaults of the model, as in its fastdiff.json.
            name: the model's name.

        Raises InputError if the parts do not match.
        """
        instance("unet", unet, UNet2DConditionModel, "a UNet2DConditionModel of fastdiff")
        instance("vae", vae, Autoencoder, VAE_KINDS)
        check_unet(unet, vae)
        self.controlnets = checked_nets(controlnet, unet, vae.config.scale)
        encoders = [(text_encoder, tokenizer), (text_encoder_2, tokenizer_2)]
        for (model, words), name_of_model in zip(encoders, ("text_encoder", "text_encoder_2"), strict=True):
            if (model is None) != (words is None):
                raise InputError(f"{name_of_model}: it needs its tokenizer, and the tokenizer needs it; give both")
        there = [(model, words) for model, words in encoders if model is not None and words is not None]
        if unet.config.addition_embed_type == "text_time" and len(there) == 1:
            (encoder, _), *_ = there
            is_half = isinstance(encoder, CLIPTextModel) and encoder.config.hidden_size < unet.config.text_width
            there = [] if is_half else there  # one of SDXL's encoders alone cannot encode a prompt
        self._text_parts: dict[str, Any] = dict(
            zip(TEXT_PARTS, (text_encoder, text_encoder_2, tokenizer, tokenizer_2), strict=True)
        )
        self.encoders = TextEncoders([model for model, _ in there], [words for _, words in there], unet.config)
        zeros = checked("force_zeros_for_empty_prompt", force_zeros_for_empty_prompt, bool)
        self.zeros_for_no_prompt = zeros and self.encoders.of_sdxl
        self.denoiser = unet  # `_usual_class` reads it
        super().__init__(unet, scheduler, info or ModelInfo.of_pipeline(self._usual_class()), name, vae)

    @classmethod
    def _of_card(cls, card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler) -> "TextToImagePipeline":
        unet = parts[card.denoiser.name]
        unet.config = card.config  # the card has corrected its sample_size
        own = {name: parts.get(name) for name in (*TEXT_PARTS, CONTROLNET.name)}
        zeros = card.zeros_for_no_prompt
        return cls(
            unet,
            scheduler,
            parts["vae"],
            **own,
            force_zeros_for_empty_prompt=zeros,
            info=card.info,
            name=card.name,
        )

    @property
    def models(self) -> tuple[Model, ...]:
        encoders = (self._text_parts[name] for name in ("text_encoder", "text_encoder_2"))
        return (*super().models, *(encoder for encoder in encoders if encoder is not None), *self.controlnets)

    @property
    def components(self) -> dict[str, Any]:
        of_sdxl = self.encoders.of_sdxl
        texts = {name: part for name, part in self._text_parts.items() if of_sdxl or not name.endswith("_2")}
        nets = self.controlnets if len(self.controlnets) > 1 else next(iter(self.controlnets), None)
        return texts | super().components | ({} if nets is None else {CONTROLNET.name: nets})

    def _arguments(self, parts: dict[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(parts) | {name: parts.get(name) for name in (*TEXT_PARTS, CONTROLNET.name)}
        zeros = {"force_zeros_for_empty_prompt": self.zeros_for_no_prompt}
        return {"unet": arguments.pop("denoiser")} | arguments | zeros

    def _own_options(self) -> dict[str, Any]:
        scores = {"requires_aesthetics_score": True} if self.encoders.of_refiner else {}
        return scores | ({"force_zeros_for_empty_prompt": self.zeros_for_no_prompt} if self.encoders.of_sdxl else {})

    def _usual_class(self) -> str:
        kind = "StableDiffusionXL" if self.encoders.of_sdxl else "StableDiffusion"
        name = f"{kind}InpaintPipeline" if self.denoiser.config.inpaints else f"{kind}Pipeline"
        name = "StableDiffusionXLImg2ImgPipeline" if self.encoders.of_refiner else name
        return pipeline_class(name, controlled=bool(self.controlnets))

    def stream(
        self,
        prompt: Texts = None,
        *,
        negative_prompt: Texts = None,
        image: Any = None,
        strength: float | None = None,
        mask_image: Any = None,
        masked_image_latents: Tensor | None = None,
        padding_mask_crop: int | None = None,
        mask_blur: float = 0.0,
        guidance_rescale: float = 0.0,
        guidance_start: float = 0.0,
        guidance_stop: float = 1.0,
        num_images_per_prompt: int = LIBRARY.pictures,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Draw pictures and yield a `Step` after each step. The last step has the finished `images`.

        By default each prompt is drawn with each seed: `prompt=["a cat", "a dog"], num_images_per_prompt=2` draws the
        cat with seeds 0 and 1, then the dog with seeds 0 and 1. `batch_size`, a list of generators or latents set the
        number of pictures instead, and then each picture has its own seed: with `batch_size=4` the same call draws the
        cat with seeds 0 and 1, then the dog with seeds 2 and 3. Then there may be one prompt, one for each picture, or
        one for each `num_images_per_prompt` pictures.

        Args:
            prompt: a prompt or a list of prompts. The end of a prompt that is longer than the tokenizer's length is
                cut, with a warning.
            negative_prompt: what to avoid: one text, or one for each prompt.
            image: with ControlNets and without `strength`, `mask_image` and `control_image`, the control picture. Else
                the picture to start from, as in diffusers' image-to-image pipelines: a PIL image, an array (H, W, 3) in
                [0, 1], a tensor (3, H, W) in [0, 1] or [-1, 1], latents (4, h, w) as `output_type="latent"` returns
                them, or a list or batch of one kind. `height` and `width` default to its size, rounded down to a
                multiple of `vae_scale_factor`. Images repeat: picture i starts from image i modulo their number.
            strength: 0 to 1, how much of `image` to change: `int(num_inference_steps * strength)` steps are taken.
                Default: 0.8, for SDXL 0.3; with `mask_image` 1, for SDXL 0.9999.
            mask_image: paints `image` anew where the mask is white, at least half, as diffusers' inpainting pipelines:
                a PIL image, an array or tensor (H, W) in [0, 1], or a list or batch of one kind. `height` and `width`
                then default to the model's sample_size, and `latents` may be given.
            masked_image_latents: for an inpainting model, the latents (N, 4, h, w) of `image` without its masked part.
            padding_mask_crop: draw only the part of `image` around the mask, with a margin of so many pixels, and put
                it back. It needs one PIL image and a PIL mask of the same size.
            mask_blur: the radius in pixels of a Gaussian blur of the mask, which moves its edge.
            guidance_rescale: 0 to 1; Lin et al. 2024 (arXiv 2305.08891), section 3.4.
            guidance_start: 0 to 1. With `guidance_stop`, the part of the run that is guided: of N model calls, number
                int(guidance_start * N) and those after it, up to number int(guidance_stop * N), as in diffusers'
                ClassifierFreeGuidance. The other calls compute the conditional half alone, in half the time.
            guidance_stop: `guidance_start` to 1.
            num_images_per_prompt: pictures for each prompt. Picture i has seed `seed + i`. A list of seeds replaces it.
            callback_on_step_end: called after each step, as in diffusers, with the pipeline, the index of the step, its
                timestep, and the tensors that `callback_on_step_end_tensor_inputs` names; see `callbacks.StepCallback`.
                It may be one of diffusers.callbacks.
            callback_on_step_end_tensor_inputs: any of `"latents"` and `"prompt_embeds"`, and for SDXL also
                `"add_text_embeds"` and `"add_time_ids"`. With `mask_image` also `"mask"`, and for an inpainting model
                `"masked_image_latents"`.
            cross_attention_kwargs: `{"scale": s}` multiplies the weights of all active adapters by s in this call.
            options: more arguments, with the names of diffusers: those of `Pipeline.stream` except
                `use_clipped_model_output`; `prompt_2`, `negative_prompt_2`, `prompt_embeds`, `pooled_prompt_embeds`,
                `negative_prompt_embeds`, `negative_pooled_prompt_embeds` and `clip_skip`; `prompt_syntax` (`"plain"`,
                or `"weighted"` for prompts as A1111 reads them) with `emphasis` (`"original"`, or `"no-norm"`, which
                lets weights change the mean of the embeddings; `<lora:name:0.8>` uses a loaded adapter); and for SDXL
                `original_size`, `crops_coords_top_left`, `target_size` and their `negative_` forms (see `SizeOptions`),
                `denoising_end`, with `image` also `denoising_start` (see `refining`), `aesthetic_score` and
                `negative_aesthetic_score`, which only its refiner uses. `upscale`, `upscale_strength` and
                `upscale_mode` enlarge the picture and go on (see `hires`). With ControlNets `control_image`,
                `controlnet_conditioning_scale`, `guess_mode`, `control_guidance_start` and `control_guidance_end` (see
                `ControlOptions`). `ip_adapter_image` or `ip_adapter_image_embeds` has one for each IP-Adapter.
                `guidance_scale` defaults to the model's own, else to 7.5, or 5 for SDXL without `mask_image`; a scale
                of 1 or less is unguided. A U-Net with `time_cond_proj_dim` (LCM) takes the scale as an input instead.
                `output_type` may also be `"latent"`, which returns the U-Net's result, (N, C, h, w) float32.

        Raises as `Pipeline.stream`, and NonFiniteError, which names the part, if the output of a part is NaN or
        infinite.
        """
        asked, prompts, sizes, part = self._read({"prompt": prompt, "negative_prompt": negative_prompt} | options)
        of_sdxl = self.encoders.of_sdxl
        control, image, strength = self._control(options, image, strength, mask_image)
        upscaling = options_of(UpscaleOptions, options)
        first = upscaling.first_part(asked, part, mask_image)
        of_mask = MaskOptions(mask_image, masked_image_latents, padding_mask_crop, mask_blur)
        start = self._start(ImageOptions(image, strength, part.begins(len(self.scheduler))), of_mask, asked)
        if start is None:
            sizes.check_no_scores()
        named = tensor_names_of(of_sdxl=of_sdxl, masked=isinstance(start, InpaintStart), config=self.denoiser.config)
        tensor_names = check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, named)
        rescale = checked("guidance_rescale", guidance_rescale, Fraction)
        interval = checked_interval(guidance_start, guidance_stop)
        loras = self._call_of(scale_of(cross_attention_kwargs), prompts.loras)
        subjects = Subjects("prompt", range(prompts.count), "num_images_per_prompt", num_images_per_prompt)
        counts: dict[str, int | None] = {}
        if start is not None:
            first = replace(first, height=start.size[0], width=start.size[1])
            counts["image"] = start.count(first, subjects)
        if control is not None:
            control = control.with_pictures(self.scale, first, start)
            first = replace(first, height=control.size[0], width=control.size[1])
            counts["control_image"] = control.count(first, subjects)
        drawing = self._begin(first, subjects, start, part.ended, **counts)
        self._last = self._last_run._replace(guidance_rescale=rescale, clip_skip=options.get("clip_skip"))
        self._lora_scale, self.cross_attention_kwargs = loras.scale, cross_attention_kwargs
        self.denoising_start, self.denoising_end = part.denoising_start, part.denoising_end
        scale = drawing.sampling.guidance_scale
        with naming_lost_device(), self._encoding(loras):
            time_ids = self._time_ids(sizes, start, first, drawing.shape)
            guiding = Guiding(scale, rescale, interval)
            images = self._image_prompts(options_of(ImagePromptOptions, options), len(drawing.subjects))
            given = prompts, drawing.subjects, guiding, time_ids, self.denoiser, self.device
            groups = make_groups(*given, len(drawing.schedule), images)
        check_groups(groups, callback_on_step_end, masks=isinstance(start, InpaintStart))
        conditions, after_step, begun = groups[0].of_steps[0], groups[0].after_step, None
        if callback_on_step_end is not None:
            running = RunningPipeline(self, len(drawing.schedule), scale)
            timesteps = drawing.schedule.timesteps
            after_step = StepCallback(running, callback_on_step_end, tensor_names, timesteps, conditions)
            begun = after_step.begin
        controls = None if control is None else self._control_run(control, drawing, prompts.count, asked, part)
        steps = denoise_groups(drawing, self.denoiser, groups, after_step, controls, begun)
        run = self._run(drawing, self._scaled_steps(steps, loras))
        crop = start.crop if isinstance(start, InpaintStart) else None
        if upscaling.upscale is None:
            return run if crop is None else crop.put_back(run)
        again: dict[str, Any] = {"guidance_start": guidance_start, "guidance_stop": guidance_stop}
        again |= {"prompt": prompt, "negative_prompt": negative_prompt, "num_images_per_prompt": num_images_per_prompt}
        again |= {"callback_on_step_end": callback_on_step_end, "callback_on_step_end_tensor_inputs": tensor_names}
        again |= {"guidance_rescale": rescale, "cross_attention_kwargs": cross_attention_kwargs} | options
        again |= {} if control is None else control.again(start)
        return go_on_larger(self, run, upscaling, drawing.sampling, again)

    @property
    def image_processor(self) -> ImageProcessor:
        """Converts pictures to and from tensors, as diffusers' VaeImageProcessor."""
        return ImageProcessor(self.vae_scale_factor)

    @property
    def vae_scale_factor(self) -> int:
        """The number of pixels, in height and in width, for each latent."""
        return self.scale

    def _read(self, options: Mapping[str, Any]) -> tuple[DrawingOptions, Prompts, SizeOptions, PartOptions]:
        """Return the arguments of a call, sorted by purpose. Raises InputError for one that the model does not take."""
        kinds = DrawingOptions, PromptOptions, SizeOptions, PartOptions, UpscaleOptions, ControlOptions
        known = names_of(*kinds, ImagePromptOptions) - {"use_clipped_model_output", "horizon"}
        options = accepted(options, known, REFUSED, "text-to-image pipelines")
        sizes, part = options_of(SizeOptions, options), options_of(PartOptions, options)
        if not self.encoders.of_sdxl:
            sizes.check_unused()
            part.check_unused()
        told, zeros = options_of(PromptOptions, options), self.zeros_for_no_prompt
        prompts = Prompts(told, self.encoders, self.denoiser.config, zeros_for_none=zeros)
        return options_of(DrawingOptions, options), prompts, sizes, part

    def _start(self, options: ImageOptions, of_mask: MaskOptions, asked: DrawingOptions) -> ImageStart | None:
        """Return what a run with pictures starts from; None for a run without."""
        config, vae = self.denoiser.config, self._vae
        assert vae is not None
        encoding = Encoding(vae, self.encoders.of_sdxl, self._working)
        if of_mask.mask_image is not None:
            given = options, of_mask, asked, vae, encoding, config, self.dtype
            return read_inpainting(*given, own_size=bool(self.controlnets))
        if config.inpaints:
            raise InputError("mask_image: this model is for inpainting; give image and mask_image")
        if options.image is not None:
            return read_image_to_image(options, asked, vae, encoding)
        if self.encoders.of_refiner:
            raise InputError("image: SDXL's refiner refines a picture; give image, or the latents of the base model")
        return None

    def _time_ids(
        self, sizes: SizeOptions, start: ImageStart | None, options: DrawingOptions, shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor] | None:
        """Return SDXL's size conditioning of both halves, or None for another model.

        As in diffusers, latents without a height or width give the model's default size, not their own.
        """
        if not self.encoders.of_sdxl:
            return None
        make = sizes.time_ids if start is None else sizes.time_ids_of_picture
        make = sizes.time_ids_of_refiner if self.encoders.of_refiner else make
        sides = self.denoiser.config.trained_size or shape[1:]
        return make(options.height or self.scale * sides[0], options.width or self.scale * sides[1])

    def _for_vae(self, x: Tensor) -> Tensor:
        assert self.vae is not None
        return with_mean_and_std(self.vae, x) if self.encoders.of_sdxl else x
