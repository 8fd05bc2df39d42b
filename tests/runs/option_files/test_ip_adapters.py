"""IP-Adapters in the command: their pictures, settings in PNGs, --from, and errors of one line."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff import InputError, Pipeline, cli
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.pipelines import load_pipeline
from fastdiff.requests import png
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from tests.parity.image_prompts.adapters import image_encoder, ip_adapter, picture, save_ip_adapter
from tests.support.text_pipelines import tiny_unet
from tests.support.tiny import UNET, save_unet

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "a cat"
ONE = ("--ip-adapter", "models/plain.safetensors", "--ip-adapter-image", "style.png")
TWO = (*ONE, "--ip-adapter", "models/plus.bin", "--ip-adapter-image", "face.png")
OF_IP_ADAPTERS = ("ip_adapter", "image_encoder")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of a plain and a plus IP-Adapter, and the image encoder beside them."""
    folder, unet = tmp_path_factory.mktemp("ip") / "models", tiny_unet("sd1")
    save_ip_adapter(folder, ip_adapter(unet, "plain"), "plain.safetensors")
    save_ip_adapter(folder, ip_adapter(unet, "plus", 1), "plus.bin")
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    """A current folder with two IP-Adapters and three pictures."""
    shutil.copytree(models, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTDIFF_MODELS", raising=False)
    for i, name in enumerate(("style", "face", "other")):
        picture(i, 41 + i, 33).save(f"{name}.png")
    return tmp_path


def drawn(folder, weight_name, scale, **options):
    """Return the pixels that the library draws."""
    pipe = Pipeline.from_pretrained(folder, device="cpu")
    pipe.load_ip_adapter("models", weight_name=weight_name)
    pipe.set_ip_adapter_scale(scale)
    guidance = png.read_settings("first.png")["guidance_scale"]
    return pipe(PROMPT, num_inference_steps=1, guidance_scale=guidance, seed=5, **options).images[0].tobytes()


def test_the_command_draws_the_librarys_picture_and_the_png_says_it(here, sample, text_folder, pixels):
    assert sample(*ONE, "--ip-adapter-scale", "0.6", "-o", "first.png") == 0
    record, text = png.read_settings("first.png"), png.read_text("first.png")["parameters"]
    assert {name: value for name, value in record.items() if name.startswith(OF_IP_ADAPTERS)} == {
        "ip_adapter": ["models/plain.safetensors"],
        "ip_adapter_hashes": [file_hash(here / "models/plain.safetensors")],
        "ip_adapter_image": ["style.png"],
        "ip_adapter_image_hashes": [file_hash(here / "style.png")],
        "ip_adapter_scale": [0.6],
        "image_encoder_hash": file_hash(here / "models/image_encoder/model.safetensors"),
    }
    model = f"plain [{record['ip_adapter_hashes'][0][:8]}]"
    assert f', ControlNet 0: "Module: ip-adapter-auto, Model: {model}, Weight: 0.6", ' in text
    assert pixels("first.png") == drawn(text_folder("sd1"), "plain.safetensors", 0.6, ip_adapter_image=picture(0))
    assert sample("-o", "plain.png") == 0
    assert pixels("plain.png") != pixels("first.png")
    assert not [name for name in png.read_settings("plain.png") if name.startswith(OF_IP_ADAPTERS)]


def test_several_of_them_with_a_picture_to_start_from(here, sample, text_folder, pixels):
    scales = ("--ip-adapter-scale", "0.7", "--ip-adapter-scale", "0.3")
    assert sample(*TWO, *scales, "--init-image", "other.png", "--strength", "1", "-o", "first.png") == 0
    images, start = [picture(0), picture(1, 42)], picture(2, 43)
    options = {"ip_adapter_image": images, "image": start, "strength": 1.0}
    names = ["plain.safetensors", "plus.bin"]
    assert pixels("first.png") == drawn(text_folder("sd1"), names, [0.7, 0.3], **options)
    assert png.read_settings("first.png")["ip_adapter_scale"] == [0.7, 0.3]


def test_a_single_one_reads_several_pictures(here, sample, text_folder, pixels):
    assert sample(*ONE, "--ip-adapter-image", "face.png", "-o", "first.png") == 0
    images = [[picture(0), picture(1, 42)]]
    assert pixels("first.png") == drawn(text_folder("sd1"), "plain.safetensors", 1.0, ip_adapter_image=images)
    assert sample("--from", "first.png", "-o", "again.png", own=()) == 0
    assert pixels("again.png") == pixels("first.png")


def test_from_repeats_it_with_files_that_have_moved(here, sample, capsys, pixels):
    assert sample(*TWO, "--ip-adapter-scale", "0.5", "--grid", "-o", "first.png") == 0
    for source in ("first.png", "grid.png"):
        assert sample("--from", source, "-o", f"of-{source}", own=()) == 0
        assert pixels(f"of-{source}") == pixels("first.png")
    (here / "mine").mkdir()
    shutil.move("face.png", "mine/renamed.png")
    assert sample("--from", "first.png", "--input-dir", "mine", "-o", "moved.png", own=()) == 0
    assert png.read_settings("moved.png")["ip_adapter_image"] == ["style.png", "mine/renamed.png"]
    assert pixels("moved.png") == pixels("first.png")
    capsys.readouterr()
    assert sample("--from", "first.png", "-o", "none.png", own=()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "first.png was drawn with the image prompt 'face.png', hash " in err
    assert "give the file with --ip-adapter-image, or its folder with --input-dir" in err
    given = ("--ip-adapter-image", "other.png", "--ip-adapter-image", "style.png")
    assert sample("--from", "first.png", *given, "-o", "others.png", own=()) == 0
    assert png.read_settings("others.png")["ip_adapter_scale"] == [0.5, 0.5]
    (here / "models/plus.bin").unlink()
    capsys.readouterr()
    assert sample("--from", "first.png", *given, "-o", "none.png", own=()) == 2
    assert "ip-adapter 'models/plus.bin' does not exist; give a file, or" in capsys.readouterr().err


def test_embedded_pictures_need_no_files(here, sample):
    files = {name: (here / name).read_bytes() for name in ("style.png", "face.png")}
    assert sample(*TWO, "--embed-inputs", "-o", "first.png") == 0
    assert png.read_input("first.png", "ip-adapter-image") == files["style.png"]
    assert png.read_input("first.png", "ip-adapter-image-2") == files["face.png"]
    for name in files:
        (here / name).unlink()
    assert sample("--from", "first.png", "--embed-inputs", "-o", "again.png", own=()) == 0
    is_same = (here / "again.png").read_bytes() == (here / "first.png").read_bytes()
    assert is_same


def test_from_another_model_drops_them(here, sample, text_folder):
    assert sample(*ONE, "--image-encoder", "models", "-o", "first.png") == 0
    other = shutil.copytree(text_folder("sd1"), here / "model")
    assert sample("--from", "first.png", "--model", str(other), "-o", "second.png", own=()) == 0
    assert not [name for name in png.read_settings("second.png") if name.startswith(OF_IP_ADAPTERS)]


def test_an_image_encoder_elsewhere(here, sample, pixels):
    assert sample(*ONE, "-o", "first.png") == 0
    shutil.move("models/image_encoder", "clip")
    assert sample(*ONE, "--image-encoder", "clip", "-o", "second.png") == 0
    assert pixels("second.png") == pixels("first.png")
    assert png.read_settings("second.png")["image_encoder"] == "clip"
    assert sample("--from", "second.png", "-o", "third.png", own=()) == 0
    assert pixels("third.png") == pixels("first.png")
    shutil.move("clip", "models/image_encoder")
    assert sample("--from", "second.png", "--ip-adapter", "models/plus.bin", "-o", "fourth.png", own=()) == 0
    assert "image_encoder" not in png.read_settings("fourth.png"), "it belongs to the other IP-Adapter"


def test_files_inside_a_folder_or_a_hub_model(here, sample, pixels, monkeypatch):
    assert sample(*ONE, "-o", "first.png") == 0
    shutil.move("models", "cached")
    asked = []

    def snapshot(repo_id, patterns, **options):
        asked.append((repo_id, patterns))
        return here / "cached"

    (here / "cached/models").mkdir()
    for name in ("plain.safetensors", "image_encoder"):
        shutil.move(here / "cached" / name, here / "cached/models")
    monkeypatch.setattr(hub, "_snapshot", snapshot)
    flags = ("--ip-adapter", "org/IP-Adapter:models/plain.safetensors", *ONE[2:])
    assert sample(*flags, "-o", "second.png") == 0
    assert asked[0] == ("org/IP-Adapter", ["models/plain.safetensors"])
    assert ("org/IP-Adapter", ["models/image_encoder/config.json"]) in asked
    assert png.read_settings("second.png")["ip_adapter"] == ["org/IP-Adapter:models/plain.safetensors"]
    assert sample(*flags, "--image-encoder", "org/IP-Adapter:models/image_encoder", "-o", "third.png") == 0
    assert sample("--ip-adapter", "cached:models/plain.safetensors", *ONE[2:], "-o", "fourth.png") == 0
    assert {pixels(f"{name}.png") for name in ("first", "second", "third", "fourth")} == {pixels("first.png")}


def test_resume_keeps_the_pictures_and_refuses_others(here, sample, capsys):
    assert sample(*ONE, "-o", "out/{seed}.png") == 0
    before = (here / "out/5.png").stat().st_mtime_ns
    resume = ("--resume", "-o", "out/{seed}.png")
    assert sample(*ONE, "--num-images", "2", *resume) == 0
    assert (here / "out/5.png").stat().st_mtime_ns == before and (here / "out/6.png").exists()
    capsys.readouterr()
    assert sample(*ONE, "--ip-adapter-scale", "0.5", *resume) == 2
    assert "out/5.png was drawn with ip_adapter_scale [1.0], not [0.5]" in capsys.readouterr().err
    shutil.copy("other.png", "style.png")
    assert sample(*ONE, *resume) == 2
    assert "out/5.png was drawn with ip_adapter_image_hashes " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plain.safetensors", "image_encoder/model.safetensors"])
def test_other_weights_are_told_and_drawn_again(here, sample, capsys, name):
    assert sample(*ONE, "-o", "first.png") == 0
    weights = here / "models" / name
    save_file(
        {key: 0.5 * value if value.is_floating_point() else value for key, value in load_file(weights).items()}, weights
    )
    capsys.readouterr()
    assert sample("--from", "first.png", "-o", "second.png", own=()) == 0
    what = "the image encoder has the hash " if "/" in name else "models/plain.safetensors has the IP-Adapter hash "
    assert f"{what}{file_hash(weights)[:10]}, and first.png was drawn with " in capsys.readouterr().err
    assert sample(*ONE, "-o", "first.png") == 0
    assert (here / "first-2.png").exists()


def test_explain_reports_them(here, sample, capsys):
    assert sample(*ONE, "--explain") == 0
    assert "attention" in capsys.readouterr().out


def other_unet(folder):
    save_ip_adapter(folder, ip_adapter(tiny_unet("sdxl")), "sdxl.safetensors")


def face_id(folder):
    own = ip_adapter(tiny_unet("sd1")) | {"ip_adapter.0.to_q_lora.down.weight": torch.ones(2, 2)}
    save_ip_adapter(folder, own, "face-id.safetensors")


def alone(folder):
    (folder / "alone").mkdir()
    shutil.copy(folder / "plain.safetensors", folder / "alone")


def wide_encoder(folder):
    image_encoder(projection_dim=40).save_pretrained(folder / "wide")


def of(name):
    return ("--ip-adapter", name, *ONE[2:])


ENCODER = (*ONE, "--image-encoder")
WRONG = {
    "no picture": (ONE[:2], "ip-adapter-image: 0 given for 1 --ip-adapter; give one for each, in the same order"),
    "one picture for two": ((*ONE, *TWO[4:6]), "ip-adapter-image: 1 given for 2 --ip-adapter; give one for each"),
    "a picture alone": (ONE[2:], "ip-adapter-image 'style.png': an IP-Adapter reads it; give --ip-adapter, or leave"),
    "a scale alone": (("--ip-adapter-scale", "1"), "ip-adapter-scale: it is for an IP-Adapter; give --ip-adapter, or"),
    "an encoder alone": (("--image-encoder", "models"), "image-encoder: it is for an IP-Adapter; give --ip-adapter"),
    "three scales": (
        (*TWO, *("--ip-adapter-scale", "1") * 3),
        "ip-adapter-scale: 3 given for 2 --ip-adapter; give one",
    ),
    "NaN": ((*ONE, "--ip-adapter-scale", "nan"), "ip-adapter-scale: (nan,) is not a finite number for each IP-Adapter"),
    "no file": (of("none.bin"), "ip-adapter 'none.bin' does not exist; give a file, or one on the hub as h94/IP-Ada"),
    "a folder": (of("models"), "ip-adapter 'models' names no file; give one as NAME:FILE, such as h94/IP-Adapter:mod"),
    "no such file in it": (of("models:none.bin"), "ip-adapter 'models:none.bin': models has no file 'none.bin'; give"),
    "a picture as the file": (of("style.png"), "style.png"),
    "another model's": (of("models/sdxl.safetensors"), "its tokens have 72 channels, and this model reads 32; give an"),
    "FaceID": (of("models/face-id.safetensors"), "face-id.safetensors is an IP-Adapter FaceID, which reads embeddings"),
    "no encoder beside it": (
        of("models/alone/plain.safetensors"),
        "there is no image encoder in models/alone/image_enc",
    ),
    "no such encoder": (
        (*ENCODER, "none"),
        "image-encoder 'none' does not exist; give a folder, or h94/IP-Adapter:mod",
    ),
    "no encoder in it": ((*ENCODER, "."), "image-encoder '.': there is no image encoder in .; give its folder"),
    "another encoder": ((*ENCODER, "models/wide"), "image_encoder: it gives 40 channels, and models/plain.safetensors"),
    "no such picture": ((*ONE[:3], "none.png"), "ip-adapter-image 'none.png' does not exist; give a picture"),
    "no picture that PIL reads": ((*ONE[:3], "models/plus.bin"), "ip-adapter-image 'models/plus.bin' is not a picture"),
}
MADE = {
    "another model's": other_unet,
    "FaceID": face_id,
    "no encoder beside it": alone,
    "another encoder": wide_encoder,
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_drawn_is_refused_in_one_line(here, sample, capsys, case):
    flags, message = WRONG[case]
    MADE.get(case, str)(here / "models")
    assert sample(*flags, "-o", "first.png") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("fastdiff: error: ") and message in line
    assert not (here / "first.png").exists()


def test_an_encoder_without_weights(here, sample, capsys):
    (here / "models/image_encoder/model.safetensors").unlink()
    assert sample(*ONE, "-o", "first.png") == 2
    assert "image_encoder" in capsys.readouterr().err


def test_models_of_labels_have_none(here, sample, capsys):
    assert sample(*ONE, "--model", "emoji64", "-o", "first.png", own=()) == 2
    assert "ip-adapter: emoji64 has no text encoder; leave it out, or give a --label" in capsys.readouterr().err


def test_a_pipeline_without_ip_adapters_refuses_them(tmp_path):
    request = Request(model=str(save_unet(tmp_path / "tiny", **UNET)), ip_adapter=("none.bin",))
    with pytest.raises(InputError, match=r"ip-adapter: .*tiny has no IP-Adapters; leave it out"):
        load_pipeline(find_model(request), request, "cpu")


def test_bulk_refuses_them_before_it_starts_workers(here, text_folder, capsys):
    flags = ("--model", str(text_folder("sd1")), "--prompt", PROMPT, "--device", "cpu", "-o", "bulk")
    assert cli.main(["bulk", *flags, "--ip-adapter", "none.bin", *ONE[2:]]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fastdiff: error: ip-adapter 'none.bin' does not exist; give a file")
    assert not (here / "bulk").exists()
