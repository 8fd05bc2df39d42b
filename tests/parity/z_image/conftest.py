"""A tiny pipeline of Z-Image in diffusers' classes, its folder, and the same folder in fastdiff."""

import pytest
import torch

import fastdiff
from tests.parity.z_image import tiny


@pytest.fixture(scope="module")
def randomise_once():
    """Return `randomise` of the tests' root for a whole module."""

    def randomise(model):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model.eval()

    return randomise


@pytest.fixture(scope="module")
def theirs(randomise_once):
    return tiny.pipeline(randomise_once)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("z-image")
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ours(folder):
    return fastdiff.Pipeline.from_pretrained(folder, device="cpu")
