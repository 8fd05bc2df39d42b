"""Saving: a pipeline's model_index.json, and `save_pretrained`, whose folders diffusers reads too."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import FILE_NAME, ModelInfo
from fastdiff.checkpoints.names import Variant
from fastdiff.checkpoints.registry import CONTROLNET, PIPELINES, PipelineClass
from fastdiff.checkpoints.saving import Configured, check_not_uploading, into_folder
from fastdiff.errors import InputError
from fastdiff.models.model import Model
from fastdiff.pipelines.parts import Parts
from fastdiff.samplers.shared.scheduler import FrozenDict
from fastdiff.schema import checked
from fastdiff.text.loading import Tokenizer

NOTHING = (None, None)  # in model_index.json, a part that is not there


class Saving(Configured, Parts):
    """A pipeline that knows its diffusers class and its config, and can save itself."""

    config_name = "model_index.json"
    _card: ModelCard | None = None  # of the folder that the pipeline was loaded from

    @property
    def diffusers_class(self) -> str:
        """The name of the diffusers pipeline class that draws the same: the folder's, or else one that fits."""
        return self._usual_class() if self._card is None else self._card.pipeline.name

    def _usual_class(self) -> str:
        """Return the name of the diffusers pipeline class for these parts."""
        return type(self).__name__

    @property
    def name_or_path(self) -> str:
        """The name of the model, as `from_pretrained` was given it."""
        return self.name

    @property
    def parameters(self) -> dict[str, Any]:
        """The options of the pipeline that are not parts, as in diffusers."""
        return {name: self.config[name] for name in self._row().options if name in self.config and name != "env"}

    @property
    def config(self) -> FrozenDict:
        """The content of model_index.json, as in diffusers.

        It has the class, the options, and the (library, class) of each part. A part that fastdiff does not run is
        (None, None).
        """
        row = self._row()
        options = {} if self._card is None else {name: self._card.options.get(name) for name in row.options}
        options |= {name: False for name in ("requires_safety_checker", "add_watermarker") if name in row.options}
        unused = dict.fromkeys((*row.unused, *(name for name in ("env",) if name in row.options)), NOTHING)
        parts = {name: _pair(part) for name, part in self.components.items()}
        return FrozenDict(
            {"_class_name": row.name, "_name_or_path": self.name} | options | self._own_options() | unused | parts
        )

    def _own_options(self) -> dict[str, Any]:
        """Return the options of model_index.json that the pipeline itself has."""
        return {}

    def _row(self) -> PipelineClass:
        """Return the diffusers class to save as. A class that forces its scheduler is kept only for that scheduler."""
        row = PIPELINES[self.diffusers_class]
        return row if row.scheduler in (None, self.scheduler_name) else PIPELINES["DDPMPipeline"]

    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        use_flashpack: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the pipeline to a folder, which fastdiff and diffusers read. Weights keep their dtype and their bits.

        Args:
            save_directory: the folder, which is created.
            safe_serialization: must be True: fastdiff writes safetensors only.
            variant: a part of the names of the weight files, such as "fp16".
            max_shard_size: the largest size of a weight file, such as "5GB".
            push_to_hub: must be False.
            use_flashpack: must be False.
            kwargs: options of `push_to_hub`, which have no effect.

        Raises InputError if the folder cannot be written, or no class of diffusers has these parts.
        """
        if use_flashpack is not False:
            raise InputError("use_flashpack: only safetensors are written; leave it out")
        check_not_uploading(push_to_hub, kwargs)
        checked("variant", variant, Variant | None)
        row, parts = self._row(), self.components
        odd = [name for name in parts if name not in [part.name for part in row.parts]]
        if odd:
            raise InputError(f"{odd[0]}: a {row.name} has no such part, so it cannot be saved; save the part alone")
        size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        options: dict[str, Any] = {"safe_serialization": safe_serialization, "variant": variant, **size}
        with into_folder(save_directory) as folder:
            for name, part in parts.items():
                for i, each in enumerate(part if isinstance(part, tuple) else () if part is None else (part,)):
                    place = folder / (f"{name}_{i}" if i else name)  # of several ControlNets
                    each.save_pretrained(place, **options if isinstance(each, Model) else {})
            self.save_config(folder)
            self._save_info(folder)

    def saved_config(self) -> dict[str, Any]:
        """Return the content of model_index.json."""
        return {**super().saved_config(), "_class_name": self._row().name}

    def _save_info(self, folder: Path) -> None:
        """Write fastdiff.json, if the pipeline has labels, prompts or defaults that the other files do not say."""
        config = self.denoiser.config
        (folder / FILE_NAME).unlink(missing_ok=True)
        info = replace(self.info, scheduler=self.info.scheduler and self.scheduler_name)
        if info != ModelInfo.from_folder(folder, config.num_class_embeds, config.null_label):
            said = {name: value for name, value in asdict(info).items() if value not in (None, (), {})}
            (folder / FILE_NAME).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _pair(part: Any) -> tuple[str | None, str | None]:
    """Return the library and the class of a part, as in model_index.json."""
    if part is None:
        return NOTHING
    if isinstance(part, tuple):
        return CONTROLNET.library, CONTROLNET.classes[1]
    if isinstance(part, Model | Tokenizer):
        return part.part.library, part.part.class_name
    return "diffusers", type(part).__name__
