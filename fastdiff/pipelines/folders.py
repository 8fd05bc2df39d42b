"""FromFolder: loads a pipeline from a model folder, with the options of diffusers' `from_pretrained`."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from fastdiff.arguments import optional, renamed
from fastdiff.arguments import path as checked_path
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load, chosen_device, chosen_dtype
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.registry import IMAGE_ENCODER, check_draws
from fastdiff.checkpoints.single_files.cards import FileOptions, file_card
from fastdiff.errors import InputError
from fastdiff.execution.devices import dtype_name, naming_lost_device
from fastdiff.execution.memory import or_explain, remedies
from fastdiff.kinds import Precision, PredictionType
from fastdiff.pipelines.giving import NOTHING, REFUSED_FOR_FILES, Given, load_parts, read_scheduler
from fastdiff.pipelines.saving import Saving
from fastdiff.pipelines.surface import Surface
from fastdiff.requests.defaults import PRECISION, ModelFacts
from fastdiff.samplers.shared.from_config import folder_scheduler
from fastdiff.samplers.shared.scheduler import Scheduler
from fastdiff.schema import checked

AnyPipeline = TypeVar("AnyPipeline", bound="FromFolder")

_log = logging.getLogger(__name__)


def scheduler_of(card: ModelCard, name: str | None) -> Scheduler:
    """Return the scheduler `name`, made from a model folder's scheduler config. None: the model's default scheduler.

    Raises InputError if the scheduler config cannot be used.
    """
    name = name or ModelFacts.of(card).default_scheduler
    return folder_scheduler(card.read_scheduler(), name, card.scheduler, card.pipeline.scheduler_options)


class FromFolder(Saving, Surface, ABC):
    """A pipeline that is loaded from a model folder. Its class depends on the folder."""

    kinds: ClassVar[dict[str, type["FromFolder"]]] = {}  # name -> class; filled when the class's module is imported

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        FromFolder.kinds[cls.__name__] = cls

    @classmethod
    def from_pretrained(
        cls: type[AnyPipeline],
        pretrained_model_name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = "auto",
        dtype: str | torch.dtype | Mapping[str, Any] | None = "auto",
        torch_dtype: str | torch.dtype | Mapping[str, Any] | None = None,
        device_map: str | torch.device | None = None,
        scheduler: Any = None,
        variant: str | None = None,
        use_safetensors: bool | None = None,
        offload: bool = False,
        precision: Precision = PRECISION,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        **options: Any,
    ) -> AnyPipeline:
        """Load a pipeline. The class of the returned pipeline depends on the folder.

        Args:
            pretrained_model_name_or_path: the name of a bundled model, a pipeline folder that diffusers saved, or a
                Hugging Face Hub id.
            device: `"auto"` uses a GPU if there is one, else the CPU.
            dtype: `"auto"` is float32 on the CPU and bfloat16 on a GPU. As in diffusers, a mapping of part names to
                dtypes is for each part; its key `"default"` is for the others, which otherwise are float32.
            torch_dtype: an older name of `dtype`.
            device_map: another name of `device`: a device for all parts. `"balanced"` and `"auto"` mean `"auto"`.
            scheduler: a name such as `"ddim"`, `"ddpm"`, `"euler"` or `"euler-a"`, or a scheduler of fastdiff or of
                diffusers. With a name, the scheduler is made from the folder's scheduler config. The error for an
                unknown name lists all names. Default: the scheduler that the folder names.
            variant: the variant of the weight files, such as `"fp16"`.
            use_safetensors: True reads safetensors alone, False .bin alone. By default safetensors are preferred.
            offload: keep each part in host memory, and move it to the GPU only while it runs. The pictures are the
                same; a run needs less GPU memory and more time.
            precision: `"int8"` stores the weights of the denoiser and of the text encoders in 8 bits. They need half
                the memory of 16-bit weights and cause an error, which `fastdiff verify MODEL --precision int8`
                measures. `"fp8"` also multiplies in 8 bits, and needs a GPU of sm_89 or later.
            revision: a branch, a tag or a commit of the hub.
            token: of the hub.
            local_files_only: use only files in the hub's cache.
            cache_dir: a folder to use instead of the hub's cache.
            force_download: download files again that are in the cache.
            options: parts that replace the folder's: `unet`, `transformer`, `vae`, `value_function`, `text_encoder`,
                `text_encoder_2`, `tokenizer`, `tokenizer_2`, and the `image_encoder` of IP-Adapters. A part is an
                object of fastdiff, or a live one of diffusers or transformers, which is copied. It keeps its dtype and
                moves to the device. The folder's part is then neither downloaded nor read. `text_encoder=None` loads a
                pipeline without it; calls then need `prompt_embeds`. SDXL takes `force_zeros_for_empty_prompt`. Other
                options of diffusers that change nothing here are accepted, such as `low_cpu_mem_usage` and
                `safety_checker=None`.

        Raises:
            InputError: the model cannot be loaded, the folder needs another class than this one, or an option cannot
                be honoured.
            NonFiniteError: the weights contain NaN.
            OutOfMemoryError: the weights do not fit. It is a MemoryError and a torch.OutOfMemoryError.
            DeviceLostError: the GPU fails.
        """
        name = renamed("pretrained_model_name_or_path", pretrained_model_name_or_path, "name_or_path", options)
        scheduler_name, part = read_scheduler(scheduler)  # all arguments are checked before anything is downloaded
        load = Load.of(
            device=chosen_device(device, device_map),
            dtype=chosen_dtype(dtype, torch_dtype),
            variant=variant,
            precision=precision,
            offload=offload,
            scheduler=scheduler_name,
            use_safetensors=use_safetensors,
        )
        given = Given.read(options | part)
        folder = hub.resolve(
            name,
            revision=revision,
            token=token,
            variant=variant,
            local_files_only=local_files_only,
            cache_dir=cache_dir,
            force_download=force_download,
            use_safetensors=use_safetensors,
            without=given.parts,
        )
        check_draws(folder)
        if not (folder / "model_index.json").is_file():
            raise InputError(f"{folder} has no model_index.json; a pipeline folder also holds the model's scheduler")
        return cls._of_read_card(given.read_card(str(name), folder), load, given)

    @classmethod
    def from_single_file(
        cls: type[AnyPipeline],
        pretrained_model_link_or_path: str | Path,
        *,
        config: str | Path | None = None,
        vae: Any = None,
        prediction_type: PredictionType | None = None,
        extract_ema: bool = False,
        device: str | torch.device | None = "auto",
        dtype: str | torch.dtype | Mapping[str, Any] | None = "auto",
        torch_dtype: str | torch.dtype | Mapping[str, Any] | None = None,
        scheduler: Any = None,
        offload: bool = False,
        precision: Precision = PRECISION,
        **options: Any,
    ) -> AnyPipeline:
        """Load a pipeline from one safetensors file: Stable Diffusion 1, 2 or XL with the names of LDM.

        The keys and shapes of the file tell which model it is. Nothing is downloaded.

        Args:
            pretrained_model_link_or_path: the file, with the U-Net, the text encoders and the VAE. Parts that it lacks
                can be given as `options`.
            config: a folder in diffusers' layout whose configs replace fastdiff's, for models of other sizes.
            vae: a file with another VAE, or a VAE as in `from_pretrained`.
            prediction_type: "epsilon" or "v_prediction", if the file does not say it or is wrong.
            extract_ema: take the moving averages of the U-Net's weights, if the file has both.
            device: as in `from_pretrained`, and so are `dtype`, `torch_dtype`, `scheduler`, `offload`, `precision`.
            dtype: see `device`.
            torch_dtype: see `device`.
            scheduler: see `device`.
            offload: see `device`.
            precision: see `device`.
            options: parts that replace the file's, as in `from_pretrained`.

        Raises:
            InputError: the file is not a model that fastdiff runs, a part is missing, or an option is wrong.
                `from_pretrained` documents the other errors.
        """
        path = Path(checked_path("pretrained_model_link_or_path", pretrained_model_link_or_path))
        scheduler_name, part = read_scheduler(scheduler)
        load = Load.of(
            device=chosen_device(device, None),
            dtype=chosen_dtype(dtype, torch_dtype),
            precision=precision,
            offload=offload,
            scheduler=scheduler_name,
        )
        is_file = isinstance(vae, str | Path)
        given = Given.read(options | part | ({} if is_file or vae is None else {"vae": vae}), REFUSED_FOR_FILES)
        ema = checked("extract_ema", extract_ema, bool)
        optional(checked_path, "config", config)
        how = FileOptions(config, vae if is_file else None, prediction_type, ema)
        return cls._of_read_card(given.checked(file_card(path, how, given.configs)), load, given)

    @classmethod
    def _of_read_card(cls: type[AnyPipeline], card: ModelCard, load: Load, given: Given) -> AnyPipeline:
        """Load the pipeline of a card, and log the card's notices."""
        pipe = cls.from_card(card, load, given)
        for line in card.notices:
            _log.warning(line)
        return pipe

    @classmethod
    def from_card(cls: type[AnyPipeline], card: ModelCard, load: Load, given: Given = NOTHING) -> AnyPipeline:
        """Load the pipeline of a `ModelCard`: a folder whose configs are already read. Raises as `from_pretrained`.

        given: the parts that replace the folder's.
        """
        kind = FromFolder.kinds[card.drawn_by]
        if not issubclass(kind, cls):
            raise InputError(f"{card.name}: it needs a {kind.__name__}; load it with Pipeline.from_pretrained")
        with naming_lost_device():
            parts = or_explain(
                partial(load_parts, card, load, given),
                f"{load.home}: out of memory for the weights of {card.name} in {dtype_name(load.dtype)}; "
                + remedies("end what else runs there", load.dtype),
            )
        scheduler = given.scheduler(card.pipeline.scheduler_options) or scheduler_of(card, load.scheduler)
        pipe = kind._of_card(card, parts, scheduler)
        if parts.get(IMAGE_ENCODER.name) is not None:
            setattr(pipe, IMAGE_ENCODER.name, parts[IMAGE_ENCODER.name])
        pipe._card = card
        return pipe.offloaded_from(load.device) if load.offload else pipe

    @classmethod
    def from_pipe(cls: type[AnyPipeline], pipeline: Any, **parts: Any) -> AnyPipeline:
        """Return a pipeline that shares the parts of another pipeline of fastdiff, except `parts`; see `with_parts`.

        Raises InputError for a pipeline of another class than this one.
        """
        if not isinstance(pipeline, cls):
            raise InputError(
                f"pipeline: {type(pipeline).__name__} is no {cls.__name__} of fastdiff; save it with save_pretrained, "
                "and load the folder with from_pretrained"
            )
        return pipeline.with_parts(**parts)

    @classmethod
    @abstractmethod
    def _of_card(
        cls: type[AnyPipeline], card: ModelCard, parts: Mapping[str, Any], scheduler: Scheduler
    ) -> AnyPipeline:
        """Return the pipeline of a folder. `parts`: part name (unet, vae, tokenizer ...) -> model or tokenizer."""
