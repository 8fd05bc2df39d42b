"""The registry, and model_index.json: the pipelines that are run, and what is refused of the others."""

import inspect
import json
from pathlib import Path

import diffusers
import diffusers.experimental
import pytest

from fastdiff.checkpoints.registry import DENOISERS, PIPELINES, SCHEDULERS, denoiser_part, read_model_index
from fastdiff.errors import InputError
from fastdiff.models import classes

INDEX = {
    "_class_name": "DDIMPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "unet": ["diffusers", "UNet2DModel"],
}
DIT_INDEX = {
    "_class_name": "DiTPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "transformer": ["diffusers", "DiTTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write(folder: Path, index: dict) -> Path:
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def assert_one_line(error, *named: str) -> None:
    message = str(error.value)
    assert all(name in message for name in named), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"_class_name": "LDMPipeline"}, ["'LDMPipeline'", "DDIMPipeline"], id="other-pipeline"),
        pytest.param({"_class_name": ["pipeline", "Mine"]}, ["pipeline class"], id="class-from-a-file"),
        pytest.param({"_class_name": None}, ["pipeline class None"], id="no-class"),
        pytest.param({"custom_pipeline": "mine"}, ["custom_pipeline"], id="custom-pipeline"),
        pytest.param({"vqvae": ["diffusers", "VQModel"]}, ["vqvae"], id="another-component"),
        pytest.param({"unet": ["my_module", "UNet2DModel"]}, ["unet", "'my_module'", "no code"], id="foreign-module"),
        pytest.param({"scheduler": ["os", "system"]}, ["scheduler", "'os'"], id="foreign-scheduler"),
        pytest.param({"unet": ["diffusers", "VQModel"]}, ["VQModel", "UNet2DModel, UNet1DModel"], id="other-model"),
        pytest.param({"unet": [None, None]}, ["unet", "pair"], id="null-component"),
        pytest.param({"unet": "UNet2DModel"}, ["unet", "pair"], id="no-pair"),
        pytest.param({"unet": ["diffusers", ["a", "b"]]}, ["unet", "pair"], id="class-is-a-list"),
        pytest.param({"unet": ["diffusers"]}, ["unet", "pair"], id="half-a-pair"),
    ],
)
def test_pipelines_that_are_refused(tmp_path, change, named):
    with pytest.raises(InputError) as error:
        read_model_index(write(tmp_path, INDEX | change))
    assert_one_line(error, "model_index.json", *named)


def test_a_pipeline_without_a_component_is_refused(tmp_path):
    index = {key: value for key, value in INDEX.items() if key != "unet"}
    with pytest.raises(InputError) as error:
        read_model_index(write(tmp_path, index))
    assert_one_line(error, "unet: None")


DIT_CLASSES = {"pipeline": "DiTPipeline", "scheduler": "DDIMScheduler", "transformer": "DiTTransformer2DModel"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, {"vae": "AutoencoderKL"}, id="latents"),
        pytest.param({"vae": [None, None]}, {}, id="pixels"),
        pytest.param({"id2label": {"0": "tench, Tinca tinca"}}, {"vae": "AutoencoderKL"}, id="named-labels"),
        pytest.param(
            {"transformer": ["diffusers", "Transformer2DModel"]},
            {"transformer": "Transformer2DModel", "vae": "AutoencoderKL"},
            id="older-name-of-the-class",
        ),
    ],
)
def test_pipelines_of_transformers(tmp_path, change, expected):
    assert read_model_index(write(tmp_path, DIT_INDEX | change)) == DIT_CLASSES | expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({"transformer": ["diffusers", "SD3Transformer2DModel"]}, ["SD3Transformer2DModel"], id="model"),
        pytest.param({"transformer": [None, None]}, ["transformer", "pair"], id="no-transformer"),
        pytest.param({"unet": ["diffusers", "UNet2DModel"]}, ["unet"], id="unet"),
        pytest.param({"vae": ["diffusers", "VQModel"]}, ["vae", "VQModel", "AutoencoderKL"], id="vae"),
        pytest.param({"vae": ["mine", "AutoencoderKL"]}, ["vae", "'mine'", "no code"], id="foreign-vae"),
        pytest.param({"text_encoder": ["transformers", "T5EncoderModel"]}, ["text_encoder"], id="text-encoder"),
    ],
)
def test_pipelines_of_transformers_that_are_refused(tmp_path, change, named):
    with pytest.raises(InputError) as error:
        read_model_index(write(tmp_path, DIT_INDEX | change))
    assert_one_line(error, "model_index.json", *named)


def test_the_folder_of_a_value_guided_pipeline(tmp_path):
    """diffusers saves no env; whatever another one wrote there is not looked at."""
    model, index = ["diffusers", "UNet1DModel"], {"_class_name": "ValueGuidedRLPipeline"}
    index |= {"value_function": model, "unet": model, "scheduler": ["diffusers", "DDPMScheduler"]}
    for env in ([None, None], ["gym", "Hopper"], None):
        classes = read_model_index(write(tmp_path, index | {"env": env}))
        assert classes == {
            "pipeline": "ValueGuidedRLPipeline",
            "unet": "UNet1DModel",
            "value_function": "UNet1DModel",
            "scheduler": "DDPMScheduler",
        }
    with pytest.raises(InputError, match="value_function: None is not a"):
        read_model_index(write(tmp_path, index | {"value_function": None}))
    with pytest.raises(InputError, match="unet class UNet2DModel is not supported; fastdiff runs UNet1DModel"):
        read_model_index(write(tmp_path, index | {"unet": ["diffusers", "UNet2DModel"]}))


def class_of_diffusers(name: str) -> type | None:
    return getattr(diffusers, name, None) or getattr(diffusers.experimental, name, None)


def test_every_name_is_one_of_diffusers():
    parts = {part.name: part for pipeline in PIPELINES.values() for part in pipeline.parts}
    names = [*PIPELINES, *SCHEDULERS.values(), *(name for part in parts.values() for name in part.classes)]
    assert [name for name in names if class_of_diffusers(name) is None] == []


def test_a_pipeline_has_the_parts_and_options_of_diffusers():
    for name, pipeline in PIPELINES.items():
        components = set(inspect.signature(class_of_diffusers(name).__init__).parameters) - {"self"}
        assert components == {*(part.name for part in pipeline.parts), *pipeline.unused, *pipeline.options}, name


def test_our_models_are_those_of_the_registry():
    assert {name: kind.part for name, kind in classes.DENOISERS.items()} == {
        part.class_name: part for part in DENOISERS
    }


def test_every_denoiser_is_found_by_each_of_its_names():
    assert all(denoiser_part(name) is part for part in DENOISERS for name in part.classes)
    assert denoiser_part("AutoencoderKL") is denoiser_part(None) is denoiser_part(["UNet2DModel"]) is None
