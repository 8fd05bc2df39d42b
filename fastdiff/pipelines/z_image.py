"""ZImagePipeline: draws pictures from captions with Z-Image and Z-Image-Turbo.

Captions -> chat template -> Qwen3 -> states; seeds -> noise; the flow from noise to latents -> VAE -> pictures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastdiff.arguments import instance
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import CAPTIONS, QWEN3, TOKENIZER, VAE, Z_IMAGE
from fastdiff.diffusion.conditions import Guidance
from fastdiff.diffusion.pictures import Subjects
from fastdiff.diffusion.results import Step
from fastdiff.errors import InputError
from fastdiff.execution.devices import naming_lost_device
from fastdiff.kinds import NotNegative
from fastdiff.models.coding import Autoencoder
from fastdiff.models.model import Model
from fastdiff.models.qwen3 import Qwen3Model
from fastdiff.models.z_image import TRAIN_STEPS, ZImageTransformer2DModel
from fastdiff.pipelines.adapting import Adapting, scale_of
from fastdiff.pipelines.caption_callbacks import CallbackOptions, CaptionCallback, RunningZImage
from fastdiff.pipelines.captions import CaptionEncoder, CaptionOptions, Captions, Texts, caption_groups
from fastdiff.pipelines.drawing import DrawingOptions, accepted, names_of, options_of
from fastdiff.pipelines.image_to_image import Encoding, ImageOptions, ImageStart, read_image_to_image
from fastdiff.pipelines.inpainting import InpaintStart, MaskOptions, read_inpainting
from fastdiff.pipelines.parts import VAE_KINDS
from fastdiff.pipelines.prompted import denoise_groups
from fastdiff.requests.defaults import LIBRARY, Sampling
from fastdiff.samplers.shared.schedule import Begin, Schedule
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked
from fastdiff.text.chat_tokenizer import ChatTokenizer

SHIFTS = (256, 4096, 0.5, 1.15)  # diffusers' values for schedulers whose config does not say them

REFUSED = {  # arguments of other pipelines and of diffusers, and why they are refused
    "class_labels": "this model draws from prompts; leave them out",
    "masked_image_latents": "Z-Image reads no masked picture; leave it out",
    "prompt_2": "this model has one text encoder; leave it out",
    "negative_prompt_2": "this model has one text encoder; leave it out",
    "clip_skip": "Z-Image always reads the last layer but one of its text encoder; leave it out",
    "eta": "a flow has no eta; leave it out",
    "timesteps": "give sigmas, which determine the timesteps",
}


class ZImagePipeline(Adapting):
    """Pictures from captions, as diffusers' ZImagePipeline draws them.

    A caption and a seed give the same bits whatever the batch size, and wherever in the batch they are. A `generator`
    gives the noise that diffusers draws with it. Z-Image-Turbo wants `num_inference_steps=8` or 9, and
    `guidance_scale=0`. The defaults are diffusers': 50 steps and guidance 5. ::

        pipe = fastdiff.Pipeline.from_pretrained("path/to/Z-Image-Turbo")
        pipe("a red fox in the snow", num_inference_steps=9, guidance_scale=0, seed=7).images[0].save("fox.png")
    """

    reads_text: ClassVar[bool] = True
    returns_latents: ClassVar[bool] = True
    latents_of_flux: ClassVar[bool] = True
    refused = REFUSED
    optional_parts: ClassVar[tuple[str, ...]] = (QWEN3.name, TOKENIZER.name)
    lora_parts: ClassVar[tuple[str, ...]] = (Z_IMAGE.name,)
    denoiser: ZImageTransformer2DModel

    def __init__(
        self,
        transformer: ZImageTransformer2DModel,
        scheduler: Any,
        vae: Autoencoder,
        text_encoder: Qwen3Model | None = None,
        tokenizer: ChatTokenizer | None = None,
        *,
        info: ModelInfo | None = None,
        name: str = "model",
    ):
        """Make a pipeline of loaded parts, which are objects of fastdiff's classes.

        Args:
            transformer: a ZImageTransformer2DModel.
            scheduler: a scheduler of fastdiff or of diffusers that follows a flow.
            vae: an AutoencoderKL or AutoencoderTiny.
            text_encoder: without it, every call needs `prompt_embeds`.
            tokenizer: the tokenizer of `text_encoder`.
            info: the prompts and the defaults of the model, as in its fastdiff.json.
            name: the model's name.

        Raises InputError if the parts do not match.
        """
        instance("transformer", transformer, ZImageTransformer2DModel, "a ZImageTransformer2DModel of fastdiff")
        instance("vae", vae, Autoencoder, VAE_KINDS)
        if (text_encoder is None) != (tokenizer is None):
            raise InputError("text_encoder: it needs its tokenizer, and the tokenizer needs it; give both")
        self._text_encoder, self._tokenizer, self.encoders = text_encoder, tokenizer, None
        if text_encoder is not None and tokenizer is not None:
            self.encoders = CaptionEncoder(text_encoder, tokenizer, transformer)
        super().__init__(transformer, scheduler, info or ModelInfo.of_pipeline(CAPTIONS), name, vae)
        self._check_scheduler()

    @classmethod
    def _of_card(cls, card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler) -> "ZImagePipeline":
        encoder, tokenizer = parts.get(QWEN3.name), parts.get(TOKENIZER.name)
        return cls(
            parts[card.denoiser.name], scheduler, parts[VAE.name], encoder, tokenizer, info=card.info, name=card.name
        )

    @property
    def models(self) -> tuple[Model, ...]:
        return (*super().models, *(() if self._text_encoder is None else (self._text_encoder,)))

    @property
    def components(self) -> dict[str, Any]:
        texts = {QWEN3.name: self._text_encoder, TOKENIZER.name: self._tokenizer}
        return texts | super().components

    def _arguments(self, parts: dict[str, Any]) -> dict[str, Any]:
        arguments = super()._arguments(parts) | {name: parts.get(name) for name in self.optional_parts}
        return {"transformer": arguments.pop("denoiser")} | arguments

    def stream(
        self,
        prompt: Texts = None,
        *,
        guidance_scale: float | None = None,
        cfg_normalization: float | bool = False,
        cfg_truncation: float | None = 1.0,
        image: Any = None,
        strength: float | None = None,
        num_images_per_prompt: int = LIBRARY.pictures,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Draw pictures and yield a `Step` after each step. The last step has the finished `images`.

        Each prompt is drawn with each seed, as in `TextToImagePipeline.stream`.

        Args:
            prompt: a prompt or a list of prompts. The end of a prompt that is longer than `max_sequence_length` tokens
                is cut, with a warning.
            guidance_scale: s of p + s (p - n), where p is the prediction for the prompt and n for the negative prompt.
                0 is unguided. Default: the model's own, else 5.
            cfg_normalization: bounds the norm of a guided prediction by so many times the norm of p. False and 0 do
                not.
            cfg_truncation: 0 to 1, the time, from 0 for noise to 1 for the picture, after which steps are unguided.
            image: the picture to start from, as diffusers' ZImageImg2ImgPipeline: of the kinds that
                `TextToImagePipeline.stream` takes. `height` and `width` default to its size, rounded down to a multiple
                of 16.
            strength: 0 to 1, how much of `image` to change: the run begins at step int(N - N * strength) of N. Default:
                0.6, with `mask_image` 1.
            num_images_per_prompt: pictures for each prompt. Picture i has seed `seed + i`. A list of seeds replaces it.
            joint_attention_kwargs: `{"scale": s}` multiplies the weights of all active adapters by s in this call.
            options: `mask_image`, which paints `image` anew where the mask is white, as diffusers'
                ZImageInpaintPipeline, with `mask_blur` and `padding_mask_crop` (see `TextToImagePipeline.stream`; with
                a mask, `height` and `width` default to the picture's size too, and `latents` may be given);
                `negative_prompt`, `prompt_embeds` and `negative_prompt_embeds` (lists of (L, cap_feat_dim), one
                for each prompt), `max_sequence_length`, `callback_on_step_end`, called after each step as in diffusers,
                with `callback_on_step_end_tensor_inputs` (any of `"latents"`, `"prompt_embeds"` and
                `"negative_prompt_embeds"`; see `caption_callbacks.CaptionCallback`), and the arguments of
                `Pipeline.stream` except `eta`, `use_clipped_model_output` and `timesteps`. `height` and `width` default
                to 1024. `output_type="latent"` returns latents (N, C, h, w).

        Raises as `Pipeline.stream`.
        """
        unused = {"horizon", "use_clipped_model_output", "eta", "timesteps", "masked_image_latents"}
        known = names_of(DrawingOptions, CaptionOptions, CallbackOptions, MaskOptions) - unused
        given = accepted({**options, "prompt": prompt, "guidance_scale": guidance_scale}, known, REFUSED, "Z-Image")
        calling = options_of(CallbackOptions, given)
        calling.names()  # checks them
        most = _checked_norm(cfg_normalization)
        truncation = checked("cfg_truncation", cfg_truncation, NotNegative | None)
        loras = self._call_of(scale_of(joint_attention_kwargs, "joint_attention_kwargs"), ())
        captions = Captions(options_of(CaptionOptions, given), self.encoders, self.denoiser)
        subjects = Subjects("prompt", range(captions.count), "num_images_per_prompt", num_images_per_prompt)
        asked = options_of(DrawingOptions, given)
        start = self._start(ImageOptions(image, strength), options_of(MaskOptions, given), asked)
        if start is not None:
            height, width = start.size
            asked = replace(asked, height=height, width=width)
        count = None if start is None else start.count(asked, subjects)
        drawing = self._begin(asked, subjects, start, image=count)
        scale, steps = drawing.sampling.guidance_scale, len(drawing.schedule)
        guided = _guided_steps(drawing.schedule, truncation) if scale > 0 else 0
        with naming_lost_device(), self._working(self._text_encoder):
            states, away = captions.encode(guided=guided > 0)
        # p + s (p - n) = n + (1 + s) (p - n); half a step more makes `Guidance.guides` round to this number of steps
        share = min(1.0, (guided + 0.5) / steps)
        guidance = Guidance(1 + scale, torch.empty(0), interval=(0.0, share), most_norm=most) if guided else None
        _, height, width = drawing.shape
        groups = caption_groups(drawing.subjects, states, away, guidance, (height, width), self.device)
        after = None
        if calling.callback_on_step_end is not None:
            halves = [[half[i] for i in drawing.subjects] if half else [] for half in (states, away)]
            running = RunningZImage(self, steps, scale)
            after = CaptionCallback(
                running, calling, drawing.schedule.timesteps, halves, groups, guidance, (height, width)
            )
        taken = denoise_groups(drawing, self.denoiser, groups, None, after_groups=after)
        run = self._run(drawing, self._scaled_steps(taken, loras))
        crop = start.crop if isinstance(start, InpaintStart) else None
        return run if crop is None else crop.put_back(run)

    def _start(self, options: ImageOptions, of_mask: MaskOptions, asked: DrawingOptions) -> ImageStart | None:
        """Return what a run with a picture starts from; None for a run without."""
        assert self._vae is not None
        encoding = Encoding(self._vae, of_sdxl=False, working=self._working, of_captions=True)
        config = self.denoiser.config
        if of_mask.mask_image is not None:
            given = options, of_mask, asked, self._vae, encoding, config, self.dtype
            return read_inpainting(*given, own_size=True, factor=config.size_factor)
        if options.image is None:
            return None
        return read_image_to_image(options, asked, self._vae, encoding, config.size_factor)

    @property
    def _noise_dtype(self) -> torch.dtype:
        return torch.float32

    def _check_scheduler(self) -> None:
        if not self.scheduler.follows_flow:
            raise InputError(
                f"scheduler {self.scheduler_name}: Z-Image predicts the velocity of a flow; use flow-euler"
            )

    def _shift(self, shape: tuple[int, int, int] | None) -> float | None:
        """Return `mu`, linear in the number of picture tokens, as diffusers' `calculate_shift`."""
        if shape is None or not self.scheduler.takes("mu"):
            return None
        config, patch = self.scheduler.config, self.denoiser.config.size_factor
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        first, last, low, high = (config.get(name, usual) for name, usual in zip(names, SHIFTS, strict=True))
        slope = (high - low) / (last - first)
        return (shape[1] // patch) * (shape[2] // patch) * slope + low - slope * first

    def _schedule(
        self,
        sampling: Sampling,
        timesteps: Any = None,
        sigmas: Any = None,
        begin: Begin | None = None,
        shape: tuple[int, int, int] | None = None,
    ) -> Schedule:
        if sigmas is None:
            steps = sampling.num_inference_steps
            sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        return super()._schedule(sampling, None, sigmas, begin, shape)

    def _for_vae(self, x: Tensor) -> Tensor:
        assert self._vae is not None
        shift = self._vae.config.shift_factor or 0.0
        return x + shift * self._vae.config.scaling_factor


def _checked_norm(value: Any) -> float:
    """Return how many times the norm of the conditional prediction a guided one may have; 0: any number."""
    return float(value) if isinstance(value, bool) else checked("cfg_normalization", value, NotNegative)


def _guided_steps(schedule: Schedule, truncation: float | None) -> int:
    """Return the number of guided steps: those before the time `truncation`. They are the first ones."""
    if truncation is None or truncation > 1:
        return len(schedule)
    times = (TRAIN_STEPS - schedule.timesteps.float()) / TRAIN_STEPS
    return int((times <= truncation).sum())
