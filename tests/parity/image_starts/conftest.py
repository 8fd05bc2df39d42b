"""diffusers' inpainting pipelines, and ours of the same weights."""

import pytest

from fastdiff import Pipeline
from tests.parity.image_starts.pictures import INPAINTING, WITH_CHANNELS, of_same_parts
from tests.support.text_pipelines import inpainting_pipeline


@pytest.fixture(scope="module")
def both(text_pipes, tmp_path_factory):
    """Return diffusers' inpainting pipeline of a kind, with a U-Net of some input channels, and ours."""
    made = {}

    def both(kind, channels):
        if (kind, channels) not in made:
            theirs, ours = text_pipes(kind)
            if channels == WITH_CHANNELS:
                theirs = inpainting_pipeline(kind)
                folder = tmp_path_factory.mktemp("inpainting")
                theirs.save_pretrained(folder)
                ours = Pipeline.from_pretrained(folder, device="cpu")
            else:
                theirs = of_same_parts(INPAINTING, kind, theirs)
            theirs.unet.register_to_config(sample_size=8)  # theirs is set to 64
            made[kind, channels] = theirs, ours
        return made[kind, channels]

    return both
