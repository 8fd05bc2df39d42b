"""The registry and model_index.json: supported pipelines, and errors for the others."""

import inspect
import json
from pathlib import Path

import diffusers
import diffusers.experimental
import pytest
import transformers

from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.registry import (
    PIPELINES,
    Part,
    denoiser_part,
    denoisers,
    read_denoiser_part,
    read_model_index,
    unused_parts,
)
from fastdiff.errors import InputError
from fastdiff.models import classes
from fastdiff.sampler_names import SCHEDULERS

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
        pytest.param(
            {"unet": ["my_module", "UNet2DModel"]}, ["unet", "'my_module'", "never runs"], id="foreign-module"
        ),
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
        pytest.param({"vae": ["mine", "AutoencoderKL"]}, ["vae", "'mine'", "never runs"], id="foreign-vae"),
        pytest.param({"text_encoder": ["transformers", "T5EncoderModel"]}, ["text_encoder"], id="text-encoder"),
    ],
)
def test_pipelines_of_transformers_that_are_refused(tmp_path, change, named):
    with pytest.raises(InputError) as error:
        read_model_index(write(tmp_path, DIT_INDEX | change))
    assert_one_line(error, "model_index.json", *named)


def test_the_folder_of_a_value_guided_pipeline(tmp_path):
    """diffusers does not save env. Any value in the file is ignored."""
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


# As on the hub, of Stable Diffusion 1.5, 2.1 and SDXL
SD_PARTS = {
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SD15_INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.6.0",
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "scheduler": ["diffusers", "PNDMScheduler"],
    **SD_PARTS,
}
SD21_INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.8.0",
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    **SD_PARTS,
}
SDXL_INDEX = {
    "_class_name": "StableDiffusionXLPipeline",
    "_diffusers_version": "0.19.0.dev0",
    "force_zeros_for_empty_prompt": True,
    "add_watermarker": None,
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    **SD_PARTS,
}
SD_CLASSES = {name: class_name for name, (_, class_name) in SD_PARTS.items()}


@pytest.mark.parametrize(
    ("index", "expected", "unused"),
    [
        pytest.param(SD15_INDEX, {"scheduler": "PNDMScheduler"}, ("safety_checker", "feature_extractor"), id="sd15"),
        pytest.param(SD21_INDEX, {"scheduler": "DDIMScheduler"}, ("feature_extractor",), id="sd21"),
        pytest.param(
            SDXL_INDEX,
            {
                "scheduler": "EulerDiscreteScheduler",
                "text_encoder_2": "CLIPTextModelWithProjection",
                "tokenizer_2": "CLIPTokenizer",
            },
            (),
            id="sdxl",
        ),
    ],
)
def test_pipelines_that_read_prompts(tmp_path, index, expected, unused):
    folder = write(tmp_path, index)
    assert read_model_index(folder) == {"pipeline": index["_class_name"]} | SD_CLASSES | expected
    assert unused_parts(read_json(folder / "model_index.json")) == unused
    assert PIPELINES[index["_class_name"]].reads_text


@pytest.mark.parametrize(
    ("change", "unused"),
    [
        pytest.param({"safety_checker": None, "feature_extractor": None}, (), id="null"),
        pytest.param({"safety_checker": ["mine", "Checker"]}, ("safety_checker", "feature_extractor"), id="foreign"),
        pytest.param({"image_encoder": [None, None]}, ("safety_checker", "feature_extractor"), id="pair-of-nulls"),
        pytest.param(
            {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]},
            ("safety_checker", "feature_extractor", "image_encoder"),
            id="image-encoder",
        ),
    ],
)
def test_parts_that_are_not_run_are_told_and_not_looked_at(tmp_path, change, unused):
    folder = write(tmp_path, SD15_INDEX | change)
    assert unused_parts(read_json(folder / "model_index.json")) == unused
    assert not {"safety_checker", "feature_extractor", "image_encoder"} & read_model_index(folder).keys()


def test_a_folder_without_a_safety_checker(tmp_path):
    index = {key: value for key, value in SD15_INDEX.items() if key not in ("safety_checker", "feature_extractor")}
    assert unused_parts(read_json(write(tmp_path, index) / "model_index.json")) == ()


def test_sdxl_does_without_its_text_encoders(tmp_path):
    optional = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    classes = read_model_index(write(tmp_path, SDXL_INDEX | {key: [None, None] for key in optional}))
    assert not {*optional} & classes.keys()
    assert classes["unet"] == "UNet2DConditionModel"


@pytest.mark.parametrize(
    ("index", "change", "named"),
    [
        pytest.param(SD15_INDEX, {"text_encoder": [None, None]}, ["text_encoder", "pair"], id="no-text-encoder"),
        pytest.param(
            SD15_INDEX,
            {"text_encoder": ["diffusers", "CLIPTextModel"]},
            ["text_encoder", "'diffusers', not 'transformers'"],
            id="encoder-of-the-wrong-library",
        ),
        pytest.param(
            SD15_INDEX, {"unet": ["transformers", "UNet2DConditionModel"]}, ["unet", "not 'diffusers'"], id="wrong-unet"
        ),
        pytest.param(SD15_INDEX, {"tokenizer": ["mine", "CLIPTokenizer"]}, ["tokenizer", "never runs"], id="foreign"),
        pytest.param(SD15_INDEX, {"tokenizer": ["transformers", "T5Tokenizer"]}, ["T5Tokenizer"], id="tokenizer"),
        pytest.param(
            SD15_INDEX, {"text_encoder": ["transformers", "BertModel"]}, ["BertModel", "CLIPTextModel"], id="encoder"
        ),
        pytest.param(SD15_INDEX, {"unet": ["diffusers", "UNet2DModel"]}, ["UNet2DModel"], id="unet-without-text"),
        pytest.param(SD15_INDEX, {"text_encoder_2": None}, ["text_encoder_2"], id="a-part-of-sdxl"),
        pytest.param(
            SDXL_INDEX,
            {"text_encoder_2": ["transformers", "CLIPTextModel"]},
            ["text_encoder_2", "CLIPTextModelWithProjection"],
            id="no-projection",
        ),
    ],
)
def test_pipelines_of_prompts_that_are_refused(tmp_path, index, change, named):
    with pytest.raises(InputError) as error:
        read_model_index(write(tmp_path, index | change))
    assert_one_line(error, "model_index.json", *named)


def class_of_diffusers(name: str) -> type | None:
    return getattr(diffusers, name, None) or getattr(diffusers.experimental, name, None)


def class_of(part: Part, name: str) -> type | None:
    return class_of_diffusers(name) if part.library == "diffusers" else getattr(transformers, name, None)


def test_every_name_is_one_of_diffusers():
    parts = {part.name: part for pipeline in PIPELINES.values() for part in pipeline.parts}
    assert [name for name in (*PIPELINES, *SCHEDULERS.values()) if class_of_diffusers(name) is None] == []
    assert [name for part in parts.values() for name in part.classes if class_of(part, name) is None] == []


def test_a_pipeline_has_the_parts_and_options_of_diffusers():
    for name, pipeline in PIPELINES.items():
        components = set(inspect.signature(class_of_diffusers(name).__init__).parameters) - {"self"}
        assert components == {*(part.name for part in pipeline.parts), *pipeline.unused, *pipeline.options}, name


def test_our_models_are_those_of_the_registry():
    assert {name: kind.part for name, kind in classes.DENOISERS.items()} == {
        part.class_name: part for part in denoisers()
    }


def test_every_denoiser_is_found_by_each_of_its_names():
    assert all(denoiser_part(name) is part for part in denoisers() for name in part.classes)
    assert denoiser_part("AutoencoderKL") is denoiser_part(None) is denoiser_part(["UNet2DModel"]) is None


def test_a_controlnet_is_not_a_model_to_draw_with(tmp_path):
    """A pipeline's folder may hold a config.json beside its model_index.json, as old ones do."""
    (tmp_path / "config.json").write_text('{"_class_name": "ControlNetModel"}')
    for read in (lambda: read_model_index(tmp_path), lambda: read_denoiser_part(tmp_path / "config.json")):
        with pytest.raises(InputError) as error:
            read()
        assert_one_line(error, f"{tmp_path} is a ControlNet, which draws with a text model only", "--control")
    write(tmp_path, INDEX)
    assert read_model_index(tmp_path)["pipeline"] == "DDIMPipeline"
