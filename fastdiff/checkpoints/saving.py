"""Configs that are saved and read back, and the names of saved weight files, as in diffusers and transformers."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from fastdiff.arguments import optional, shown, text
from fastdiff.arguments import path as checked_path
from fastdiff.checkpoints.configs.model import Library
from fastdiff.checkpoints.hub import folder_with
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import check_foreign
from fastdiff.checkpoints.names import Variant, index_names, weight_names, weights_name
from fastdiff.errors import InputError
from fastdiff.refused import OF_ALL, Refusing, refusal
from fastdiff.schema import checked

DIFFUSERS = "0.42.1"  # the release whose layout the files have

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")  # of `from_pretrained`
_UPLOADING = frozenset({"commit_message", "create_pr", "private", "repo_id", "token"})  # unused without push_to_hub


class FrozenDict(dict):
    """Options by item and by attribute. It is immutable, as diffusers' class of this name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no option {name!r}") from None

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a config is frozen; make another with from_config(config, option=value)")

    __setattr__ = __setitem__ = __delitem__ = __ior__ = update = pop = popitem = setdefault = clear = _refuse

    def __reduce__(self) -> tuple[type["FrozenDict"], tuple[dict]]:  # otherwise copies and pickles would set the items
        return FrozenDict, (dict(self),)


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

    @classmethod
    def load_config(
        cls,
        pretrained_model_name_or_path: Any,
        return_unused_kwargs: bool = False,
        return_commit_hash: bool = False,
        *,
        subfolder: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the content of a saved config, for `from_config`.

        Args:
            pretrained_model_name_or_path: a folder, the name of a bundled model, or a hub id.
            return_unused_kwargs: whether to return a tuple of the config and the kwargs that are not of the hub.
            return_commit_hash: not supported: it must be False.
            subfolder: the part of a pipeline's folder.
            kwargs: options of the hub (`cache_dir`, `force_download`, `local_files_only`, `revision`, `token`).

        Raises:
            InputError: for a bad folder or config, and for other kwargs.
        """
        if return_commit_hash is not False:
            raise InputError("return_commit_hash: fastdiff does not read it; leave it out")
        optional(text, "subfolder", subfolder)
        hub_options, unused = divided(kwargs, HUB_OPTIONS)
        files = [f"{folder}/{cls.config_name}".lstrip("/") for folder in cls.folders(subfolder)]
        root = folder_with(pretrained_model_name_or_path, files, **hub_options)
        config = read_json(root / next((file for file in files if (root / file).is_file()), files[-1]))
        if checked("return_unused_kwargs", return_unused_kwargs, bool):
            return config, unused
        check_foreign(unused)
        return config

    @classmethod
    def folders(cls, subfolder: str | None) -> tuple[str, ...]:
        """Return where the config may be in a model's folder, the preferred folder first."""
        return (subfolder or "",)


def divided(options: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options with these names, and the others."""
    ours = {name: value for name, value in options.items() if name in names}
    return ours, {name: value for name, value in options.items() if name not in names}


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
