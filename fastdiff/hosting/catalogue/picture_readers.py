"""PictureReaders: the base class of `ControlNets` and `IPAdapters`, networks that read a picture beside the prompt.

A user gives names alone. A name that is not in the list opens no folder and no file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from fastdiff.arguments import shown
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.single_files.listing import last_part
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue.offered import find_offered
from fastdiff.requests.request import Request

MOST_NAMES = 8  # in a message


class PictureReaders(ABC):
    """The networks of one kind on offer, by name."""

    SETTING: ClassVar[str]  # of their names
    WHAT: ClassVar[str]  # in messages
    OF_EACH: ClassVar[tuple[str, ...]]  # settings of which a PNG lists one for each network
    OF_ALL: ClassVar[tuple[str, ...]] = ()  # settings that they share

    def __init__(self, find: Callable[[], Mapping[str, Path]], *, allow_hub: bool = False) -> None:
        """find: returns the places that may be such networks. allow_hub: whether a user may name one of the hub too."""
        self.allow_hub = allow_hub
        self._find = find
        self._names: dict[str, str] = {}  # of the places that requests have chosen

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the settings of a picture on the page."""
        return (*cls.OF_EACH, *cls.OF_ALL)

    @staticmethod
    @abstractmethod
    def suits(card: ModelCard) -> bool:
        """Return whether a model is of a kind that such networks work with."""

    @abstractmethod
    def _misfit(self, name: str, place: Path, card: ModelCard) -> str | None:
        """Return why a network does not fit a model that `suits`, or None if it does."""

    @abstractmethod
    def _downloaded(self, name: str) -> Path | None:
        """Return the place of a network of the hub, which is downloaded, or None if it is no name of the hub."""

    @abstractmethod
    def _is_of_hub(self, name: str) -> bool:
        """Return whether a name is a name of the hub."""

    @abstractmethod
    def _hashed(self, place: Path) -> Path:
        """Return the file whose hash a PNG holds. A folder of several files has none."""

    def offered(self, card: ModelCard) -> dict[str, Path]:
        """Return the places of the networks that fit a model, by name."""
        if not self.suits(card):
            return {}
        return {name: place for name, place in self._find().items() if self._misfit(name, place, card) is None}

    def chosen(self, name: str, card: ModelCard) -> Path:
        """Return the place of a network. One of the hub is downloaded if the hub is allowed.

        Raises InputError for a name that is not on offer for the model.
        """
        offered = self.offered(card)
        place = offered.get(name)
        if place is None and self.allow_hub and self.suits(card) and self._is_of_hub(name):
            place = self._downloaded(name)
            if place is not None and (misfit := self._misfit(name, place, card)):
                raise InputError(f"{self.SETTING}: {shown(name)} does not fit {card.name}: {misfit}")
        if place is None:
            raise InputError(f"{self.SETTING}: {self._refusal(name, card, offered)}")
        self._names[str(place)] = name
        return place

    def fields(self, name: str, card: ModelCard) -> dict[str, Any]:
        """Return the Request fields of the network of a name. Raises as `chosen`."""
        return {self.SETTING: (str(self.chosen(name, card)),)}

    def _refusal(self, name: str, card: ModelCard, offered: Iterable[str]) -> str:
        """Return why a name is not on offer, and what to choose."""
        names = [*offered]
        some = f"one of {', '.join(names[:MOST_NAMES])}" if names else "none: there is none for this model"
        return f"{shown(name)} is not on offer for {card.name}; choose {some}"

    def with_names(self, request: Request) -> Request:
        """Return a request of the page with its networks by their names, as its PNG stores them."""
        names: dict[str, Any] = {self.SETTING: tuple(map(self._named, getattr(request, self.SETTING)))}
        return replace(request, **names)

    def record_with_names(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a picture, with its networks by name."""
        if self.SETTING not in record:
            return dict(record)
        return {**record, self.SETTING: [*map(self._named, record[self.SETTING])]}

    def _named(self, place: str) -> str:
        return self._names.get(place, place)

    def without_paths(self, text: str) -> str:
        """Return an error's text with names instead of paths: users need not know the server's folders."""
        for place in sorted(self._names, key=len, reverse=True):
            text = text.replace(place, self._names[place])
        return text

    @classmethod
    def first(cls, request: Request, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the first network of a PNG, one value for each, and a line about the others.

        request: of the PNG's settings. Without a network, the result is empty.
        """
        if not getattr(request, cls.SETTING):
            return {}
        first = {name: next(iter(getattr(request, name)), None) for name in cls.OF_EACH}
        shared = {name: getattr(request, name) for name in cls.OF_ALL}
        digits = {f"{name}_hash": _first(record.get(f"{name}_hashes")) for name in _hashed_settings(cls.SETTING)}
        return {**first, **shared, **digits, _left(cls.SETTING): cls._others(request)}

    @classmethod
    def _others(cls, request: Request) -> str | None:
        """Return the names of the networks after the first, and why the page has not restored them."""
        names = [last_part(name) for name in getattr(request, cls.SETTING)[1:]]
        return f"{' and '.join(names)}, because the page draws with one {cls.WHAT}" if names else None

    def here(self, record: Mapping[str, Any], source: str, card: ModelCard) -> tuple[dict[str, Any], list[str]]:
        """Return the settings of the PNG `source` with the network that is here, and lines about others.

        record: as `first` returns it. As a LoRA, a network is found by its name, else by its hash, else by the last
        part of its name.
        """
        others = record.get(_left(self.SETTING))
        lines = [f"not restored: {others}"] if others else []
        given = record.get(self.SETTING)
        if given is None:
            return dict(record), lines
        files = {name: self._hashed(place) for name, place in self.offered(card).items()}
        name, line = find_offered(self.WHAT, given, record.get(f"{self.SETTING}_hash"), files, source)
        if name is None and self.allow_hub and self._is_of_hub(given):
            name, line = given, None
        missing = dict.fromkeys(self.settings()) if name is None else {self.SETTING: name}
        return {**record, **missing}, [*filter(None, [line]), *lines]


def _hashed_settings(setting: str) -> tuple[str, str]:
    return setting, f"{setting}_image"


def _left(setting: str) -> str:
    """Return the key, beside the settings, of the line about networks that are not restored."""
    return f"{setting}_left"


def _first(listed: Any) -> str | None:
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else None
