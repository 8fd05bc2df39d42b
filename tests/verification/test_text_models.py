"""`fastdiff verify` of text-to-image models: every part agrees, and a part that differs is named."""

import json
import shutil
import sys
from operator import attrgetter

import diffusers
import pytest
import torch
import transformers

from fastdiff import cli
from fastdiff.errors import InputError
from fastdiff.pipelines import Pipeline, load_pipeline
from fastdiff.requests.request import Request
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.verification.models import compare_with_diffusers
from tests.support.text_pipelines import text_pipeline

SLOW = pytest.mark.slow
pytestmark = SLOW  # tests/cli/test_verify.py has the quick tests
ENCODER = ["text_encoder hidden_states", "text_encoder last_hidden_state", "text_encoder pooler_output"]
ENCODER_2 = ["text_encoder_2 hidden_states", "text_encoder_2 last_hidden_state", "text_encoder_2 text_embeds"]
OTHERS = [*(f"U-Net t={t}" for t in (0, 249, 499, 749, 999)), "VAE decode", "VAE encode"]
ROWS = {
    "sd1": ["tokenizer ids", *ENCODER, *OTHERS, "4 steps of pndm, guidance 7.5"],
    "sd2": ["tokenizer ids", *ENCODER, *OTHERS, "4 steps of ddim, guidance 7.5"],
    "sdxl": [
        *("tokenizer ids", "tokenizer_2 ids"),
        *(*ENCODER, *ENCODER_2, *OTHERS),
        "4 steps of euler, guidance 5",
    ],
}


def verified(folder, **options):
    return compare_with_diffusers(Request(model=str(folder), num_inference_steps=4, **options), "cpu")


def edit(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def copied(text_folder, tmp_path):
    return lambda kind: shutil.copytree(text_folder(kind), tmp_path / kind)


@pytest.mark.parametrize("kind", ROWS)
def test_every_part_agrees(text_folder, capfd, kind):
    folder = str(text_folder(kind))
    capfd.readouterr()  # drops the output of saving the folder
    assert cli.main(["verify", folder, "--device", "cpu", "--json"]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert err == "" and report["passed"] and report["versions"]["transformers"] == transformers.__version__
    assert [row["what"] for row in report["comparisons"]] == ROWS[kind]
    assert all(row["error"] <= row["allowed"] < 1.1e-3 for row in report["comparisons"])


PLANTED = {  # the parameter to change, and the parts that then fail
    "text-encoder": ("sd1", "encoders.models", 0, "encoder.layers.0.mlp.fc1.weight", {"text_encoder", "4"}),
    "text-encoders-norm": ("sd2", "encoders.models", 0, "final_layer_norm.bias", {"text_encoder", "4"}),
    "norm-that-sdxl-leaves-out": ("sdxl", "encoders.models", 0, "final_layer_norm.bias", {"text_encoder"}),
    "projection": ("sdxl", "encoders.models", 1, "text_projection.weight", {"text_encoder_2", "4"}),
    "unet": ("sdxl", "models", 0, "add_embedding.linear_1.bias", {"U-Net", "4"}),
    "vae-decoder": ("sd1", "models", 1, "decoder.conv_out.bias", {"VAE", "4"}),
    "vae-encoder": ("sd1", "models", 1, "encoder.conv_in.bias", {"VAE"}),
}


QUICK = ("text-encoder", "unet", "vae-decoder")  # `make test` runs these


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=SLOW) for name in PLANTED if name not in QUICK)])
def test_a_changed_weight_is_found_and_its_part_named(text_folder, monkeypatch, name):
    kind, models, place, parameter, parts = PLANTED[name]

    def load_wrong(*args):
        pipe = load_pipeline(*args)
        weights = attrgetter(parameter)(attrgetter(models)(pipe)[place]).data
        weights += 0.3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(0))
        return pipe

    monkeypatch.setattr("fastdiff.pipelines.load_pipeline", load_wrong)
    report = verified(text_folder(kind))
    assert {each.what.split()[0] for each in report.comparisons if not each.passed} == parts


@pytest.mark.parametrize("place", [pytest.param(0, marks=SLOW), 1])
def test_a_changed_vocabulary_is_found(text_folder, copied, monkeypatch, place):
    name = ("tokenizer", "tokenizer_2")[place]
    path = copied("sdxl") / name / "tokenizer.json"
    content = json.loads(path.read_bytes())
    ids = content["model"]["vocab"]
    ids["photo</w>"], ids["of</w>"] = ids["of</w>"], ids["photo</w>"]
    path.write_text(json.dumps(content))

    def load_wrong(*args):
        pipe = load_pipeline(*args)
        right = list(pipe.encoders.tokenizers)
        pipe.encoders.tokenizers = (*right[:place], CLIPTokenizer(path.parent), *right[place + 1 :])
        return pipe

    monkeypatch.setattr("fastdiff.pipelines.load_pipeline", load_wrong)
    failed = {each.what: each.error for each in verified(text_folder("sdxl")).comparisons if not each.passed}
    assert failed[f"{name} ids"] == 3  # both words in one text, and one of them in another
    assert {what.split()[0] for what in failed} == {name, "4"}


def test_sdxl_without_text_encoders_agrees(tmp_path):
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    text_pipeline("sdxl", **parts).save_pretrained(tmp_path)
    report = verified(tmp_path)
    assert report.passed and [each.what for each in report.comparisons] == [*OTHERS, ROWS["sdxl"][-1]]


def test_a_variant_agrees(tmp_path):
    text_pipeline("sd1").to(torch.float16).save_pretrained(tmp_path, variant="fp16")
    assert verified(tmp_path, variant="fp16").passed


@pytest.mark.parametrize(
    "scheduler", ["ddpm", *(pytest.param(name, marks=SLOW) for name in ("euler-a", "dpm++2m-karras"))]
)
def test_another_scheduler_of_an_old_folder_agrees(copied, scheduler):
    """StableDiffusionPipeline sets the options that the old file lacks, and passes the others to a new scheduler."""
    folder = copied("sd1")
    path = folder / "scheduler" / "scheduler_config.json"
    config = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "steps_offset"}
    path.write_text(json.dumps(config | {"clip_sample": True}))
    (folder / "fastdiff.json").write_text(json.dumps({"scheduler": scheduler, "guidance_scale": 3.0}))
    report = verified(folder)
    assert report.passed and report.comparisons[-1].what == f"4 steps of {scheduler}, guidance 3"


def test_parts_that_are_not_run_are_not_loaded(copied):
    folder = copied("sd2")
    edit(folder / "model_index.json", safety_checker=["nowhere", "Any"], feature_extractor=["nowhere", "Other"])
    assert verified(folder).passed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(),
        lambda folder: (folder / "text_encoder" / "model.safetensors").write_bytes(b"x" * 99),
        lambda folder: edit(folder / "text_encoder" / "config.json", hidden_size=64),
        lambda folder: edit(folder / "unet" / "config.json", in_channels=9),
        lambda folder: shutil.rmtree(folder / "vae"),
    ],
    ids=["tokenizer", "text-encoder", "width", "inpainting", "no-vae"],
)
def test_it_refuses_as_the_pipeline_does(copied, spoil):
    folder = copied("sd1")
    spoil(folder)
    with pytest.raises(InputError) as drawn:
        Pipeline.from_pretrained(folder, device="cpu")
    with pytest.raises(InputError) as compared:
        verified(folder)
    assert str(compared.value) == str(drawn.value) and len(str(drawn.value).splitlines()) == 1


def test_more_steps_than_it_was_trained_with_are_refused(text_folder):
    with pytest.raises(InputError, match=r"steps 1001: .* was trained with 1000 steps"):
        compare_with_diffusers(Request(model=str(text_folder("sd1")), num_inference_steps=1001), "cpu")


@pytest.mark.parametrize("missing", ["transformers", "diffusers"])
def test_without_a_library_the_remedy_is_named(text_folder, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=rf"needs {missing}, which is not installed; pip install 'fastdiff\[diff"):
        verified(text_folder("sd1"))


def test_what_diffusers_refuses_is_one_line(text_folder, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no\nsuch thing")

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", fail)
    with pytest.raises(InputError, match=r"diffusers cannot run .*no such thing") as error:
        verified(text_folder("sd1"))
    assert len(str(error.value).splitlines()) == 1
