"""Single files are recognised by their header alone. What fastdiff cannot load is refused by name, in one line."""

import math
import re
import time

import pytest

from fastdiff.checkpoints.single_files import kinds
from fastdiff.checkpoints.single_files.reading import is_single_file, read_single_file
from fastdiff.errors import InputError
from tests.checkpoints.single_files import headers
from tests.checkpoints.single_files.headers import REFINER, SD1, SD2, SDXL, VAE, for_inpainting, unet, write, write_raw


def read(tmp_path, shapes, **options):
    return read_single_file(write(tmp_path / "model.safetensors", shapes, **options))


def refusal(tmp_path, shapes, **options) -> str:
    """Return the only line with which the file is refused."""
    with pytest.raises(InputError) as error:
        read(tmp_path, shapes, **options).check()
    line = str(error.value)
    assert "\n" not in line and len(line) < 700
    return line


def bare(shapes):
    """Return shapes without the prefix of their part."""
    return {key.split(".", 1 if key.startswith("first") else 2)[-1]: shape for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "kind", "parts"),
    [
        (SD1, "checkpoint of Stable Diffusion 1", "unet vae text_encoder"),
        (SD2, "checkpoint of Stable Diffusion 2", "unet vae text_encoder"),
        (SDXL, "checkpoint of Stable Diffusion XL", "unet vae text_encoder text_encoder_2"),
        (REFINER, "checkpoint of Stable Diffusion XL's refiner", "unet vae text_encoder_2"),
        (for_inpainting(SD1), "checkpoint of Stable Diffusion 1 for inpainting", "unet vae text_encoder"),
        (for_inpainting(SD2), "checkpoint of Stable Diffusion 2 for inpainting", "unet vae text_encoder"),
        (
            for_inpainting(SDXL),
            "checkpoint of Stable Diffusion XL for inpainting",
            "unet vae text_encoder text_encoder_2",
        ),
        (unet(1280), "U-Net of Stable Diffusion XL's refiner", "unet"),
        (bare(unet(768, 9)), "U-Net of Stable Diffusion 1 for inpainting", "unet"),
        (unet(64, 9), "U-Net of an unknown size for inpainting", "unet"),
        (unet(768), "U-Net of Stable Diffusion 1", "unet"),
        (bare(unet(2048)), "U-Net of Stable Diffusion XL", "unet"),
        (unet(64), "U-Net of an unknown size", "unet"),
        (unet(768) | {headers.CONTEXT: ()}, "U-Net of an unknown size", "unet"),
        (VAE, "VAE of Stable Diffusion 1, Stable Diffusion 2 or XL", "vae"),
        (bare(VAE), "VAE of Stable Diffusion 1, Stable Diffusion 2 or XL", "vae"),
        ({"text_model.embeddings.token_embedding.weight": (8, 768)}, "text encoder CLIP ViT-L", "text_encoder"),
        (
            {"text_model.embeddings.token_embedding.weight": (8, 1280)},
            "text encoder OpenCLIP ViT-bigG",
            "text_encoder_2",
        ),
        (unet(768) | {headers.CLIP_1: (8, 768)}, "checkpoint of Stable Diffusion 1", "unet text_encoder"),
        (unet(768) | VAE, "U-Net and VAE of Stable Diffusion 1", "unet vae"),
    ],
)
def test_a_file_is_recognised_by_keys_and_shapes(tmp_path, shapes, kind, parts):
    found = read(tmp_path, shapes)
    found.check()
    assert (found.kind, " ".join(found.parts)) == (kind, parts)


STANDALONE = {
    "a LoRA": "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight",
    "a LyCORIS (LoHa, LoKr or OFT)": "lora_unet_down_blocks_0.hada_w1_a",
    "a textual inversion": "emb_params",
    "a ControlNet": "control_model.input_blocks.0.0.weight",
    "an IP-Adapter": "ip_adapter.1.to_k_ip.weight",
    "a T2I-Adapter": "adapter.body.0.resnets.0.block1.weight",
    "a motion module of AnimateDiff": "down_blocks.0.motion_modules.0.temporal_transformer.norm.weight",
    "Hunyuan Video": "txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.bias",
    "Chroma": "distilled_guidance_layer.in_proj.bias",
    "Flux 2": "single_stream_modulation.lin.weight",
    "HiDream": "double_stream_blocks.0.block.adaLN_modulation.1.bias",
    "Flux": "model.diffusion_model.double_blocks.0.img_attn.norm.key_norm.scale",
    "Stable Diffusion 3": "model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.bias",
    "AuraFlow": "double_layers.0.attn.w2q.weight",
    "Stable Cascade": "clip_txt_mapper.weight",
    "Sana": "blocks.0.cross_attn.q_linear.weight",
    "PixArt": "blocks.0.scale_shift_table",
    "Wan": "model.diffusion_model.head.modulation",
    "LTX Video": "patchify_proj.weight",
    "Lumina 2 or Z-Image": "cap_embedder.0.weight",
    "Mochi": "blocks.0.attn.qkv_x.weight",
    "Qwen-Image": "transformer_blocks.0.img_mod.1.weight",
    "Cosmos": "net.x_embedder.proj.1.weight",
    "a T5 text encoder": "encoder.block.0.layer.0.SelfAttention.q.weight",
    "an image encoder": "vision_model.embeddings.class_embedding",
    "a TAESD": "decoder.layers.3.conv.0.weight",
    "an upscaler such as ESRGAN": "RRDB_trunk.0.RDB1.conv1.weight",
    "a part of a folder in diffusers' layout": "down_blocks.0.resnets.0.conv1.weight",
}
INSIDE = {
    "a GLIGEN model": "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.fuser.linear.weight",
    "a checkpoint with scaled fp8 weights": "scaled_fp8",
    "a checkpoint with weights of bitsandbytes": "model.diffusion_model.input_blocks.0.0.weight.absmax",
    "a checkpoint of Stable Video Diffusion": "model.diffusion_model.input_blocks.1.0.time_stack.in_layers.0.weight",
    "a depth-to-image model": "depth_model.model.pretrained.cls_token",
    "an unCLIP model": "noise_augmentor.betas",
    "Playground 2.5": "edm_mean",
    "a ControlNet": "control_model.input_blocks.0.0.weight",
}


@pytest.mark.parametrize("name", STANDALONE)
def test_other_known_kinds_are_refused_by_name(tmp_path, name):
    assert f" is {name}: " in refusal(tmp_path, {STANDALONE[name]: (2, 2)})


@pytest.mark.parametrize("name", INSIDE)
def test_checkpoints_that_are_more_than_text_to_image_are_refused_by_name(tmp_path, name):
    assert f" is {name}: " in refusal(tmp_path, SD1 | {INSIDE[name]: (2, 2)})


def test_the_tests_know_every_kind():
    assert {each.name for each in kinds.REFUSED} == STANDALONE.keys() | INSIDE.keys()


@pytest.mark.parametrize(("channels", "name"), [*kinds.CHANNELS.items(), (3, "a U-Net of 3 input channels")])
def test_u_nets_of_other_tasks_are_refused_by_name(tmp_path, channels, name):
    assert f" is {name}: " in refusal(tmp_path, SD1 | unet(768, channels))


def test_a_refiner_for_inpainting_and_the_vae_of_another_family_are_refused_by_name(tmp_path):
    assert " is a refiner for inpainting: " in refusal(tmp_path, for_inpainting(REFINER))
    vae = VAE | {"first_stage_model.decoder.conv_in.weight": (8, 16, 3, 3)}
    assert " is a VAE of 16 latent channels" in refusal(tmp_path, vae)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (SD1 | SDXL, "two models: it has both"),
        (SD1 | {headers.OPEN_CLIP: (1024,)}, "two models: it has both"),
        (SD1 | {headers.CONTEXT: (8, 1024)}, "parts of two models: Stable Diffusion 1 and Stable Diffusion 2"),
        (SD1 | bare(unet(768)), "two models: it has both"),
        (SDXL | REFINER, "two models: it has both"),
        (SD1 | REFINER, "parts of two models: Stable Diffusion 1 and Stable Diffusion XL's refiner"),
        (for_inpainting(SDXL | {headers.CONTEXT: (8, 1280)}), "parts of two models: Stable Diffusion XL and"),
        (SD1 | {STANDALONE["a LoRA"]: (2, 2)}, "two models: also a LoRA"),
        (SD1 | {STANDALONE["Flux"]: (2, 2)}, "two models: also Flux"),
    ],
)
def test_two_models_in_one_file_are_refused(tmp_path, shapes, said):
    assert f" holds {said}" in refusal(tmp_path, shapes)


def test_an_unknown_file_is_refused_with_a_few_of_its_names(tmp_path):
    shapes = {f"../../etc/passwd.{i}.{'x' * 500}": (1,) for i in range(50)}
    assert "holds no model that fastdiff knows; its tensors are '../../etc/passwd.0" in refusal(tmp_path, shapes)
    assert "its tensors are none" in refusal(tmp_path, {})


def test_a_hundred_thousand_keys_are_refused_in_a_moment(tmp_path):
    shapes = {f"k{i}": (1,) for i in range(100_000)}
    start = time.process_time()  # of the processor: the machine may be busy
    assert "no model that fastdiff knows" in refusal(tmp_path, shapes)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "damaged or not a safetensors file"),
        (b"[]", "its header is not a JSON object"),
        (b'{"a": 1}', "a tensor without a shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "the size of 'a' does not fit its shape"),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', "the size of 'a' does not fit its shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', "the size of 'a' does not fit its shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": "x"}}', "the size of 'a' does not fit its shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "truncated: 'a' ends beyond the end"),
        (b'{"a": {"dtype": "F32", "shape": [2]' + b"[" * 5000, "damaged or not a safetensors file"),
    ],
)
def test_damaged_headers_are_refused(tmp_path, header, said):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        read_single_file(write_raw(tmp_path / "model.safetensors", header))
    assert said in str(error.value)


def test_a_header_of_a_hundred_megabytes_is_refused_without_being_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate(101 << 20)
    with pytest.raises(InputError, match="its header is 104857600 bytes long"):
        read_single_file(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.ckpt", b"PK\x03\x04" + bytes(40), "is a pickle, .* hidden in it; download the model as safetensors"),
        ("a.pt", b"\x80\x02}q\x00.", "is a pickle"),
        ("a.safetensors", b"\x80\x02}q\x00.", "is a pickle"),
        ("a.ckpt", b"other", "is a pickle"),
        ("a.gguf", b"GGUF" + bytes(40), "is a GGUF file"),
        ("a.safetensors", b"<!DOCTYPE html>", "is a web page, which the download saved"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "a pointer of Git LFS"),
        ("a.safetensors", b"1234", "it is truncated"),
    ],
)
def test_other_formats_are_refused_with_the_remedy(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_single_file(tmp_path / name)


def test_what_is_not_a_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_single_file(tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=f"^{re.escape(str(tmp_path))} is not a regular file; give [^;]+$"):
        read_single_file(tmp_path)
    assert is_single_file(tmp_path / "a.safetensors") and is_single_file("a.CKPT")
    assert not is_single_file(tmp_path) and not is_single_file("emoji-sd")
    with pytest.raises(InputError, match="cannot be read"):
        read_single_file("a\0.safetensors")


@pytest.mark.parametrize(
    ("extra", "metadata", "said"),
    [
        ({"v_pred": (0,)}, None, "v_prediction"),
        ({"v_pred": (0,)}, {"modelspec.prediction_type": "epsilon"}, "v_prediction"),
        ({}, {"modelspec.prediction_type": "v"}, "v_prediction"),
        ({}, {"modelspec.prediction_type": " V-Prediction "}, "v_prediction"),
        ({}, {"modelspec.prediction_type": "epsilon"}, "epsilon"),
        ({}, {"modelspec.prediction_type": "other"}, None),
        ({}, None, None),
    ],
)
def test_the_prediction_type_that_a_file_states(tmp_path, extra, metadata, said):
    assert read(tmp_path, SD1 | extra, metadata=metadata).stated_prediction() == said


def test_the_global_step_is_read_from_the_data(tmp_path):
    end = sum(map(math.prod, SD2.values()))
    entry = {"dtype": "I64", "shape": [], "data_offsets": [end, end + 8]}
    path = write(tmp_path / "a.safetensors", SD2 | {"global_step": (8,)}, global_step=entry)
    with open(path, "r+b") as file:
        file.seek(-8, 2)
        file.write((875_000).to_bytes(8, "little"))
    assert read_single_file(path).global_step() == 875_000
    assert read(tmp_path, SD2).global_step() is None


def test_a_header_whose_length_begins_like_a_pickle_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    padding = next(n for n in range(256) if (write(path, SD1, metadata={"a": "x" * n}).read_bytes()[0]) == 0x80)
    assert read_single_file(path).is_whole and padding is not None
