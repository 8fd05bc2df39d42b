"""The bundled folder of a trained run: copied files, refusals, and the card with the run's results."""

import json
import shutil
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # training/ is not installed

from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.text.tokenizer import CLIPTokenizer
from training.emoji_sd import folder as model_folder
from training.emoji_sd.bundling import bundle
from training.emoji_sd.bundling.figures import minutes
from training.emoji_sd.tokenizer import learned_merges, save_tokenizer
from training.emoji_sd.unet import Denoiser, build_text_encoder, build_unet
from training.emoji_sd.vae import Shape, build_vae, load_vae, save_vae

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers'

RATES = {"first": 0.25, "first_5": 0.5, "pictures": 8}
SCORE = {"drawn": RATES, "real": RATES | {"first": 0.75}}
QUANTILES = {"median": 44.25, "share_nearer_than_limit": 0.0123}


def evaluation(sampler: str) -> dict:
    return {
        "device": "NVIDIA H100",
        "torch": "2.11.0+cu130",
        "sampling": {"guidance_scale": 3.0, "num_inference_steps": 20, "sampler": sampler},
        "seeds": [1000, 1004],
        "chance": {"first": 0.002, "first_5": 0.01},
        "scores": dict.fromkeys(("train", "held_out", "known_words", "new_words"), SCORE),
        "kernel_distance": 0.125,
        "nearest": {"drawn": QUANTILES, "validation_pictures": QUANTILES | {"median": 48.06}},
    }


def sampling(sampler: str) -> dict:
    rows = [
        {"sampler": sampler, "num_inference_steps": 20, "guidance_scale": scale, "seeds": [0, 2], **RATES}
        for scale in (2.0, 3.0)
    ]
    return {"chosen_by": rows, "judged": rows[1] | {"seeds": [1000, 1002], "first": 0.2}}


def save_lines(path: Path, *rows: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a run with a tiny model: tokenizer, VAE and pipeline."""
    run = tmp_path_factory.mktemp("models")
    save_tokenizer(learned_merges(["cat dog cow owl"] * 4, 530), run / "tokenizer")
    torch.manual_seed(0)
    save_vae(build_vae(Shape((16, 16, 16, 16), 4)), 2.0, run / "f8c4" / "model")
    denoiser = Denoiser(build_unet((32, 32), 4, 16, 32), build_text_encoder(CLIPTokenizer(run / "tokenizer"), 32, 1))
    model_folder.save_pipeline(denoiser, load_vae(run / "f8c4" / "model", "cpu"), run / "tokenizer", run / "unet/model")
    return run


@pytest.fixture
def trained(models, tmp_path):
    """The folder of a run with a tiny model and made-up results."""
    run = tmp_path / "run"
    shutil.copytree(models, run)
    losses = {"train_loss": 0.1, "held_out_loss": 0.11, "validation_loss": 0.12}
    seconds = (240.0, 480.0, 120.0)  # two runs: the second restarts the clock
    save_lines(run / "unet" / "log.jsonl", *({"step": i, "seconds": s, **losses} for i, s in enumerate(seconds)))
    vae = {"psnr": 31.25, "sharpness": 0.95, "flatness": 0.5, "white": 0.25}
    save_lines(run / "f8c4" / "log.jsonl", {"step": 8000, "seconds": 600.0, **vae})
    save_lines(run / "judge" / "log.jsonl", {"step": 1})
    (run / "evaluation").mkdir()
    for name in bundle.SHEETS:
        Image.new("RGB", (8, 8), "red").save(run / "evaluation" / f"{name}.png")
        (run / "evaluation" / f"{name}.txt").write_text("cat\ngreen dog\n")
    (tmp_path / "licences").mkdir()
    (tmp_path / "licences" / "noto.txt").write_text("free")
    (tmp_path / "notes.md").write_text("Cats are {good}, dogs are not.\n")
    return run


@pytest.fixture
def bundled(trained, tmp_path):
    """Bundle the run with a sampler, and return the folder."""

    def make(sampler: str = "dpm++2m") -> Path:
        (trained / "evaluation" / "evaluation.json").write_text(json.dumps(evaluation(sampler)))
        (trained / "sampling.json").write_text(json.dumps(sampling(sampler)))
        places = {"run": trained, "licences": tmp_path / "licences", "notes": tmp_path / "notes.md"}
        places |= {"out": tmp_path / "emoji-sd", "results": tmp_path / "results"}
        flags = [text for name, path in places.items() for text in (f"--{name}", str(path))]
        bundle.run(bundle.parse_arguments([*flags, "--vae", "f8c4"]))
        return tmp_path / "emoji-sd"

    return make


@pytest.mark.parametrize("sampler", ["dpm++2m", "ddim", "euler"])
def test_the_folder_is_drawn_from_with_the_sampling_that_was_measured(bundled, sampler):
    folder = bundled(sampler)
    card = ModelCard.read("emoji-sd", folder)
    assert card.info.prompts == bundle.PROMPTS and card.info.scheduler == card.scheduler == sampler
    assert (card.info.num_inference_steps, card.info.guidance_scale) == (20, 3.0)
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    assert pipe("cat", num_inference_steps=1).images[0].size == (128, 128)  # without a dtype
    assert type(pipe.scheduler) is bundle.SAMPLERS[sampler]
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.scheduler.config.timestep_spacing == "trailing"
    assert (folder / "licenses" / "noto.txt").exists()


def test_the_card_has_every_figure_and_the_results_are_kept(bundled, tmp_path):
    folder = bundled()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| names held out in the requested style, seen in the other three | 8 | 25.0 % | 75.0 % | 50.0 % | " in card
    assert "| guidance | 2 | 3 |\n| --- | --- | --- |\n| DPM-Solver++, 20 steps | 25.0 % | **25.0 %** |" in card
    assert "DPM-Solver++ with 20 steps at guidance 3, drawn again with seeds 1000 to 1001" in card
    assert "2 steps in 10 minutes" in card and "8,000 steps in 10 minutes" in card and "31.2 dB" in card
    assert "Cats are {good}, dogs are not." in card and "channels 32, 32" in card and "latents of 16x16x4" in card
    assert '"cat", "green dog"' in card and "Twemoji, Copyright 2019 Twitter, Inc" in card
    assert {path.name for path in (tmp_path / "results").iterdir()} == set(bundle.KEPT.values())
    assert {f"{name}.png" for name in bundle.SHEETS} <= {path.name for path in folder.iterdir()}


def test_bundling_again_replaces_the_folder(bundled):
    stray = bundled() / "stray.txt"
    stray.write_text("old")
    assert (bundled() / "README.md").exists() and not stray.exists()


def test_the_folder_of_the_vae_is_forgotten(bundled, trained):
    path = bundled() / "vae" / "config.json"
    assert "_name_or_path" not in json.loads(path.read_text())
    path = trained / "unet" / "model" / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "/home/somebody/unet"}))
    with pytest.raises(ValueError, match="names a folder of the machine"):
        bundled()


def test_a_folder_that_is_too_large_is_refused(bundled, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 2**10)
    with pytest.raises(ValueError, match="more than"):
        bundled()


def test_weights_that_are_no_numbers_are_refused(bundled, trained):
    path = trained / "unet" / "model" / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_in.bias"][0] = float("inf")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"conv_in\.bias is not finite"):
        bundled()


def test_minutes_of_a_training_of_several_runs():
    assert minutes([{"seconds": 60.0}]) == 1
    assert minutes([{"seconds": 60.0}, {"seconds": 120.0}, {"seconds": 30.0}, {"seconds": 90.0}]) == 3.5
