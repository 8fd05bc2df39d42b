"""The tiny pipeline that the tests of the engine draw with."""

import pytest

import fastdiff


@pytest.fixture(scope="module")
def pipe(text_folder):
    return fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu", scheduler="ddim")
