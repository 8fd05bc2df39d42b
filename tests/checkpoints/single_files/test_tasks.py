"""Files of inpainting models and of SDXL's refiner: diffusers' weights and pictures, and the real sizes."""

import json
from types import SimpleNamespace

import diffusers
import pytest
import torch
import transformers

import fastdiff
from fastdiff.checkpoints.single_files.cards import CONFIGS, file_card
from fastdiff.checkpoints.single_files.tensors import check_shapes, read_shapes
from fastdiff.errors import InputError
from fastdiff.execution.devices import on_meta
from fastdiff.models.clip import CLIPTextModel, CLIPTextModelWithProjection
from tests.checkpoints.single_files import headers, ldm
from tests.checkpoints.single_files.test_tensors import assert_same, ours_of
from tests.parity.image_starts.pictures import mask, picture
from tests.support.text_parity import assert_both_draw_the_same

KINDS = {
    "sd1-inpainting": "StableDiffusionInpaintPipeline",
    "sd2-inpainting": "StableDiffusionInpaintPipeline",
    "sdxl-inpainting": "StableDiffusionXLInpaintPipeline",
    "sdxl-refiner": "StableDiffusionXLImg2ImgPipeline",
}
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # diffusers' own


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_diffusers_weights_and_draws_diffusers_picture(kind, saved):
    _, pipe, folder, file = saved(kind)
    diffusers.utils.logging.disable_progress_bar()
    theirs = type(pipe).from_single_file(str(file), config=str(folder), local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    ours = ours_of(file, folder)
    assert ours.diffusers_class == KINDS[kind]
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if getattr(pipe, name, None) is not None:
            assert_same(getattr(ours, name), getattr(theirs, name))
            assert_same(getattr(ours, name), getattr(pipe, name))
    masked = {"mask_image": mask()} if kind.endswith("inpainting") else {}
    assert_both_draw_the_same(theirs, ours, image=picture(), **masked, strength=0.7, num_inference_steps=4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_configs_fit_a_file_of_the_real_size(kind, tmp_path):
    """diffusers' models of these configs, by LDM's names."""
    folder, models = CONFIGS / kind, {"text_encoder": None}
    index = json.loads((folder / "model_index.json").read_text())
    for name in ("unet", "vae"):
        config = json.loads((folder / name / "config.json").read_text())
        with torch.device("meta"):
            models[name] = getattr(diffusers, index[name][1]).from_config(config)
    for name in ldm.PREFIXES[kind.removesuffix("-inpainting")]:
        config = transformers.CLIPTextConfig.from_pretrained(folder / name)
        with torch.device("meta"):
            models[name] = getattr(transformers, index[name][1])(config)
    state = ldm.whole(kind, SimpleNamespace(**models))
    path = headers.write(tmp_path / "model.safetensors", {key: tuple(each.shape) for key, each in state.items()})
    card = file_card(path)
    assert card.folder == folder and card.pipeline.name == KINDS[kind]
    ours = {"unet": fastdiff.UNet2DConditionModel, "vae": fastdiff.AutoencoderKL}
    ours |= {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
    for name, inside in card.weights.items():
        with on_meta():
            model = ours[name].from_config(json.loads((folder / name / "config.json").read_text()))
        wanted = {key: each.shape for key, each in models[name].state_dict().items()}
        wanted = {key.removeprefix("text_model."): shape for key, shape in wanted.items()}
        check_shapes(read_shapes(inside, model.config), wanted, name)
    assert card.weights.keys() == {name for name, model in models.items() if model is not None}


COUNTS = {
    "sd1-inpainting": 859_535_364,
    "sd2-inpainting": 865_925_124,
    "sdxl-inpainting": 2_567_478_084,
    "sdxl-refiner": 2_259_526_660,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_configs_build_unets_of_the_published_size(kind):
    with on_meta():
        config = json.loads((CONFIGS / kind / "unet/config.json").read_text())
        unet = fastdiff.UNet2DConditionModel.from_config(config)
    assert sum(each.numel() for each in unet.parameters()) == COUNTS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_a_picture_is_one_line(kind, saved):
    _, _, folder, file = saved(kind)
    ours = ours_of(file, folder)
    name = "mask_image" if kind.endswith("inpainting") else "image"
    with pytest.raises(InputError, match=f"^{name}: [^\n]*$"):
        ours("a cat")
