"""The models on offer, by their ids. A client names ids alone: no path of a client is opened."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastdiff.arguments import did_you_mean, shown
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_hash import begin_hash
from fastdiff.checkpoints.single_files.cards import find_card
from fastdiff.errors import InputError
from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.models import Models
from fastdiff.kinds import Precision
from fastdiff.serve.wire.errors import ApiError


class Offers:
    """The models that an operator offers."""

    def __init__(self, names: Sequence[str], models: Models, precision: Precision) -> None:
        """names: of models, the default one first: bundled names, folders, files or hub ids.

        Raises InputError for a model that does not exist or does not draw from prompts, and for two of one id.
        """
        self.models, self.precision = models, precision
        self.created, self.on_cpu = int(time.time()), models.device.type == "cpu"
        self._cards: dict[str, ModelCard] = {}
        for name in names:
            card = _card(name)
            if card.name in self._cards:
                raise InputError(f"--model {name}: another model has the id {card.name}; rename one")
            self._cards[card.name] = card

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue with the LoRAs on offer."""
        return self.models.catalogue

    @property
    def ids(self) -> list[str]:
        """The ids of the models, the default one first."""
        return [*self._cards]

    @property
    def cards(self) -> list[ModelCard]:
        """The cards of the models, the default one first."""
        return [*self._cards.values()]

    def card(self, name: str | None) -> ModelCard:
        """Return the card of a model, or of the default one. Raises ApiError for an id that is not on offer."""
        found = self._cards.get(name or self.ids[0])
        if found is None:
            hint = did_you_mean(name or "", self.ids) or f"the models are {', '.join(self.ids)}"
            message = f"model: {shown(name)} is not on offer; {hint}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    def load(self) -> None:
        """Load all models, and compute the hashes that PNGs hold. Raises the errors of loading."""
        for card in self.cards:
            self.models.pipeline(card, None, self.precision)
            begin_hash(card, None).result()

    def text_tokens(self, card: ModelCard, *texts: str | None) -> int:
        """Return how many tokens texts have, counted by the first tokenizer of a model."""
        tokenizer = self.catalogue.tokenizers(card)[0]
        return sum(tokenizer(tokenizer.expand(text)).total for text in texts if text)


def _card(name: str) -> ModelCard:
    """Return the card of a model, whose name is its id: a path's last part, so that clients see no folders."""
    card = find_card(name)
    if not card.reads_text or not card.tokenizers:
        raise InputError(f"--model {name}: it draws from no prompts, which the API needs; use fastdiff sample or ui")
    path = Path(name)
    own = path.resolve().name if path.exists() else name
    return replace(card, name=own.removesuffix(".safetensors"))
