"""ModelCard: all that the JSON files of a model folder say, in one value. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.configs import CONFIGS, DenoiserConfig, autoencoder_scale, from_mapping, read_json
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.errors import InputError
from fastdiff.numbers import is_int


@dataclass(frozen=True)
class ModelCard:
    """What a model folder's JSON files say, read without torch."""

    name: str
    folder: Path
    config: DenoiserConfig
    scheduler: str | None  # ddim, ddpm; None where the folder does not say
    num_train_timesteps: int
    info: ModelInfo
    scale: int = 1  # pixels of a picture for one of the denoiser's, in height and in width

    @classmethod
    def read(cls, name: str, folder: Path) -> "ModelCard":
        """Raises InputError for a folder without configs, or of a pipeline that fastdiff does not run."""
        classes = hub.read_model_index(folder)
        component = hub.PIPELINES[classes["pipeline"]]
        config_path = hub.component_folder(folder, component) / "config.json"
        config = from_mapping(CONFIGS[component], read_json(config_path), source=str(config_path))
        vae_path = folder / "vae" / "config.json"
        scheduler_path = hub.component_folder(folder, "scheduler") / "scheduler_config.json"
        scheduler = read_json(scheduler_path)
        # diffusers' DDIMPipeline makes a DDIMScheduler of whatever scheduler its folder holds
        class_name = "DDIMScheduler" if classes["pipeline"] == "DDIMPipeline" else classes["scheduler"]
        num_train_timesteps = scheduler.get("num_train_timesteps", 1000)
        if not is_int(num_train_timesteps, 1):
            raise InputError(f"{scheduler_path}: num_train_timesteps {num_train_timesteps!r} is not a number of steps")
        return cls(
            name=name,
            folder=folder,
            config=config,
            scheduler={"DDIMScheduler": "ddim", "DDPMScheduler": "ddpm"}.get(class_name),
            num_train_timesteps=num_train_timesteps,
            info=ModelInfo.from_folder(folder, config.num_class_embeds, config.null_label),
            scale=autoencoder_scale(read_json(vae_path), vae_path) if "vae" in classes else 1,
        )

    @property
    def revision(self) -> str | None:
        """The commit that a folder of the hub's cache stands for."""
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    @property
    def labels(self) -> list[int]:
        """The indices of the labels that mean something: those with a name if any has one, and not the null label."""
        count = len(self.info.labels) or self.config.num_class_embeds or 0
        return [label for label in range(count) if label != self.info.null_label]

    @property
    def size(self) -> tuple[int, int] | None:
        """(width, height) of its pictures in pixels, where the config says."""
        size = self.config.trained_size
        return size and (size[1] * self.scale, size[0] * self.scale)

    @property
    def size_factor(self) -> int:
        """What width and height must be multiples of."""
        return self.config.size_factor * self.scale

    def label_name(self, index: int | None) -> str | int | None:
        """The name of label `index`, or the index where it has none."""
        return self.info.labels[index] if index is not None and index < len(self.info.labels) else index

    def choices_name(self, choices: tuple[int, ...]) -> str | int | None:
        """The name of the label or group that stands for these indices."""
        groups = (name for name in self.info.label_groups if self.info.label_choices(name) == choices)
        return self.label_name(choices[0]) if len(choices) == 1 else next(groups)
