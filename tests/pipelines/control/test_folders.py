"""ControlNets as parts of a pipeline: folders, live ones, and saving."""

import json
import shutil

import diffusers
import pytest
import torch

from fastdiff import ControlNetModel, InputError, Pipeline
from fastdiff.models.live import model_like
from tests.parity.control.pipelines import KINDS, controlled
from tests.parity.image_starts.pictures import mask, picture
from tests.parity.surface import walk
from tests.support.pairwise import product
from tests.support.text_pipelines import tiny_controlnet

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]
STEPS = {"num_inference_steps": 2, "output_type": "pt"}
CONTROL = picture(5)


def index_of(folder):
    return json.loads((folder / "model_index.json").read_text())


@pytest.mark.parametrize(("start", "kind"), product(list(KINDS), ["sd1", "sdxl"], together=1))
def test_a_folder_of_diffusers(start, kind, text_pipes, tmp_path):
    """It is loaded, saved and read back by diffusers, with its class."""
    theirs, ours = controlled(start, kind, text_pipes(kind))
    theirs.save_pretrained(tmp_path / "theirs")
    pipe = Pipeline.from_pretrained(tmp_path / "theirs", device="cpu")
    assert pipe.diffusers_class == type(theirs).__name__ and isinstance(pipe.controlnet, ControlNetModel)
    options = {"control_image": CONTROL} | ({} if start == "text" else {"image": picture()})
    options |= {"mask_image": mask()} if start == "mask" else {}
    options |= {"guidance_scale": 4.0, **STEPS}
    expected = pipe("a cat", **options).images
    assert torch.equal(ours("a cat", **options).images, expected)
    pipe.save_pretrained(tmp_path / "ours")
    found, wanted = index_of(tmp_path / "ours"), index_of(tmp_path / "theirs")
    assert {key: found.get(key) for key in wanted} == wanted
    assert type(type(theirs).from_pretrained(tmp_path / "ours")) is type(theirs)


def test_a_folder_of_two(text_pipes, tmp_path):
    theirs, ours = controlled("text", "sd1", text_pipes("sd1"), count=2)
    theirs.save_pretrained(tmp_path / "theirs")
    pipe = Pipeline.from_pretrained(tmp_path / "theirs", device="cpu")
    pictures = [CONTROL, picture(6)]
    expected = ours("a cat", image=pictures, **STEPS).images
    assert torch.equal(pipe("a cat", image=pictures, **STEPS).images, expected)
    pipe.save_pretrained(tmp_path / "ours")
    assert index_of(tmp_path / "ours")["controlnet"] == ["diffusers", "MultiControlNetModel"]
    back = type(theirs).from_pretrained(tmp_path / "ours")
    assert len(back.controlnet.nets) == 2
    again = Pipeline.from_pretrained(tmp_path / "ours", device="cpu")
    assert torch.equal(again("a cat", image=pictures, **STEPS).images, expected)


def test_every_form_of_a_controlnet(text_folder, tmp_path):
    net = tiny_controlnet("sd1")
    net.save_pretrained(tmp_path)
    ours = ControlNetModel.from_pretrained(tmp_path)
    folder = text_folder("sd1")

    def draw(controlnet):
        pipe = Pipeline.from_pretrained(folder, controlnet=controlnet, device="cpu")
        assert pipe.diffusers_class == "StableDiffusionControlNetPipeline"
        return pipe("a cat", image=CONTROL, **STEPS).images

    expected = draw(net)
    file = tmp_path / "diffusion_pytorch_model.safetensors"  # with its config beside it
    for form in (ours, [ours], tmp_path, str(tmp_path), [tmp_path], file, [str(file)]):
        assert torch.equal(draw(form), expected)
    several = diffusers.MultiControlNetModel([net, tiny_controlnet("sd1", 5)])
    pipe = Pipeline.from_pretrained(folder, controlnet=several, device="cpu")
    assert isinstance(pipe.controlnet, tuple) and len(pipe.components["controlnet"]) == 2
    mixed = Pipeline.from_pretrained(folder, controlnet=[file, ours], device="cpu").controlnet
    assert all(isinstance(each, ControlNetModel) for each in mixed) and mixed[1] is ours


def test_a_controlnet_comes_and_goes(text_pipes):
    _, plain = text_pipes("sd1")
    expected = plain("a cat", **STEPS).images
    pipe = Pipeline.from_pipe(plain, controlnet=tiny_controlnet("sd1"))
    assert pipe.diffusers_class == "StableDiffusionControlNetPipeline" and pipe.controlnet in pipe.models
    assert plain.controlnet is None and "controlnet" not in plain.components
    assert pipe.unet is plain.unet
    back = pipe.with_parts(controlnet=None)
    assert back.diffusers_class == "StableDiffusionPipeline"
    assert torch.equal(back("a cat", **STEPS).images, expected)
    pipe.controlnet = [tiny_controlnet("sd1"), tiny_controlnet("sd1", 5)]
    assert len(pipe.controlnet) == 2


def test_guidance_by_default(text_pipes, text_folder, tmp_path):
    """A pipeline has the default of diffusers' class with a ControlNet: 5 for SDXL's inpainting, not 7.5."""
    theirs, _ = text_pipes("sdxl")
    pipe = diffusers.StableDiffusionXLInpaintPipeline(**theirs.components, add_watermarker=False)
    pipe.save_pretrained(tmp_path)
    assert Pipeline.from_pretrained(tmp_path, device="cpu").info.guidance_scale == 7.5
    controlled = Pipeline.from_pretrained(tmp_path, controlnet=tiny_controlnet("sdxl"), device="cpu")
    assert controlled.info.guidance_scale == 5.0
    assert controlled.diffusers_class == "StableDiffusionXLControlNetInpaintPipeline"


@pytest.mark.parametrize(("start", "kind"), [("text", "sd1"), ("image", "sdxl"), ("mask", "sd1")])
def test_every_default_of_a_call_can_be_said(start, kind, text_pipes):
    theirs, ours = controlled(start, kind, text_pipes(kind))
    pipe = Pipeline.from_pipe(ours)
    pipe._card = None
    found = walk.parameters(type(theirs).__call__).values()
    given = {each.name: each.default for each in found if each.kind not in walk.VARIABLE}
    given |= {"prompt": "a cat", "image": CONTROL, "num_inference_steps": 2}
    given |= {"control_image": CONTROL} if start != "text" else {}
    given |= {"mask_image": mask()} if start == "mask" else {}
    assert len(pipe(**given).images) == 1


BAD = {
    "another-class": (lambda config: config | {"_class_name": "ControlNetUnionModel"}, "UnionModel: .*control_mode"),
    "option": (lambda config: config | {"down_block_types": ["AttnDownBlock2D"] * 2}, "down_block_types: block type"),
    "of-other-weights": (lambda config: config | {"layers_per_block": 2}, "layers_per_block"),
    "embedding-of-other-weights": (
        lambda config: config | {"conditioning_embedding_out_channels": [6, 12]},
        r"conditioning_embedding_out_channels\[1\] is 12, but 10 in the weights",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_line(case, text_pipes, text_folder, tmp_path):
    change, message = BAD[case]
    tiny_controlnet("sd1").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=message) as error:
        Pipeline.from_pretrained(text_folder("sd1"), controlnet=tmp_path, device="cpu")
    assert "\n" not in str(error.value)


def test_a_pipelines_folder_without_its_controlnet(text_pipes, tmp_path):
    theirs, _ = controlled("text", "sd1", text_pipes("sd1"))
    theirs.save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "controlnet")
    with pytest.raises(InputError, match="controlnet"):
        Pipeline.from_pretrained(tmp_path, device="cpu")
    net = model_like(tiny_controlnet("sd1"), "controlnet")
    pipe = Pipeline.from_pretrained(tmp_path, controlnet=net, device="cpu")
    assert pipe.controlnet is net


def test_a_pipeline_of_labels_has_none():
    with pytest.raises(InputError, match="controlnet: "):
        Pipeline.from_pretrained("emoji64", controlnet=tiny_controlnet("sd1"), device="cpu")


def test_a_controlnet_for_the_bundled_model(tmp_path):
    """emoji-sd's VAE shrinks by 4, so its ControlNet's embedding has three widths."""
    pipe = Pipeline.from_pretrained("emoji-sd", device="cpu")
    net = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(4, 8, 16))
    before = pipe("a cat", height=32, width=32, **STEPS).images
    ours = pipe.with_parts(controlnet=net)
    assert torch.equal(ours("a cat", image=CONTROL, height=32, width=32, **STEPS).images, before)  # zeros
    with pytest.raises(InputError, match="it shrinks control pictures by 8, and the VAE by 4"):
        pipe.with_parts(controlnet=ControlNetModel.from_unet(pipe.unet))
