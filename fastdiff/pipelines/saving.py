"""Saving: a pipeline's model_index.json, and `save_pretrained`, whose folders diffusers reads too."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdiff.arguments import path
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import FILE_NAME, ModelInfo
from fastdiff.checkpoints.names import Variant
from fastdiff.checkpoints.registry import PIPELINES, TOKENIZER, PipelineClass
from fastdiff.errors import InputError
from fastdiff.models.model import Model
from fastdiff.pipelines.parts import Parts
from fastdiff.samplers.shared.scheduler import FrozenDict
from fastdiff.schema import checked
from fastdiff.text.tokenizer import CLIPTokenizer

NOTHING = (None, None)  # in model_index.json, a part that is not there


class Saving(Parts):
    """A pipeline that knows its diffusers class and its config, and can save itself."""

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
    def config(self) -> FrozenDict:
        """The content of model_index.json, as in diffusers: the class, the options, and each part's (library, class).

        A part that fastdiff does not run is (None, None).
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
            safe_serialization: write safetensors; False writes .bin.
            variant: a part of the names of the weight files, such as "fp16".
            max_shard_size: the largest size of a weight file, such as "5GB".
            push_to_hub: must be False.
            use_flashpack: must be False.
            kwargs: none; arguments of `push_to_hub` are refused.

        Raises InputError if the folder cannot be written, or no class of diffusers has these parts.
        """
        refused = {"push_to_hub": push_to_hub, "use_flashpack": use_flashpack} | kwargs
        for name, value in refused.items():
            if value is not False:
                raise InputError(f"{name}: save_pretrained only writes a folder; leave it out")
        checked("variant", variant, Variant | None)
        folder, row, parts = Path(path("save_directory", save_directory)), self._row(), self.components
        odd = [name for name in parts if name not in [part.name for part in row.parts]]
        if odd:
            raise InputError(f"{odd[0]}: a {row.name} has no such part, so it cannot be saved; save the part alone")
        size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        options: dict[str, Any] = {"safe_serialization": safe_serialization, "variant": variant, **size}
        _make(folder)
        for name, part in parts.items():
            if part is not None:
                part.save_pretrained(folder / name, **options if isinstance(part, Model) else {})
        index = {name: value for name, value in sorted(self.config.items()) if name != "_name_or_path"}
        _write(folder / "model_index.json", index)
        self._save_info(folder)

    def _save_info(self, folder: Path) -> None:
        """Write fastdiff.json, if the pipeline has labels, prompts or defaults that the other files do not say."""
        config = self.denoiser.config
        (folder / FILE_NAME).unlink(missing_ok=True)
        if self.info != ModelInfo.from_folder(folder, config.num_class_embeds, config.null_label):
            _write(
                folder / FILE_NAME,
                {name: value for name, value in asdict(self.info).items() if value not in (None, (), {})},
            )


def _pair(part: Any) -> tuple[str | None, str | None]:
    """Return the library and the class of a part, as in model_index.json."""
    if part is None:
        return NOTHING
    if isinstance(part, CLIPTokenizer):
        return TOKENIZER.library, TOKENIZER.class_name
    if isinstance(part, Model):
        return part.part.library, part.part.class_name
    return "diffusers", type(part).__name__


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"save_directory: {folder} cannot be made ({error.strerror}); give another folder") from None


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
