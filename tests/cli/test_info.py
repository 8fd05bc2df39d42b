"""`fastdiff info`: the settings in a PNG, and what a file of weights is."""

import hashlib
import json

from PIL import Image

from fastdiff.requests import png
from tests.checkpoints.single_files import headers
from tests.checkpoints.single_files.ldm import save_pipeline


def test_info_prints_the_settings(fastdiff, tmp_path, refused):
    record = {
        "num_inference_steps": 2, "scheduler": "ddim", "guidance_scale": 2.0, "eta": 0.0, "model": "emoji64",
        "seed": 7, "label": "a\x1b[31m b", "width": 1, "height": 1, "versions": {"fastdiff": "0.1.0"},
    }  # fmt: skip
    (tmp_path / "x.png").write_bytes(png.encode(Image.new("L", (1, 1)), record))
    done = fastdiff("info", "x.png")
    assert done.returncode == 0 and "\x1b" not in done.stdout, "a file must not control the terminal"
    assert done.stdout.startswith("a\\x1b[31m b\nSteps: 2, Sampler: DDIM, CFG scale: 2.0, Seed: 7,")
    assert "\nlabel: a\\x1b[31m b\n" in done.stdout and "\nseed: 7\n" in done.stdout
    texts = json.loads(fastdiff("info", "--json", "x.png").stdout)
    assert texts["fastdiff"] == record | {"schema": 1, "numerics": png.NUMERICS}
    assert texts["parameters"].startswith("a\x1b[31m b\nSteps: 2")
    Image.new("L", (1, 1)).save(tmp_path / "bare.png")
    refused(fastdiff("info", "bare.png"), r"bare\.png holds no settings; give a PNG")


def test_info_says_what_a_file_of_weights_is(here, tmp_path, refused):
    path = headers.write(tmp_path / "sdxl.safetensors", headers.SDXL | {"v_pred": (0,)}, {"modelspec.title": "A\nB"})
    done = here("info", "sdxl.safetensors")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    digits = hashlib.sha256(path.read_bytes()).hexdigest()
    for line in (
        "kind: checkpoint of Stable Diffusion XL",
        "prediction: v_prediction (the file says so)",
        "parts: unet (U8), vae (U8), text_encoder (U8), text_encoder_2 (U8)",
        f"SHA-256: {digits}",
        f"AutoV2: {digits[:10].upper()}",
        "metadata modelspec.title: A B",
    ):
        assert line in lines
    facts = json.loads(here("info", "--json", "sdxl.safetensors").stdout)
    assert facts["metadata"] == {"modelspec.title": "A\nB"} and facts["bytes"] == path.stat().st_size


def test_info_names_a_kind_that_cannot_be_loaded_and_refuses_an_unknown_file(here, tmp_path, refused):
    headers.write(tmp_path / "controlnet.safetensors", {"control_model.x.weight": (2, 2)})
    done = here("info", "controlnet.safetensors")
    assert done.returncode == 0 and "kind: a ControlNet\n" in done.stdout
    assert "cannot be loaded: is a ControlNet: changes a model" in done.stdout
    headers.write(tmp_path / "x.safetensors", {"a": (2, 2)})
    refused(here("info", "x.safetensors"), "holds no model that fastdiff knows")
    (tmp_path / "x.ckpt").write_bytes(b"PK\x03\x04" + bytes(40))
    refused(here("info", "x.ckpt"), "is a pickle")


def test_info_says_what_a_controlnet_is(here, tmp_path):
    shapes = {"input_hint_block.0.weight": (16, 3, 3, 3), "x.attn2.to_k.weight": (8, 768)}
    headers.write(tmp_path / "net.safetensors", shapes)
    lines = here("info", "net.safetensors").stdout.splitlines()
    for line in ("kind: ControlNet of Stable Diffusion 1", "base model: Stable Diffusion 1", "parts: controlnet (U8)"):
        assert line in lines
    assert not [line for line in lines if line.startswith(("cannot be loaded", "prediction"))]


def test_info_says_what_a_lora_is(here, tmp_path):
    metadata = {"ss_tag_frequency": "{}"}
    path = headers.write(tmp_path / "lora.safetensors", headers.LORA, metadata)
    lines = here("info", path).stdout.splitlines()
    for line in (
        "kind: LoRA",
        "base model: Stable Diffusion XL",
        "format: kohya",
        "ranks: 4, 8",
        "layers: 1 of unet, 1 of text_encoder_2",
        "metadata ss_tag_frequency: {}",
    ):
        assert line in lines
    facts = json.loads(here("info", path, "--json").stdout)
    assert facts["ranks"] == [4, 8] and facts["layers"] == {"unet": 1, "text_encoder_2": 1}
    assert facts["SHA-256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "cannot be loaded" not in facts


def test_info_says_why_a_lora_cannot_be_loaded(here, tmp_path):
    half = headers.write(tmp_path / "half.safetensors", {"lora_unet_mid_block.lora_up.weight": (2, 2)})
    assert "cannot be loaded: it has only one of the two matrices of 'mid_block'" in here("info", half).stdout
    glora = headers.write(tmp_path / "glora.safetensors", {"lora_unet_mid_block.a1.weight": (2, 2)})
    assert "cannot be loaded: a GLoRA adapter; fastdiff reads" in here("info", glora).stdout


def test_info_reads_a_large_file_only_for_the_hash(here, tmp_path):
    path = headers.write(tmp_path / "large.safetensors", headers.SD1)
    with open(path, "r+b") as file:
        file.truncate(2**29)  # sparse
    assert "SHA-256: --hash computes it, which reads the whole file" in here("info", "large.safetensors").stdout


def test_a_single_file_is_sampled_and_repeated_from_its_picture(here, tmp_path, refused):
    _, _, folder, file = save_pipeline("sd1", tmp_path)
    flags = (
        "--config",
        str(folder),
        "--prompt",
        "a cat",
        "--steps",
        "1",
        "--cfg-scale",
        "1",
        "--device",
        "cpu",
        "--quiet",
    )
    done = here("sample", "--model", str(file), *flags, "-o", "a.png")
    assert done.returncode == 0, done.stderr
    text = here("info", "a.png").stdout
    assert f"Model hash: {hashlib.sha256(file.read_bytes()).hexdigest()[:10]}, Model: model," in text
    again = here("sample", "--from", "a.png", "--device", "cpu", "--quiet", "-o", "b.png")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    headers.write(tmp_path / "lora.safetensors", {"lora_unet_mid_block.lora_up.weight": (2, 2)})
    refused(here("sample", "--model", "lora.safetensors"), "is a LoRA: changes a model and is none itself")
