"""Single files of ControlNets: weights and residuals equal diffusers', and other files are refused in one line."""

import itertools
import json

import diffusers
import pytest
import torch

from fastdiff import ControlNetModel, InputError, UNet2DConditionModel
from fastdiff.checkpoints.configs.controlnet import ControlNetConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.single_files import controlnets, kinds
from fastdiff.checkpoints.single_files.cards import CONFIGS
from fastdiff.checkpoints.single_files.controlnets import control_file, control_place
from fastdiff.checkpoints.single_files.keys import shapes_of, sources
from fastdiff.checkpoints.single_files.reading import checked_header
from fastdiff.checkpoints.single_files.tensors import check_shapes, stored_header
from fastdiff.checkpoints.weights import diffusers_shapes, diffusers_state
from fastdiff.execution.devices import on_meta
from tests.checkpoints.single_files import headers, ldm
from tests.support.text_pipelines import tiny_controlnet

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # diffusers' warnings
KINDS = ("sd1", "sd2", "sdxl")
WIDTHS = (4, 6, 8, 10)  # of the embedding; diffusers' own map knows four alone
HINT = "input_hint_block.0.weight"
FOLDERS = {kinds.SD1: ("sd1", "sd1-controlnet"), kinds.SD2: ("sd2-v", "sd2-controlnet")}
FOLDERS |= {kinds.SDXL: ("sdxl", "sdxl-controlnet")}


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """Return tiny ControlNets of diffusers by kind, each saved in a folder of its kind, and the folder of folders."""
    root, made = tmp_path_factory.mktemp("nets"), {}
    for kind in KINDS:
        made[kind] = tiny_controlnet(kind, conditioning_embedding_out_channels=WIDTHS)
        made[kind].save_pretrained(root / kind)
    return made, root


def prefixed(state):
    return ldm.prefixed("control_model.", state)


def written(path, state):
    """Write a file of either format, and return its path."""
    if path.suffix == ".safetensors":
        return ldm.save(state, path)
    torch.save({key: tensor.detach().clone() for key, tensor in state.items()}, path)
    return path


def assert_same(ours, theirs) -> None:
    ours, theirs = diffusers_state(ours), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


FORMS = {
    "prefix": prefixed,
    "bare": lambda state: state,
    "whole": lambda state: prefixed(state) | ldm.prefixed("model.diffusion_model.", {"more": torch.ones(2)}),
}


QUICK = {("sd1", "prefix", "net.pth"), ("sd2", "whole", "net.safetensors"), ("sdxl", "bare", "net.safetensors")}
EACH = [*itertools.product(KINDS, FORMS, ["net.safetensors", "net.pth"])]


@pytest.mark.parametrize(
    ("kind", "form", "name"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow, id="-".join(each)) for each in EACH],
)
def test_the_authors_names(kind, form, name, nets, tmp_path):
    made, root = nets
    path = written(tmp_path / name, FORMS[form](ldm.ldm_controlnet(made[kind])))
    ours = ControlNetModel.from_single_file(path, config=root / kind)
    assert_same(ours, made[kind])
    if kind != "sdxl":  # diffusers leaves out the layers of label_emb
        theirs = diffusers.ControlNetModel.from_single_file(str(path), config=str(root / kind), local_files_only=True)
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["net.safetensors", pytest.param("net.pth", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_names_of_diffusers(kind, name, nets, tmp_path):
    """Its config may be beside it."""
    made, root = nets
    path = written(tmp_path / name, made[kind].state_dict())
    ours = ControlNetModel.from_single_file(path, config=root / kind)
    theirs = diffusers.ControlNetModel.from_single_file(str(path), config=str(root / kind), local_files_only=True)
    assert_same(ours, theirs)
    with pytest.raises(InputError, match=r"is a ControlNet of an unknown size; give the folder of its config"):
        ControlNetModel.from_single_file(path)
    config = json.loads((root / kind / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"global_pool_conditions": True}))
    beside = ControlNetModel.from_single_file(path, dtype="float16")
    assert beside.config.global_pool_conditions and beside.dtype == torch.float16
    assert not ControlNetModel.from_single_file(path, global_pool_conditions=False).config.global_pool_conditions


@pytest.mark.parametrize("kind", KINDS)
def test_residuals(kind, nets, tmp_path):
    made, root = nets
    path = written(tmp_path / "net.pth", prefixed(ldm.ldm_controlnet(made[kind])))
    ours = ControlNetModel.from_single_file(path, config=root / kind)
    config, generator = ours.config, torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 5, config.cross_attention_dim, generator=generator)
    told = {
        name: torch.randn(2, *shape, generator=generator)
        for name, shape in config.prompt_shapes.items()
        if name in ("text_embeds", "time_ids")
    }
    given = {"controlnet_cond": torch.rand(2, 3, 64, 64, generator=generator), "return_dict": False}
    given |= {"added_cond_kwargs": told} if told else {}
    with torch.no_grad():
        (down, mid), (wanted, middle) = (net(x, 7, text, **given) for net in (ours, made[kind]))
    for residual, expected in zip((*down, mid), (*wanted, middle), strict=True):
        assert (residual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_checkpoint_of_training(nets, tmp_path):
    """Its tensors are below state_dict, among other entries."""
    made, root = nets
    state = prefixed(ldm.ldm_controlnet(made["sd1"])) | {"steps": 3}
    torch.save({"state_dict": state, "epoch": 4}, tmp_path / "last.ckpt")
    assert_same(ControlNetModel.from_single_file(tmp_path / "last.ckpt", config=root / "sd1"), made["sd1"])
    torch.save({"state_dict": state}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert_same(ControlNetModel.from_single_file(tmp_path / "old.ckpt", config=root / "sd1"), made["sd1"])


def full_size(base, **changes):
    """Return a full-size ControlNet of a base model, without memory."""
    config = json.loads((CONFIGS / FOLDERS[base][1] / "config.json").read_text()) | changes
    with on_meta():
        return ControlNetModel.from_config(config)


SIZES = {
    "sd1": (kinds.SD1, {}),
    "sd2": (kinds.SD2, {}),
    "sdxl": (kinds.SDXL, {}),
    "six channels": (kinds.SD1, {"conditioning_channels": 6}),
    "sdxl, shallow": (kinds.SDXL, {"transformer_layers_per_block": [1, 0, 1]}),
    "sdxl, no attention": (
        kinds.SDXL,
        {"down_block_types": ["DownBlock2D"] * 3, "mid_block_type": "UNetMidBlock2D", "cross_attention_dim": 2048},
    ),
    "sdxl, attention in the middle": (
        kinds.SDXL,
        {"down_block_types": ["DownBlock2D"] * 3, "transformer_layers_per_block": [1, 1, 3]},
    ),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_base_model_has_its_config(case, tmp_path):
    """Options that the shapes tell override it."""
    base, changes = SIZES[case]
    shapes = {key: tuple(shape) for key, shape in diffusers_shapes(full_size(base, **changes)).items()}
    path = headers.write(tmp_path / "net.safetensors", shapes)
    file = control_file(path, checked_header(path))
    assert (file.kind, file.base) == (f"ControlNet of {base}", base)
    place = control_place(file)
    config = json.loads((place.folder / "config.json").read_text()) | dict(place.options)
    with on_meta():
        model = ControlNetModel.from_config(config)
    check_shapes(shapes, diffusers_shapes(model), "net")
    unet = json.loads((CONFIGS / FOLDERS[base][0] / "unet" / "config.json").read_text())
    theirs = UNet2DConditionConfig.from_mapping(unet, "unet")
    own = model.config
    assert own.encoder.residual_shapes(64, 64) == theirs.residual_shapes(64, 64)
    assert own.encoder.added_shapes == theirs.added_shapes and own.cross_attention_dim == theirs.text_width


@pytest.mark.parametrize("width", [768, 1024, 2048])
def test_full_size_files_with_the_authors_names(width, tmp_path):
    base = kinds.BY_CONTEXT[width]
    with torch.device("meta"):
        theirs = diffusers.ControlNetModel.from_config(CONFIGS / FOLDERS[base][1] / "config.json")
    state = prefixed(ldm.ldm_controlnet(theirs))
    path = headers.write(tmp_path / "net.safetensors", {key: tuple(each.shape) for key, each in state.items()})
    place = control_place(control_file(path, checked_header(path)))
    own = ControlNetConfig.from_mapping(
        json.loads((place.folder / "config.json").read_text()) | dict(place.options), "net"
    )
    stored = {key: tensor.shape for key, tensor in stored_header(path).tensors.items()}
    found = shapes_of(sources(place.inside, stored, own), stored)
    assert found == {key: tuple(each.shape) for key, each in theirs.state_dict().items()}


NONE = {
    "a U-Net": (headers.unet(768), "is a U-Net of Stable Diffusion 1, not a ControlNet; give a ControlNet of"),
    "a checkpoint": (headers.SD1, "is a checkpoint of Stable Diffusion 1, not a ControlNet"),
    "a LoRA": (headers.LORA, "is a LoRA, not a ControlNet"),
    "a union": ({"task_embedding": (2, 2), "controlnet_cond_embedding.conv_in.weight": (2, 2)}, "UnionModel: .*mode"),
    "a Control-LoRA": ({"lora_controlnet": (), HINT: (2, 2)}, "is a Control-LoRA: fastdiff does not run it yet"),
    "a ControlLLLite": ({"lllite_unet_input_blocks_4_1.up.0.weight": (2, 2)}, "is a ControlLLLite: "),
    "differences": ({"difference": (), f"control_model.{HINT}": (2, 2)}, "stored as differences from its base"),
    "of Flux": ({"controlnet_x_embedder.weight": (2, 2)}, "is a ControlNet of another model family"),
    "of AnimateDiff": ({"down_blocks.0.motion_modules.0.x": (2,)}, "is a ControlNet of AnimateDiff"),
    "a part": ({"control_model.time_embed.0.weight": (2, 2)}, "it lacks the layers that read control pictures"),
    "unknown": ({"a": (2,), "b": (2,)}, "holds no ControlNet that fastdiff knows; its tensors are 'a', 'b'..."),
    "empty": ({}, "its tensors are none"),
    "odd shapes": ({HINT: (), "x.attn2.to_k.weight": ()}, "is a ControlNet of an unknown size"),
    "few tensors": (
        {HINT: (16, 3, 3, 3), "x.attn2.to_k.weight": (8, 768)},
        "its controlnet does not fit .*; for one of another size, give the folder of its config to ControlNetModel",
    ),
}


@pytest.mark.parametrize("case", NONE)
def test_what_is_no_controlnet_is_one_line(case, tmp_path):
    shapes, message = NONE[case]
    path = headers.write(tmp_path / "net.safetensors", shapes)
    with pytest.raises(InputError, match=message) as error:
        ControlNetModel.from_single_file(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 900


def test_the_tests_know_every_refused_kind():
    said = " ".join(message for _, message in NONE.values())
    assert all(name in said for name in ("Union", "Control-LoRA", "LLLite", "differences", "another", "AnimateDiff"))
    assert len(controlnets._REFUSED) == 6


BROKEN = {
    "missing": (lambda state: state.pop("zero_convs.0.0.bias"), "missing: controlnet_down_blocks.0.bias"),
    "unknown": (lambda state: state.update(more=torch.ones(2)), "unknown: more"),
    "control characters": (lambda state: state.update({"\n": torch.ones(2)}), r"unknown: '\\n'"),
    "shape": (lambda state: state.update({HINT: torch.ones(4, 3, 1, 1)}), "of another shape: controlnet_cond_embeddin"),
    "channels": (
        lambda state: state.update({HINT: torch.ones(4, 5, 3, 3)}),
        "conditioning_channels is 3, but 5 in the",
    ),
    "NaN": (lambda state: state.update({HINT: torch.full((4, 3, 3, 3), torch.nan)}), "NaN or infinity in controlnet_"),
}


@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_does_not_fit_is_one_line(case, name, nets, tmp_path):
    change, message = BROKEN[case]
    made, root = nets
    state = ldm.ldm_controlnet(made["sd1"])
    change(state)
    path = written(tmp_path / name, state)
    with pytest.raises((InputError, ValueError), match=message) as error:
        ControlNetModel.from_single_file(path, config=root / "sd1")
    assert "\n" not in str(error.value) and len(str(error.value)) < 900


def _saved(state):
    return lambda path: torch.save(state, path)


def _cut(path):
    torch.save({"a": torch.ones(999)}, path)
    path.write_bytes(path.read_bytes()[:999])


PICKLES = {
    "code": (lambda path: path.write_bytes(b"\x80\x02cos\nsystem\n."), "cannot be read without running its code"),
    "a list": (_saved([1, 2]), "holds no dictionary of tensors"),
    "no tensors": (_saved({"a": 1}), "its tensors are none"),
    "a U-Net": (_saved({"input_blocks.0.0.weight": torch.ones(8, 4, 3, 3)}), "is a U-Net of an unknown size"),
    "cut": (_cut, "damaged"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_bad_pickles_are_one_line(case, tmp_path):
    write, message = PICKLES[case]
    write(tmp_path / "net.pth")
    with pytest.raises(InputError, match=message) as error:
        ControlNetModel.from_single_file(tmp_path / "net.pth")
    assert "\n" not in str(error.value)


def test_arguments(nets, tmp_path):
    made, root = nets
    path = ldm.save(ldm.ldm_controlnet(made["sd1"]), tmp_path / "net.safetensors")
    with pytest.raises(InputError, match="holds no moving averages"):
        ControlNetModel.from_single_file(path, config=root / "sd1", extract_ema=True)
    with pytest.raises(InputError, match=r"net\.safetensors is a ControlNet: "):
        UNet2DConditionModel.from_single_file(path, config=root / "sd1")
    with pytest.raises(InputError, match="global_pool_conditions: 3"):
        ControlNetModel.from_single_file(path, config=root / "sd1", global_pool_conditions=3)
    bgr = ControlNetModel.from_single_file(path, config=root / "sd1", controlnet_conditioning_channel_order="bgr")
    assert bgr.config.controlnet_conditioning_channel_order == "bgr"
    eight = ControlNetModel.from_single_file(path, config=root / "sd1", precision="int8")
    assert eight.origin is not None
