"""ModelConfig: the base of the config of each model, and where its options show in the weights."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

from fastdiff.errors import InputError
from fastdiff.schema import Schema

Library = Literal["diffusers", "transformers"]  # that a model is a class of, which names its weight files


class Place(NamedTuple):
    """A size of one tensor, or the number of modules below a key. Keys are diffusers'."""

    key: str
    dimension: int | None  # None: the modules below `key` are counted
    size: int  # that the option asks for


def check_block_types(option: str, kinds: Iterable[str], known: Sequence[str]) -> None:
    """InputError naming an option of block types that holds one which is not known."""
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise InputError(f"{option}: block type {unknown[0]!r} is not supported; choose from {', '.join(known)}")


class ModelConfig(Schema):
    """The questions that every model's config answers. The options have the library's names and defaults."""

    LIBRARY: ClassVar[Library] = "diffusers"
    KEY_PREFIX: ClassVar[str] = ""  # that some files put before the keys of the weights, and others do not

    @property
    def places(self) -> dict[str, Place]:
        """Where each option shows in the weights that decides how much there is to build."""
        raise NotImplementedError

    @property
    def least_parameters(self) -> dict[str, int]:
        """The parameters that there are at least, by the option that asks for them."""
        raise NotImplementedError
