"""The models that come with the package: their folders, licences and weights."""

import json

import pytest

from fastdiff.checkpoints.hub import bundled_controlnets, bundled_models, resolve
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.checkpoints.registry import read_model_index
from fastdiff.errors import InputError
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.dit import DiTTransformer2DModel
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.sampler_names import SCHEDULERS

MODELS = {"emoji-sd": UNet2DConditionModel, "emoji64": UNet2DModel, "emoji64-dit": DiTTransformer2DModel}
CONTROLNETS = {"emoji-edges": ControlNetModel}
PARAMETERS = {"emoji-edges": 3_058_992, "emoji-sd": 7_292_964, "emoji64": 7_844_963, "emoji64-dit": 8_380_208}


def test_names_and_classes():
    assert {name: read_model_index(folder) for name, folder in bundled_models().items()} == {
        "emoji64": {"pipeline": "DDIMPipeline", "scheduler": "DDIMScheduler", "unet": "UNet2DModel"},
        "emoji64-dit": {
            "pipeline": "DiTPipeline",
            "scheduler": "DDIMScheduler",
            "transformer": "DiTTransformer2DModel",
        },
        "emoji-sd": {
            "pipeline": "StableDiffusionPipeline",
            "scheduler": SCHEDULERS[ModelInfo.from_folder(resolve("emoji-sd")).scheduler],
            "text_encoder": "CLIPTextModel",
            "tokenizer": "CLIPTokenizer",
            "unet": "UNet2DConditionModel",
            "vae": "AutoencoderKL",
        },
    }


def test_controlnets_are_no_models():
    assert bundled_controlnets().keys() == CONTROLNETS.keys()
    for name, folder in bundled_controlnets().items():
        assert resolve(name) == folder and name not in bundled_models()
        with pytest.raises(InputError, match=f"/{name} is a ControlNet, which draws with a text model only"):
            ModelCard.read(name, folder)


@pytest.mark.parametrize("name", MODELS | CONTROLNETS)
def test_weights_load_whole(name):
    model = (MODELS | CONTROLNETS)[name].from_pretrained(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "most"), [("emoji-sd", 24), ("emoji64", 16), ("emoji64-dit", 16)])
def test_at_most_so_many_mib(name, most):
    folder = resolve(name)
    parts = [folder / part for part in read_model_index(folder) if part != "pipeline"]
    assert sum(path.stat().st_size for part in parts for path in part.iterdir()) <= most * 2**20


def test_a_controlnet_has_at_most_seven_mib():
    for folder in bundled_controlnets().values():
        assert (
            sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
            <= 7 * 2**20
        )


@pytest.mark.parametrize("name", MODELS | CONTROLNETS)
def test_no_file_names_a_folder_of_another_machine(name):
    for path in resolve(name).rglob("*.json"):
        assert "_name_or_path" not in json.loads(path.read_text(encoding="utf-8")), path


def test_the_text_model_says_how_it_draws_best():
    """diffusers, which does not read fastdiff.json, finds the same scheduler in the folder."""
    card = ModelCard.read("emoji-sd", resolve("emoji-sd"))
    assert card.size == (128, 128) and len(card.info.prompts) >= 4
    assert card.info.scheduler == card.scheduler
    assert card.info.num_inference_steps and card.info.guidance_scale


@pytest.mark.parametrize("name", MODELS | CONTROLNETS)
@pytest.mark.parametrize("licence", ["fluentui-emoji.MIT.txt", "noto-emoji.Apache-2.0.txt", "twemoji-colr.LICENSE.md"])
def test_licences_and_attribution(name, licence):
    folder = resolve(name)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "licenses" / licence).stat().st_size > 1000 and licence in card
    assert all(path.name in card for path in (folder / "licenses").iterdir())
    assert "Twemoji, Copyright 2019 Twitter, Inc and other contributors, CC BY 4.0" in card
