"""The models that all tests of a process share."""

import pytest

from fastdiff.hosting.catalogue import Catalogue
from fastdiff.hosting.models import Models


@pytest.fixture(scope="module", autouse=True)
def _small_models(as_bundled) -> None:
    """Bundle small models."""


@pytest.fixture(scope="session")
def models(models_dir) -> Models:
    return Models(models_dir, device="cpu")


@pytest.fixture(scope="session")
def catalogue(models) -> Catalogue:
    return models.catalogue
