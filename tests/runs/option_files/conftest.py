"""The command with a tiny text-to-image model, for tests of the files beside a model."""

import pytest
from PIL import Image

from fastdiff import cli


@pytest.fixture
def sample(request, text_folder):
    """Return a function that runs `fastdiff sample` with the tiny model and returns its exit code.

    The prompt is the test module's PROMPT. `own` replaces the seed, the model and the prompt.
    """
    flags = ["--device", "cpu", "--steps", "1", "--num-images", "1"]
    asked = ("--seed", "5", "--model", str(text_folder("sd1")), "--prompt", request.module.PROMPT)

    def run(*args, own=asked):
        return cli.main(["sample", *flags, *own, *map(str, args)])

    return run


@pytest.fixture
def pixels():
    """Return a function that reads the bytes of a picture's pixels."""

    def read(path):
        with Image.open(path) as image:
            return image.tobytes()

    return read
