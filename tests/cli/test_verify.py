"""`fastdiff verify`: it passes where fastdiff agrees with diffusers, and fails where it does not."""

import json
import re
import shutil
import sys
from pathlib import Path

import diffusers
import pytest
import safetensors.torch
import torch

import fastdiff
from fastdiff import cli
from fastdiff.pipelines import load_pipeline
from tests.support.planners import policy, value_function


@pytest.fixture(scope="module")
def ddpm_folder(tmp_path_factory):
    """A small unconditional DDPM pipeline saved by diffusers, with weights that make every layer matter."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )
    for parameter in unet.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("ddpm")
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=100)).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_the_bundled_model_agrees_with_diffusers(here):
    done = here("verify", "emoji64", "--steps", 2, "--device", "cpu", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["passed"] and report["versions"]["diffusers"] == diffusers.__version__
    names = [row["what"] for row in report["comparisons"]]
    forwards = [f"forward t={t} label={label}" for t in (0, 249, 499, 749, 999) for label in (0, 216)]
    assert names == [*forwards, "2 steps of ddim, guidance 4"]
    for row in report["comparisons"]:
        assert 0 < row["error"] <= row["allowed"] == row["tolerance"] * max(1, row["largest"])


def test_precision_measures_what_8_bits_cost(ddpm_folder, text_folder, capsys):
    assert cli.main(["verify", ddpm_folder, "--precision", "int8", "--device", "cpu"]) == 0
    header, columns, *rows, legend = capsys.readouterr().out.splitlines()
    assert "int8 weights and bfloat16, both against float32 on cpu" in header and "dB: PSNR" in legend
    assert columns.split() == ["bfloat16", "int8"] and len(rows) == 4
    assert cli.main(["verify", str(text_folder("sdxl")), "--precision", "int8", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = {row["what"].partition(" ")[0]: row for row in report["differences"]}
    assert list(parts) == ["text_encoder", "text_encoder_2", "unet", "4"]
    for name in list(parts)[:-1]:
        assert parts[name]["unit"] == "%" and 0 < parts[name]["beside"] < 5 and 0 < parts[name]["error"] < 10
    assert parts["4"]["unit"] == "dB" and parts["4"]["error"] > 20


def test_precision_is_measured_on_pictures(ddpm_folder, capsys):
    assert cli.main(["verify", f"{ddpm_folder}/unet", "--precision", "int8", "--device", "cpu"]) == 2
    assert "has no model_index.json" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_precision_of_a_planner(save_planner, capsys, precision):
    _, folder = save_planner("DDPM")
    assert cli.main(["verify", str(folder), "--precision", precision, "--steps", "3", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "3 steps of ddpm" in printed and f"{precision} weights and bfloat16" in printed


def test_ddpm_draws_its_step_noise_as_diffusers(ddpm_folder, capsys):
    assert cli.main(["verify", ddpm_folder, "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "4 steps of ddpm, guidance 1 " in table and table.endswith("\nwithin tolerance\n")
    assert table.count(" ok\n") == 6 and "FAILED" not in table


@pytest.fixture(scope="module")
def dit_folder(tmp_path_factory):
    """A small latent DiTPipeline with a learned variance."""
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=4, num_layers=2, num_attention_heads=2, attention_head_dim=8, num_embeds_ada_norm=9, out_channels=8
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    for parameter in (*transformer.parameters(), *vae.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    folder = tmp_path_factory.mktemp("dit")
    diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler(clip_sample=False)).save_pretrained(folder)
    return str(folder)


def test_a_transformer_of_latents_agrees(dit_folder, capsys):
    assert cli.main(["verify", dit_folder, "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "4 steps of ddim, guidance 4 " in table
    assert table.count(" ok\n") == 13
    assert all(what in table for what in ("forward t=999 label=9 ", "VAE decode ", "VAE encode "))


@pytest.mark.parametrize("scheduler", ["ddpm", "ddim"])
def test_a_folder_of_a_learned_variance_agrees(dit_folder, tmp_path, capsys, scheduler):
    folder = shutil.copytree(dit_folder, tmp_path / "dit")
    diffusers.DDPMScheduler(variance_type="learned_range").save_pretrained(folder / "scheduler")
    (folder / "fastdiff.json").write_text(json.dumps({"scheduler": scheduler}))
    assert cli.main(["verify", str(folder), "--device", "cpu"]) == 0
    assert f"4 steps of {scheduler}, guidance 4 " in capsys.readouterr().out


PLANNER, VALUE = policy(8, 16, 32), value_function(8, 16, 32)
UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
}
DIT = {"sample_size": 8, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "num_embeds_ada_norm": 9}
TEXT_UNET = UNET | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 12,
}
SDXL = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 10 + 6 * 4,
}
MODELS = {
    "policy": ("UNet1DModel", PLANNER, 5),
    "value": ("UNet1DModel", VALUE, 5),
    "policy-of-horizon-8": ("UNet1DModel", PLANNER | {"sample_size": 8}, 5),
    "unet": ("UNet2DModel", UNET, 5),
    "unet-of-labels": ("UNet2DModel", UNET | {"num_class_embeds": 3}, 5),
    "dit": ("DiTTransformer2DModel", DIT, 10),
    "unet-of-text": ("UNet2DConditionModel", TEXT_UNET, 5),
    "unet-of-sdxl": ("UNet2DConditionModel", TEXT_UNET | SDXL, 5),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_scheduler_agrees_in_its_predictions(name, tmp_path, capsys):
    kind, config, comparisons = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    assert cli.main(["verify", str(tmp_path), "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert table.count(" ok\n") == table.count("forward t=") == comparisons
    assert table.endswith("\nwithin tolerance\n")


def test_a_planner_agrees_after_all_steps(save_planner, capsys):
    _, folder = save_planner("DDPM", num_train_timesteps=20, beta_schedule="squaredcos_cap_v2", clip_sample=False)
    assert cli.main(["verify", str(folder), "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert "4 steps of ddpm, guidance 1 " in table and table.count(" ok\n") == 6


def test_a_planner_and_its_value_function_agree(save_value_guided, capsys):
    _, folder = save_value_guided()
    assert cli.main(["verify", str(folder), "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert table.count("forward t=") == table.count("value t=") == 5 and table.count(" ok\n") == 11


def test_a_model_that_differs_is_found(tmp_path, capsys, monkeypatch):
    model = diffusers.UNet1DModel(**VALUE)
    model.save_pretrained(tmp_path)
    right = fastdiff.UNet1DModel.predict
    monkeypatch.setattr(fastdiff.UNet1DModel, "predict", lambda *given: right(*given) + 2e-3)
    assert cli.main(["verify", str(tmp_path), "--device", "cpu"]) == 1
    assert capsys.readouterr().out.count(" FAILED\n") == 5


def test_audio_models_are_refused(tmp_path, capfd):
    diffusers.UNet1DModel(act_fn="silu").save_pretrained(tmp_path)
    assert "DownBlock1DNoSkip is a block of audio models" in refusal("verify", tmp_path, capfd)


def test_a_wrong_weight_is_found(ddpm_folder, capsys, monkeypatch):
    def load_wrong(*args):
        pipe = load_pipeline(*args)
        pipe.denoiser.conv_out.bias.data += 2e-3
        return pipe

    monkeypatch.setattr("fastdiff.pipelines.load_pipeline", load_wrong)
    assert cli.main(["verify", ddpm_folder, "--device", "cpu"]) == 1
    table = capsys.readouterr().out
    assert table.count(" FAILED\n") == 6 and table.endswith("\nNOT within tolerance\n")


def refusal(command: str, folder, capfd) -> str:
    """Return the single error line of `fastdiff COMMAND`."""
    where = ["-m", str(folder), "-o", str(folder / "pictures")] if command == "sample" else [str(folder)]
    assert cli.main([command, *where, "--device", "cpu"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("fastdiff: error: ") and len(err.splitlines()) == 1, err
    return err


@pytest.fixture
def index_of_shards():
    """Write an index that lists all keys of a folder's single file as its only shard."""

    def write(folder) -> None:
        single = folder / "diffusion_pytorch_model.safetensors"
        places = dict.fromkeys(safetensors.torch.load_file(single), single.name)
        (folder / f"{single.name}.index.json").write_text(json.dumps({"weight_map": places}))

    return write


def name_edm(folder) -> None:
    diffusers.EDMEulerScheduler().save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text()) | {"scheduler": ["diffusers", "EDMEulerScheduler"]}
    (folder / "model_index.json").write_text(json.dumps(index))


def edit_vae(folder) -> None:
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_post_quant_conv": False}))


SPOILT = {
    "edm": name_edm,
    "damaged": lambda folder: (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 99),
    "damaged-vae": lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 99),
    "no-weights": lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink(),
    "turned-vae": edit_vae,
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_sample_refuses_verify_refuses_in_the_same_words(dit_folder, tmp_path, capfd, how):
    folder = shutil.copytree(dit_folder, tmp_path / "dit")
    SPOILT[how](folder)
    assert refusal("verify", folder, capfd) == refusal("sample", folder, capfd)


def test_what_diffusers_alone_refuses_is_one_line(dit_folder, tmp_path, capfd, index_of_shards):
    """diffusers needs metadata in an index, and fastdiff does not."""
    folder = shutil.copytree(dit_folder, tmp_path / "dit")
    index_of_shards(folder / "transformer")
    assert re.search(
        "diffusers cannot load .*transformer .KeyError: 'metadata'.; save", refusal("verify", folder, capfd)
    )


def test_an_error_of_diffusers_while_it_runs_is_one_line(ddpm_folder, capfd, monkeypatch):
    monkeypatch.setattr(diffusers.DDPMScheduler, "set_timesteps", lambda *_: [][0])
    assert "diffusers cannot run" in refusal("verify", Path(ddpm_folder), capfd)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["from_pretrained", "forward"])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nSee"), "out of memory: verify loads .* twice, .* --device cpu"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: verify loads"),
        (MemoryError(), "out of memory: verify loads"),
        (
            torch.AcceleratorError("CUDA error: unspecified launch failure\nSee"),
            "the GPU failed, .* restart fastdiff",
        ),
    ],
    ids=["GPU", "host", "Python", "lost-device"],
)
def test_a_device_that_fails_in_diffusers_is_one_line(ddpm_folder, capsys, monkeypatch, place, error, line):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(diffusers.UNet2DModel, place, fail)
    assert cli.main(["verify", ddpm_folder, "--device", "cpu"]) == 1
    message = capsys.readouterr().err
    assert re.fullmatch(f"fastdiff: error: {line}.*\n", message) and "save the model" not in message


def test_a_vae_that_fastdiff_loads_wrong_is_found(dit_folder, capsys, monkeypatch):
    def load_wrong(*args):
        pipe = load_pipeline(*args)
        pipe.vae.decoder.conv_out.bias.data += 0.01
        return pipe

    monkeypatch.setattr("fastdiff.pipelines.load_pipeline", load_wrong)
    assert cli.main(["verify", dit_folder, "--device", "cpu"]) == 1
    table = capsys.readouterr().out
    assert table.count(" FAILED\n") == 2 and table.count("VAE decode") == 1  # the picture and the VAE


def test_without_diffusers_the_remedy_is_named(ddpm_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert cli.main(["verify", ddpm_folder]) == 2
    assert capsys.readouterr().err.endswith("which is not installed; pip install 'fastdiff[diffusers]'\n")


def test_latents_are_decoded_without_diffusers(dit_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    options = ["--steps", "2", "--num-images", "1", "--device", "cpu"]
    assert cli.main(["sample", "-m", dit_folder, "-o", str(tmp_path), *options]) == 0
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("args", "message"),
    [(["emoji65"], "no model 'emoji65'"), (["emoji64", "--steps", "0"], "steps: 0 is not a whole number")],
    ids=["model", "steps"],
)
def test_bad_input(args, message, capsys):
    assert cli.main(["verify", *args]) == 2
    assert message in capsys.readouterr().err
