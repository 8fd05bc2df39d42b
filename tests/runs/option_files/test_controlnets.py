"""ControlNets in the command: their pictures, settings in PNGs, --from, and errors of one line."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fastdiff import InputError, Pipeline
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.requests import png
from fastdiff.runs.option_files.controlnets import find_controlnet
from tests.checkpoints.single_files import headers
from tests.support.text_pipelines import tiny_controlnet

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "a cat"
STEPS = ("--steps", "4")
ONE = ("--control", "net", "--control-image", "edges.png", *STEPS)
TWO = (*ONE, "--control", "other", "--control-image", "depth.png")


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """A folder of two tiny ControlNets."""
    folder = tmp_path_factory.mktemp("nets")
    for i, name in enumerate(("net", "other")):
        tiny_controlnet("sd1", seed=4 + i).save_pretrained(folder / name)
    return folder


@pytest.fixture
def here(nets, tmp_path, monkeypatch):
    """A current folder with two ControlNets, two control pictures and a picture to start from."""
    shutil.copytree(nets, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    levels = np.random.default_rng(1)
    for name, shape in (("edges", (20, 28, 3)), ("depth", (24, 24)), ("start", (16, 18, 3))):
        Image.fromarray(levels.integers(0, 256, shape, dtype=np.uint8)).save(f"{name}.png")
    return tmp_path


def drawn(folder, nets, **options):
    """Return the pixels that the library draws."""
    pipe = Pipeline.from_pretrained(folder, controlnet=[str(net) for net in nets], device="cpu")
    guidance = png.read_settings("first.png")["guidance_scale"]
    return pipe(PROMPT, num_inference_steps=4, guidance_scale=guidance, seed=5, **options).images[0].tobytes()


def test_a_control_picture_draws_the_librarys_picture_and_the_png_says_it(here, sample, text_folder, pixels):
    assert sample(*ONE, "--control-scale", "0.6", "--control-end", "0.75", "-o", "first.png") == 0
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert (record["width"], record["height"]) == (28, 20), "of the control picture"
    assert {name: value for name, value in record.items() if name.startswith("control")} == {
        "control": ["net"],
        "control_hashes": [file_hash(here / "net/diffusion_pytorch_model.safetensors")],
        "control_image": ["edges.png"],
        "control_image_hashes": [file_hash(here / "edges.png")],
        "control_scale": [0.6],
        "control_end": [0.75],
    }
    model = f"net [{record['control_hashes'][0][:8]}]"
    assert (
        f', ControlNet 0: "Module: none, Model: {model}, Weight: 0.6, Guidance Start: 0, Guidance End: 0.75, '
        'Control Mode: Balanced", '
    ) in text
    options = {"controlnet_conditioning_scale": 0.6, "control_guidance_end": 0.75}
    assert pixels("first.png") == drawn(text_folder("sd1"), ["net"], image=Image.open("edges.png"), **options)
    assert sample(*STEPS, "-o", "plain.png") == 0
    assert not [name for name in png.read_settings("plain.png") if name.startswith(("control", "guess"))]
    assert "ControlNet" not in png.read_text("plain.png")["parameters"]


def test_a_file_draws_what_its_folder_draws(here, sample, pixels, capsys):
    assert sample(*ONE, "-o", "first.png") == 0
    torch.save(load_file("net/diffusion_pytorch_model.safetensors"), "net/net.pth")
    for name in ("net/diffusion_pytorch_model.safetensors", "net/net.pth"):
        assert sample(*ONE[2:], "--control", name, "-o", "of-a-file.png", "--overwrite") == 0
        record = png.read_settings("of-a-file.png")
        assert (record["control"], record["control_hashes"]) == ([name], [file_hash(here / name)])
        assert pixels("of-a-file.png") == pixels("first.png")
    headers.write(here / "lora.safetensors", headers.LORA)
    headers.write(here / "net.safetensors", {"input_hint_block.0.weight": (2, 2)})
    capsys.readouterr()
    for name, message in (
        ("lora.safetensors", "is a LoRA, not a ControlNet"),
        ("net.safetensors", "is a ControlNet of an unknown size; give the folder of its config as config to Contr"),
    ):
        assert sample(*ONE[2:], "--control", name, "-o", "none.png") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err
        with pytest.raises(InputError, match=message):  # before a model is loaded
            find_controlnet(name)


def test_a_folder_and_a_file_of_a_hub_model(here, sample, pixels, monkeypatch, capsys):
    """NAME:PLACE. Only what is named is downloaded, and a file's config."""
    asked, remote = [], here / "remote"

    def snapshot_download(repo_id, allow_patterns, **options):
        asked.append((repo_id, allow_patterns))
        return str(remote)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    shutil.copytree("net", remote / "of/edges")
    (remote / "files").mkdir()
    shutil.copy("net/diffusion_pytorch_model.safetensors", remote / "files/edges.safetensors")
    shutil.copy("net/config.json", remote / "files")
    assert sample(*ONE, "-o", "first.png") == 0
    for name in [
        f"{root}:{place}" for root in ("org/nets", "remote") for place in ("of/edges", "files/edges.safetensors")
    ]:
        assert sample(*ONE[2:], "--control", name, "-o", "placed.png", "--overwrite") == 0
        record = png.read_settings("placed.png")
        assert (record["control"], record["control_hashes"]) == (
            [name],
            png.read_settings("first.png")["control_hashes"],
        )
        assert pixels("placed.png") == pixels("first.png")
        assert sample("--from", "placed.png", *STEPS, "-o", "again.png", "--overwrite", own=()) == 0
    assert {repo for repo, _ in asked} == {"org/nets"}
    assert ("org/nets", ["files/edges.safetensors", "files/config.json"]) in asked
    capsys.readouterr()
    for name, message in (
        ("org/nets:none.safetensors", "control 'org/nets:none.safetensors' does not exist; give a file or a folder"),
        ("org/nets:none", "control: hub model org/nets has no "),
        ("remote:none", "control 'remote:none' does not exist; give a folder, a hub id org/name"),
        ("nowhere:edges.safetensors", "control 'nowhere:edges.safetensors' does not exist; give a file"),
        ("org/nets:", "control: "),
    ):
        assert sample(*ONE[2:], "--control", name, "-o", "none.png") == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err, err


def test_several_and_a_picture_to_start_from(here, sample, text_folder, pixels):
    flags = ("--init-image", "start.png", "--strength", "0.75", "--guess-mode", "--control-start", "0.25")
    assert sample(*TWO, *flags, "-o", "first.png") == 0
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert (record["width"], record["height"]) == (18, 16), "of the picture to start from"
    assert (record["control"], record["control_image"]) == (["net", "other"], ["edges.png", "depth.png"])
    assert (record["control_scale"], record["control_start"], record["guess_mode"]) == ([0.8] * 2, [0.25] * 2, True)
    assert ', ControlNet 1: "Module: none, Model: other [' in text and "ControlNet is more important" in text
    pictures = [Image.open("edges.png"), Image.open("depth.png")]
    options = {"image": Image.open("start.png"), "strength": 0.75, "guess_mode": True, "control_guidance_start": 0.25}
    assert pixels("first.png") == drawn(text_folder("sd1"), ["net", "other"], control_image=pictures, **options)


def test_from_repeats_it_with_files_that_have_moved(here, sample, capsys, pixels):
    assert sample(*TWO, "--control-scale", "0.5", "--control-scale", "0.9", "--grid", "-o", "first.png") == 0
    assert png.read_settings("first.png")["control_scale"] == [0.5, 0.9]
    for source in ("first.png", "grid.png"):
        assert sample("--from", source, *STEPS, "-o", f"of-{source}", own=()) == 0
        assert pixels(f"of-{source}") == pixels("first.png")
    (here / "mine").mkdir()
    shutil.move("depth.png", "mine/renamed.png")
    assert sample("--from", "first.png", *STEPS, "--input-dir", "mine", "-o", "moved.png", own=()) == 0
    assert png.read_settings("moved.png")["control_image"] == ["edges.png", "mine/renamed.png"]
    assert pixels("moved.png") == pixels("first.png")
    capsys.readouterr()
    assert sample("--from", "first.png", *STEPS, "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "first.png was drawn with the control picture 'depth.png', hash " in err
    assert "give the file with --control-image, or its folder with --input-dir" in err
    again = ("--from", "first.png", *STEPS, "--control-image", "start.png", "--control-image", "edges.png")
    assert sample(*again, "-o", "others.png", own=()) == 0
    record = png.read_settings("others.png")
    assert (record["width"], record["height"], record["control_scale"]) == (18, 16, [0.5, 0.9])


def test_embedded_control_pictures_need_no_files(here, sample):
    files = {name: (here / name).read_bytes() for name in ("edges.png", "depth.png")}
    assert sample(*TWO, "--embed-inputs", "-o", "first.png") == 0
    assert png.read_input("first.png", "control-image") == files["edges.png"]
    assert png.read_input("first.png", "control-image-2") == files["depth.png"]
    for name in files:
        (here / name).unlink()
    assert sample("--from", "first.png", *STEPS, "--embed-inputs", "-o", "again.png", own=()) == 0
    is_same = (here / "again.png").read_bytes() == (here / "first.png").read_bytes()
    assert is_same


def test_from_a_label_or_another_model_drops_them(here, sample, text_folder):
    assert sample(*ONE, "--control-end", "0.5", "--guess-mode", "-o", "first.png") == 0
    other = shutil.copytree(text_folder("sd1"), here / "model")
    assert sample("--from", "first.png", *STEPS, "--model", str(other), "-o", "second.png", own=()) == 0
    assert not [name for name in png.read_settings("second.png") if name.startswith(("control", "guess"))]


def test_resume_keeps_the_pictures_and_refuses_others(here, sample, capsys):
    assert sample(*ONE, "-o", "out/{seed}.png") == 0
    before = (here / "out/5.png").stat().st_mtime_ns
    resume = ("--resume", "-o", "out/{seed}.png")
    assert sample(*ONE, "--num-images", "2", *resume) == 0
    assert (here / "out/5.png").stat().st_mtime_ns == before and (here / "out/6.png").exists()
    capsys.readouterr()
    for flags, message in (
        (("--control-scale", "0.5"), "control_scale [1.0], not [0.5]"),
        (("--guess-mode",), "guess_mode null, not true"),
    ):
        assert sample(*ONE, *flags, *resume) == 2
        assert f"out/5.png was drawn with {message}" in capsys.readouterr().err
    shutil.copy("start.png", "edges.png")
    assert sample(*ONE, "--height", "20", "--width", "28", *resume) == 2
    assert "out/5.png was drawn with control_image_hashes " in capsys.readouterr().err


def test_other_weights_are_told_and_drawn_again(here, sample, capsys):
    assert sample(*ONE, "-o", "first.png") == 0
    weights = here / "net/diffusion_pytorch_model.safetensors"
    save_file({name: 0.5 * value for name, value in load_file(weights).items()}, weights)
    capsys.readouterr()
    assert sample("--from", "first.png", *STEPS, "-o", "second.png", own=()) == 0
    assert "net has the ControlNet hash " in capsys.readouterr().err
    assert sample(*ONE, "-o", "first.png") == 0
    assert (here / "first-2.png").exists()


def test_explain_reports_them(here, sample, capsys):
    assert sample(*ONE, "--explain") == 0
    assert "conv2d" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--control", "net"), "control-image: 0 given for 1 --control; give one for each, in the same order"),
        ((*ONE, "--control", "other"), "control-image: 1 given for 2 --control; give one for each, in the same order"),
        (
            ("--control-image", "edges.png"),
            "control-image 'edges.png': a ControlNet reads it; give --control, or",
        ),
        (("--control-scale", "1"), "control-scale: it is for a ControlNet; give --control, or leave it out"),
        (("--guess-mode",), "guess-mode: it is for a ControlNet; give --control, or leave it out"),
        ((*TWO, *("--control-end", "1") * 3), "control-end: 3 given for 2 --control; give one, or one each"),
        ((*ONE, "--control-scale", "nan"), "control-scale: (nan,) is not a finite number for each ControlNet"),
        ((*ONE, "--control-start", "2"), "control-start: (2.0,) is not a number from 0 to 1 for each"),
        (
            (*ONE, "--control-start", "0.5", "--control-end", "0.5"),
            "control-end 0.5: it is not after --control-start",
        ),
        (
            (*ONE[2:], "--control", "none"),
            "control 'none' does not exist; give a folder, a hub id org/name, or emoji",
        ),
        ((*ONE[2:], "--control", "emoji-edge"), "control 'emoji-edge' does not exist; did you mean emoji-edges?"),
        ((*ONE[2:], "--control", "emoji-edges"), "controlnet: its cross_attention_dim is 160, and the U-Net needs"),
        (
            (*ONE[2:], "--control", "none.safetensors"),
            "control 'none.safetensors' does not exist; give a file or a fo",
        ),
        ((*ONE[2:], "--control", "union"), "control 'union' is a ControlNetUnionModel: "),
        ((*ONE[2:], "--control", "unet"), "control 'unet' is a UNet2DConditionModel; give a ControlNetModel"),
        ((*ONE[2:], "--control", "empty"), "control: "),
        ((*ONE[:3], "none.png", *STEPS), "control-image 'none.png' does not exist; give a picture"),
        ((*ONE[:3], "net/config.json", *STEPS), "control-image 'net/config.json' is not a picture that PIL reads"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(here, sample, capsys, flags, message):
    for name, kind in (("union", "ControlNetUnionModel"), ("unet", "UNet2DConditionModel")):
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps({"_class_name": kind}))
    (here / "empty").mkdir()
    assert sample(*flags, "-o", "first.png") == 2
    err = capsys.readouterr().err
    line = err.splitlines()[-1]
    assert line.startswith("fastdiff: error: ") and message in line
    assert not (here / "first.png").exists()


def test_models_of_labels_have_none(here, sample, capsys):
    assert sample(*ONE, "--model", "emoji64", "-o", "first.png", own=()) == 2
    assert "control: emoji64 has no text encoder; leave it out, or give a --label" in capsys.readouterr().err
