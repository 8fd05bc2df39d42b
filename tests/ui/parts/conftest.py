"""Model cards for the tests of the form."""

import pytest

from fastdiff.checkpoints.model_card import ModelCard


@pytest.fixture
def card(card_folder):
    def read(**config) -> ModelCard:
        return ModelCard.read("model", card_folder(**config))

    return read
