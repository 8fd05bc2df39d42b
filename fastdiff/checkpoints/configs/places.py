"""Place: where an option of a config shows in the weights."""

from typing import NamedTuple


class Place(NamedTuple):
    """A size of one tensor, or the number of modules below a key. Keys are diffusers'."""

    key: str
    dimension: int | None  # None: the modules below `key` are counted
    size: int  # that the option asks for
