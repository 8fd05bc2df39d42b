"""The models that come with the package: their folders, licences and weights."""

import pytest

from fastdiff.checkpoints.hub import bundled_models, resolve
from fastdiff.checkpoints.registry import read_model_index
from fastdiff.models.dit import DiTTransformer2DModel
from fastdiff.models.unet2d import UNet2DModel

MODELS = {"emoji64": UNet2DModel, "emoji64-dit": DiTTransformer2DModel}
PARAMETERS = {"emoji64": 7_844_963, "emoji64-dit": 8_380_208}


def test_names_and_classes():
    assert {name: read_model_index(folder) for name, folder in bundled_models().items()} == {
        "emoji64": {"pipeline": "DDIMPipeline", "scheduler": "DDIMScheduler", "unet": "UNet2DModel"},
        "emoji64-dit": {
            "pipeline": "DiTPipeline",
            "scheduler": "DDIMScheduler",
            "transformer": "DiTTransformer2DModel",
        },
    }


@pytest.mark.parametrize("name", MODELS)
def test_weights_load_whole(name):
    model = MODELS[name].from_pretrained(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_at_most_16_mib(name):
    folder = resolve(name)
    files = [*(folder / MODELS[name].part.name).iterdir(), *(folder / "scheduler").iterdir()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("licence", ["fluentui-emoji.MIT.txt", "noto-emoji.Apache-2.0.txt", "twemoji-colr.LICENSE.md"])
def test_licences_and_attribution(name, licence):
    folder = resolve(name)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "licenses" / licence).stat().st_size > 1000 and licence in card
    assert "Twemoji, Copyright 2019 Twitter, Inc and other contributors, CC BY 4.0" in card
