"""PictureSection: a folded section of Draw with one of the owner's networks and the picture that it reads."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.components import Component

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.catalogue.picture_readers import PictureReaders
from fastdiff.ui.parts.controls import Controls, Properties
from fastdiff.ui.queueing.messages import PROBLEMS
from fastdiff.ui.queueing.running import QUICK, Updates

NONE = ""  # the value of the list for no network
MAX_SCALE = 2  # of the slider; a restored picture can have more


def picture_field(label: str, elem_id: str) -> gr.Image:
    """Build the field of a picture that a user drops."""
    return gr.Image(
        label=label,
        show_label=False,
        type="filepath",
        sources=["upload", "clipboard"],
        height=240,
        buttons=["fullscreen"],
        elem_id=elem_id,
        elem_classes="enlarged",
        placeholder="Drop a picture here, or click to choose one",
    )


class PictureFields(Controls, ABC):
    """Base class of the fields of a section, by the names of an UncheckedRequest."""

    @property
    @abstractmethod
    def name(self) -> gr.Dropdown:
        """The list of networks."""

    @property
    @abstractmethod
    def image(self) -> gr.Image:
        """The picture."""

    @staticmethod
    @abstractmethod
    def properties(record: Mapping[str, Any]) -> Properties:
        """Return the properties with the values of a request or a picture."""


@dataclass(frozen=True)
class PictureSection:
    """A section for models with a network on offer."""

    readers: PictureReaders
    box: gr.Accordion
    fields: PictureFields

    @property
    def components(self) -> list[Component]:
        """The fields whose values the browser stores."""
        return self.fields.components

    def chosen(self, data: Mapping[Component, Any], card: ModelCard) -> dict[str, Any]:
        """Return the UncheckedRequest fields of these controls, or none without a network."""
        values = {name: data[field] for name, field in vars(self.fields).items()}
        return values if card.reads_text and data[self.fields.name] not in (NONE, None) else {}

    def fit(self, card: ModelCard, data: Mapping[Component, Any]) -> Updates:
        """Fit the controls to another model. Its own network replaces one that does not fit it."""
        names, chosen = [*self.readers.offered(card)], data[self.fields.name]
        if chosen not in (NONE, None, *names):
            chosen = names[0] if names else NONE
        return {
            self.box: gr.update(visible=is_shown(self.readers, card, names)),
            self.fields.name: gr.update(choices=_choices(names), value=chosen),
        }

    def show(self, card: ModelCard, record: Mapping[str, Any]) -> Updates:
        """Fit the controls to `card`, and fill in the settings of a `record`."""
        properties, names = self.fields.properties(record), [*self.readers.offered(card)]
        properties[self.readers.SETTING]["choices"] = _choices(names)
        opened: dict[str, Any] = {"open": True} if record.get(self.readers.SETTING) else {}
        return {
            self.box: gr.update(visible=is_shown(self.readers, card, names), **opened),
            **self.fields.updates(properties),
        }

    def begin(self, card: ModelCard, chosen: Any) -> tuple[str, Updates]:
        """Return the network for a picture that was just dropped, and the update that chooses it.

        It is the chosen one, or the first one on offer. Raises InputError if there is none.
        """
        names = [*self.readers.offered(card)]
        if chosen in (NONE, None) and not names:
            setting, what = self.readers.SETTING, self.readers.WHAT
            raise InputError(f"{setting}: there is no {what} for {card.name}; choose another model")
        name = names[0] if chosen in (NONE, None) else chosen
        return name, {self.fields.name: gr.update(choices=_choices(names), value=name)}

    def follow(self, catalogue: Catalogue, model: gr.Dropdown) -> None:
        """List the networks of the folder again when the list is opened."""

        def offer(name: str) -> dict[str, Any]:
            try:
                return gr.update(choices=_choices([*self.readers.offered(catalogue.card(name))]))
            except PROBLEMS:  # the model no longer exists
                return gr.skip()

        self.fields.name.focus(offer, model, self.fields.name, **QUICK)


def network_list(readers: PictureReaders, names: Sequence[str], info: str) -> gr.Dropdown:
    """Build the list of the networks on offer."""
    return gr.Dropdown(_choices(names), value=NONE, label=readers.WHAT, info=info, allow_custom_value=readers.allow_hub)


def kept_values(record: Mapping[str, Any], defaults: Mapping[str, Any], image: str) -> dict[str, Any]:
    """Return the values of a section's fields, from the record of a request or a picture, or else the defaults.

    image: the name of the picture, which becomes a path.
    """
    values = {**defaults, **{name: value for name, value in record.items() if name in defaults and value is not None}}
    picture = values[image]
    return values | {image: picture["path"] if isinstance(picture, dict) else picture}


def slider_range(least: float, most: float, value: float) -> dict[str, float]:
    """Return the range of a slider that has room for a restored value."""
    return {"minimum": min(least, value), "maximum": max(most, value)}


def _choices(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the choices of the list of networks."""
    return [("None", NONE), *((name, name) for name in names)]


def is_shown(readers: PictureReaders, card: ModelCard, names: Sequence[str]) -> bool:
    """Return whether a user can choose a network for a model. names: the networks on offer for it."""
    return readers.suits(card) and (readers.allow_hub or bool(names))
