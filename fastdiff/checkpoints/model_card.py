"""ModelCard: the contents of a model folder's JSON files as one value. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastdiff.arguments import naming
from fastdiff.checkpoints import hub, registry
from fastdiff.checkpoints.configs.autoencoder import AutoencoderConfig
from fastdiff.checkpoints.configs.clip import CLIPTextConfig
from fastdiff.checkpoints.configs.denoiser import DenoiserConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.weight_files import InFile
from fastdiff.errors import InputError
from fastdiff.kinds import TrainSteps
from fastdiff.sampler_names import scheduler_name
from fastdiff.schema import checked

SAMPLE_SIZE = 64  # of Stable Diffusion 1, whose oldest files have a smaller value


@dataclass(frozen=True)
class ModelCard:
    """The JSON files of a model folder, read and checked. No weights are loaded."""

    name: str
    folder: Path
    classes: Mapping[str, str]  # of the `pipeline` and of its parts, see read_model_index
    config: DenoiserConfig
    scheduler: str | None  # one of sampler_names.SCHEDULERS; None for any other
    num_train_timesteps: int
    info: ModelInfo
    scale: int = 1  # pixels of a picture per pixel of the denoiser's, along each side
    unused: tuple[str, ...] = ()  # parts of the folder that fastdiff does not run
    text_layers: tuple[int, ...] = ()  # the number of layers of each text encoder
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of model_index.json that are not parts
    zeros_for_no_prompt: bool = False  # SDXL: without a negative prompt, its embeddings are zeros
    # Of models that are single files. The folder then holds configs alone.
    weights: Mapping[str, InFile] = field(
        default_factory=dict
    )  # part name -> its weights, if they are not in the folder
    scheduler_changes: Mapping[str, Any] = field(default_factory=dict)  # options that replace the folder's
    guess: str | None = None  # a line about what the file does not say, or what an option overrides

    @classmethod
    def read(cls, name: str, folder: Path, given: Mapping[str, Any] = MappingProxyType({})) -> "ModelCard":
        """Read a folder. Raises InputError if configs are missing or fastdiff does not run the pipeline.

        given: the configs of parts that replace the folder's, by name. The folder's are not read. None leaves a part
        out. The scheduler's config is a mapping with its `_class_name`.
        """
        classes = registry.read_model_index(folder, given)
        pipeline = registry.PIPELINES[classes["pipeline"]]
        index = read_json(folder / "model_index.json")
        if pipeline.denoiser.name in given:
            config = given[pipeline.denoiser.name]
            classes[pipeline.denoiser.name] = _part_of(config, pipeline).class_name
        else:
            config_path = hub.component_folder(folder, pipeline.denoiser.name) / "config.json"
            saved = read_json(config_path)
            config = _of_its_time(_denoiser(classes).config.from_mapping(saved, config_path), pipeline, saved)
        source, scheduler = _scheduler(folder, given)
        configs = {part: each for part in pipeline.companions if (each := _config(folder, classes, given, part))}
        vae = next((each for each in configs.values() if isinstance(each, AutoencoderConfig)), None)
        return cls(
            name=name,
            folder=folder,
            classes=classes,
            config=config,
            scheduler=_scheduler_name(pipeline, classes, scheduler),
            num_train_timesteps=_num_train_timesteps(source, scheduler),
            info=ModelInfo.from_folder(folder, config.num_class_embeds, config.null_label),
            scale=1 if vae is None else vae.scale,
            unused=registry.unused_parts(index),
            text_layers=tuple(each.num_hidden_layers for each in configs.values() if isinstance(each, CLIPTextConfig)),
            options={name: index[name] for name in pipeline.options if name in index},
            zeros_for_no_prompt=_zeros_for_no_prompt(folder, pipeline, index),
        )

    @property
    def pipeline(self) -> registry.PipelineClass:
        """The diffusers pipeline class that saved the folder."""
        return registry.PIPELINES[self.classes["pipeline"]]

    @property
    def reads_text(self) -> bool:
        """Whether the model draws from prompts."""
        return self.pipeline.reads_text

    @property
    def reads_captions(self) -> bool:
        """Whether the model is Z-Image, which reads prompts as plain text alone."""
        return self.drawn_by == registry.CAPTIONS

    @property
    def tokenizers(self) -> tuple[registry.TokenizerPart, ...]:
        """The folder's tokenizers."""
        parts = self.pipeline.companions
        return tuple(part for part in parts if isinstance(part, registry.TokenizerPart) and part.name in self.classes)

    @property
    def most_clip_skip(self) -> int:
        """The largest clip_skip: layers of the text encoders that may be skipped. SDXL always skips one more."""
        return min(self.text_layers, default=0) - (registry.TEXT_ENCODER_2 in self.pipeline.companions)

    @property
    def notice(self) -> str | None:
        """A line that names the parts of the folder that fastdiff does not run, or None if it runs all."""
        return f"{self.name}: its {' and '.join(self.unused)} will not be run" if self.unused else None

    @property
    def denoiser(self) -> registry.DenoiserPart:
        """The part that the pipeline calls at each step."""
        return _denoiser(self.classes)

    @property
    def notices(self) -> list[str]:
        """Lines about the model for a user who draws with it."""
        return [line for line in (self.notice, self.guess) if line]

    @property
    def file(self) -> Path | None:
        """The single file with the denoiser's weights, or None for a model folder."""
        inside = self.weights.get(self.denoiser.name)
        return None if inside is None else inside.path

    @property
    def source(self) -> Path:
        """The single file, or the model folder."""
        return self.file or self.folder

    def read_scheduler(self) -> dict[str, Any]:
        """Return the config of the scheduler. Raises InputError if it cannot be read."""
        path = hub.component_folder(self.folder, registry.SCHEDULER.name) / "scheduler_config.json"
        return read_json(path) | dict(self.scheduler_changes)

    @property
    def drawn_by(self) -> str:
        """The name of the fastdiff pipeline class that draws with this model."""
        return self.pipeline.denoisers[self.denoiser]

    @property
    def revision(self) -> str | None:
        """The commit, if the folder is in the hub's cache, or else None."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    @property
    def labels(self) -> list[int]:
        """The labels without the null label: those that the model names, or else the whole label table."""
        count = len(self.info.labels) or self.config.num_class_embeds or 0
        return [label for label in range(count) if label != self.info.null_label]

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height) of a picture in pixels. None if the config does not say, and for trajectories."""
        size = None if self.config.of_trajectories else self.config.trained_size
        return size and (size[1] * self.scale, size[0] * self.scale)

    @property
    def horizon(self) -> int | None:
        """The length of a trajectory. None if the config does not say, and for pictures."""
        size = self.config.trained_size if self.config.of_trajectories else None
        return size and size[1]

    @property
    def size_factor(self) -> int:
        """Width and height in pixels must be multiples of this number."""
        return self.config.size_factor * self.scale

    def label_name(self, index: int | None) -> str | int | None:
        """Return the name of label `index`, or the index if it has no name."""
        return index if index is None else self.info.label_name(index)

    def choices_name(self, choices: tuple[int, ...]) -> str | int:
        """Return the name of the label or group that consists of these indices."""
        if len(choices) == 1:
            return self.info.label_name(choices[0])
        names = [self.info.labels[index] for index in choices]
        return next(group for group, members in self.info.label_groups.items() if list(members) == names)


def _denoiser(classes: Mapping[str, str]) -> registry.DenoiserPart:
    pipeline = registry.PIPELINES[classes["pipeline"]]
    class_name = classes[pipeline.denoiser.name]
    return next(part for part in pipeline.denoisers if class_name in part.classes)


def _of_its_time(config: DenoiserConfig, pipeline: registry.PipelineClass, saved: Mapping[str, Any]) -> DenoiserConfig:
    """Correct the sample_size that diffusers wrote before 0.9, as StableDiffusionPipeline does."""
    version = re.match(r"0\.[0-8]\b", str(saved.get("_diffusers_version")))
    is_old = pipeline.name in ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline") and version is not None
    if not is_old or not isinstance(config, UNet2DConditionConfig) or not isinstance(config.sample_size, int):
        return config
    return replace(config, sample_size=max(SAMPLE_SIZE, config.sample_size))


def _part_of(config: Any, pipeline: registry.PipelineClass) -> registry.DenoiserPart:
    """Return the part of a denoiser that the caller gives. Raises InputError if the pipeline does not run it."""
    for part in pipeline.denoisers:
        if type(config) is part.config:
            return part
    names = " or ".join(part.class_name for part in pipeline.denoisers)
    raise InputError(f"{pipeline.denoiser.name}: a {pipeline.name} needs it; give a {names}")


def _config(folder: Path, classes: Mapping[str, str], given: Mapping[str, Any], part: registry.Part) -> Any:
    """Return the config of a model beside the denoiser: the given one or the folder's. None: there is no such model."""
    if not isinstance(part, registry.ModelPart) or part.name in given or part.name not in classes:
        return given.get(part.name)
    path = folder / part.name / "config.json"
    return part.of_class(classes[part.name]).config.from_mapping(read_json(path), path)


def _zeros_for_no_prompt(folder: Path, pipeline: registry.PipelineClass, index: Mapping[str, Any]) -> bool:
    option = "force_zeros_for_empty_prompt"
    if option not in pipeline.options:
        return False
    with naming(str(folder / "model_index.json")):
        return checked(option, index.get(option, True), bool)


def _scheduler(folder: Path, given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the scheduler's config, the given one or the folder's, and a name for it in errors."""
    name = registry.SCHEDULER.name
    if name in given:
        return name, given[name]
    path = hub.component_folder(folder, name) / "scheduler_config.json"
    return str(path), read_json(path)


def _scheduler_name(
    pipeline: registry.PipelineClass, classes: Mapping[str, str], config: Mapping[str, Any]
) -> str | None:
    if registry.SCHEDULER.name in classes:
        return pipeline.scheduler or scheduler_name(classes[registry.SCHEDULER.name], config)
    return scheduler_name(config["_class_name"], config)


def _num_train_timesteps(source: str, config: Mapping[str, Any]) -> int:
    with naming(source):
        return checked("num_train_timesteps", config.get("num_train_timesteps", 1000), TrainSteps)
