"""ModelConfig: the base class of the models' configs, and the places in the weights that show an option's value."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from fastdiff.arguments import mapping as checked_mapping
from fastdiff.errors import InputError
from fastdiff.schema import Schema, option_names

Library = Literal["diffusers", "transformers"]  # that defines the model class and names its weight files

AnyConfig = TypeVar("AnyConfig", bound="TransformersConfig")

# Keys of transformers' PreTrainedConfig that say how the model was saved
_BOOKKEEPING = ("architectures", "dtype", "torch_dtype", "transformers_version")


class Place(NamedTuple):
    """The size of one dimension of a tensor, or the number of modules under a key. Keys are diffusers'."""

    key: str
    dimension: int | None  # None: count the modules under `key`
    size: int  # according to the option


def check_block_types(option: str, kinds: Iterable[str], known: Sequence[str]) -> None:
    """Raise InputError if `option` lists a block type that is not in `known`."""
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise InputError(f"{option}: block type {unknown[0]!r} is not supported; choose from {', '.join(known)}")


class ModelConfig(Schema, Mapping[str, Any]):
    """The base class of the models' configs. Options have the library's names, order and defaults.

    An option is read as an attribute or as an item, as in diffusers: `config.sample_size` or `config["sample_size"]`.
    """

    LIBRARY: ClassVar[Library] = "diffusers"
    KEY_PREFIX: ClassVar[str] = ""  # of the weights' keys in some files, but not in all
    UNUSED_KEYS: ClassVar[tuple[str, ...]] = ()  # of weights in some files that the model does not have

    def __getitem__(self, name: str) -> Any:
        if name not in option_names(type(self)):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(option_names(type(self)))

    def __len__(self) -> int:
        return len(option_names(type(self)))

    @property
    def places(self) -> dict[str, Place]:
        """The place in the weights that shows the value of each option, for options that decide the model's size."""
        raise NotImplementedError

    @property
    def least_parameters(self) -> dict[str, int]:
        """For each option, the least number of parameters that a model with it has."""
        raise NotImplementedError


class TransformersConfig(ModelConfig):
    """The base class of the configs of transformers' models."""

    LIBRARY: ClassVar[Library] = "transformers"

    @classmethod
    def from_mapping(cls: type[AnyConfig], mapping: Mapping[str, Any], source: object) -> AnyConfig:
        """Build a config from the options in a config.json of transformers.

        Keys that say how the model was saved are skipped. Raises InputError as `Schema.from_mapping` does.
        """
        options = checked_mapping(str(source), mapping)
        return super().from_mapping({key: value for key, value in options.items() if key not in _BOOKKEEPING}, source)
