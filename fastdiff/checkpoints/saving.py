"""Save configs, and plan weight files, in the layout of diffusers and transformers. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fastdiff.arguments import path as checked_path
from fastdiff.arguments import shown
from fastdiff.checkpoints.configs.model import Library
from fastdiff.checkpoints.hub import index_names, weight_names, weights_name
from fastdiff.checkpoints.names import Variant
from fastdiff.errors import InputError
from fastdiff.refused import OF_ALL, Refusing, refusal
from fastdiff.schema import checked

DIFFUSERS = "0.42.1"  # the release whose layout the files have

_UPLOADING = frozenset({"commit_message", "create_pr", "private", "repo_id", "token"})  # unused without push_to_hub


class Configured(Refusing):
    """An object with a config that saves itself as JSON, as diffusers' ConfigMixin does."""

    config_name: ClassVar[str]  # the file's name
    ignore_for_config: ClassVar[tuple[str, ...]] = ()  # options that are not saved
    has_compatibles: ClassVar[bool] = False
    config: Any

    def saved_config(self) -> dict[str, Any]:
        """Return the content of the config's file."""
        options = {key: value for key, value in self.config.items() if not key.startswith("_")}
        return {"_class_name": type(self).__name__, "_diffusers_version": DIFFUSERS, **options}

    def to_json_string(self) -> str:
        """Return the config as JSON, as diffusers writes it."""
        return json.dumps(self.saved_config(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | Path) -> None:
        """Write the config as JSON. Raises InputError if the file cannot be written."""
        file = Path(checked_path("json_file_path", json_file_path))
        with writing(file):
            file.write_text(self.to_json_string(), encoding="utf-8")

    def save_config(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write the config into a folder, under diffusers' name. Raises InputError if that is not possible."""
        check_not_uploading(push_to_hub, kwargs)
        with into_folder(save_directory) as folder:
            self.to_json_file(folder / self.config_name)


def check_not_uploading(push_to_hub: Any, options: Mapping[str, Any]) -> None:
    """Raise InputError for `push_to_hub`, and for an option that neither saving nor uploading has."""
    if checked("push_to_hub", push_to_hub, bool):
        refusal("push_to_hub", OF_ALL["push_to_hub"])()
    unknown = sorted(options.keys() - _UPLOADING)
    if unknown:
        raise InputError(f"{', '.join(unknown)}: save_pretrained has no such option; leave it out")


@contextmanager
def into_folder(save_directory: Any) -> Iterator[Path]:
    """Make a folder and yield its path. Raises InputError if it, or a file in it, cannot be written."""
    folder = Path(checked_path("save_directory", save_directory))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn the operating system's errors into an InputError that names the place."""
    try:
        yield
    except FileExistsError:
        raise InputError(f"{place} is a file; give a folder") from None
    except OSError as error:
        raise InputError(f"{place} cannot be written ({error.strerror}); free space, or give another folder") from None


class WeightFiles(NamedTuple):
    """The weight files of a model that is saved."""

    keys: dict[str, list[str]]  # the keys of the tensors in each file, by its name
    shards: dict[str, Any] | None  # the content of the shards' index; None for a single file
    index_name: str
    stale: list[str]  # patterns of the names that an earlier model of this variant may have left


def plan_weights(
    sizes: Mapping[str, int], max_shard_size: int | str, variant: str | None, library: Library
) -> WeightFiles:
    """Divide tensors between files of at most `max_shard_size`, as huggingface_hub does for both libraries.

    Args:
        sizes: the bytes of each tensor by its key.
        max_shard_size: in bytes, or a text such as "5GB". A larger tensor has a file of its own.
        variant: the part of the files' names, such as "fp16".
        library: names the files.

    Raises InputError for another size, and for a malformed variant.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # slow to import

    checked("variant", variant, Variant | None)
    name = weights_name("safetensors", variant, library)
    try:
        if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int | str):
            raise ValueError
        split = split_state_dict_into_shards_factory(
            dict(sizes),
            get_storage_size=lambda size: size,
            filename_pattern=name.replace(".safetensors", "{suffix}.safetensors"),
            max_shard_size=max_shard_size,
        )
    except ValueError:
        raise InputError(f"max_shard_size: {shown(max_shard_size)} is not a size; give one such as '5GB'") from None
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    index_name, *_ = index_names("safetensors", variant, library)
    return WeightFiles(split.filename_to_tensors, index, index_name, weight_names("safetensors", variant, library))
