"""`fastdiff models`: the bundled and cached models, and the details of one."""

import json
import re
import shutil

from fastdiff import cli
from fastdiff.checkpoints.model_card import ModelCard
from tests.checkpoints.single_files import headers


def test_models_lists_what_is_bundled_and_what_a_model_offers(fastdiff, here, model, refused):
    listed = fastdiff("models").stdout
    for name in ("emoji64", "emoji64-dit"):
        assert re.search(rf"^{name} +bundled +64x64, ddim, 216 labels$", listed, re.MULTILINE)
    assert re.search(r'^emoji-sd +bundled +128x128, \S+, draws from prompts, such as ".+"$', listed, re.MULTILINE)
    models, controlnets = listed.split("ControlNets, which draw with a model that reads prompts:\n")
    assert "emoji-edges" not in models and controlnets == (
        f"{'emoji-edges':<40} bundled  ControlNet for emoji-sd, reads pictures of 3 channels\n"
    )
    done = here("models", model)
    assert "guidance_scale: 4.0\n" in done.stdout and "\n  215  twemoji flags\n" in done.stdout
    assert "\ngroup  noto food: noto fruit, " in done.stdout
    assert "\n  216 " not in done.stdout, "the null label is not listed"
    shown = here("models", "emoji-edges").stdout
    assert shown == "emoji-edges: ControlNet for emoji-sd, reads pictures of 3 channels\n"
    for command in ("sample", "warm"):
        refused(here(command, "--model", "emoji-edges"), "/emoji-edges is a ControlNet, which draws with a text mod")
    refused(here("models", "emoji65"), "no model 'emoji65'; did you mean emoji64?")


def test_example_prompts_are_listed(fastdiff, text_folder, tmp_path):
    folder = tmp_path / "cache" / "models--org--painter" / "snapshots" / "0"
    shutil.copytree(text_folder("sd1"), folder)
    (folder / "fastdiff.json").write_text(json.dumps({"prompts": ["cat face", "red apple"], "num_inference_steps": 20}))
    listed = fastdiff("models", HF_HUB_CACHE=str(tmp_path / "cache")).stdout
    assert re.search(
        r'^org/painter +cached +16x16, pndm, draws from prompts, such as "cat face"$', listed, re.MULTILINE
    )
    shown = fastdiff("models", folder).stdout
    assert shown.endswith("\nnum_inference_steps: 20\nprompt  cat face\nprompt  red apple\n")


def test_cached_models_that_cannot_be_read_are_listed_with_the_reason(fastdiff, model, environment, tmp_path):
    for name in ("broken", "good"):
        shutil.copytree(model, tmp_path / "cache" / f"models--org--{name}" / "snapshots" / "0")
    (tmp_path / "cache/models--org--broken/snapshots/0/model_index.json").write_text("{")
    listed = fastdiff("models", HF_HUB_CACHE=str(tmp_path / "cache"))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert re.search(r"^org/broken +cached +unusable: .* is not readable JSON", listed.stdout, re.MULTILINE)
    assert re.search(r"^org/good +cached +64x64, ddim, 216 labels$", listed.stdout, re.MULTILINE)


def test_cached_controlnets_are_listed(fastdiff, environment, tmp_path):
    configs = {
        "canny": ({"cross_attention_dim": 768}, "ControlNet for Stable Diffusion 1, reads pictures of 3 channels"),
        "small": ({"cross_attention_dim": 24, "conditioning_channels": 1}, r".* text of width 24, .* of 1 channels"),
        "union": ({"_class_name": "ControlNetUnionModel"}, "unusable: ControlNetUnionModel: fastdiff does not run it"),
        "wrong": ({"layers_per_block": "x"}, "unusable: .*config.json: layers_per_block: 'x' is not"),
    }
    for name, (config, _) in configs.items():
        folder = tmp_path / "cache" / f"models--org--{name}" / "snapshots" / "0"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"_class_name": "ControlNetModel"} | config))
        for each in ("depth", "pose"):
            several = tmp_path / "cache/models--org--several/snapshots/0" / each
            several.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "config.json", several)
    cache = {"HF_HUB_CACHE": str(tmp_path / "cache")}
    done = fastdiff("models", **cache)
    assert (done.returncode, done.stderr) == (0, "")
    models, controlnets = done.stdout.split("ControlNets, which draw with a model that reads prompts:\n")
    assert "org/" not in models
    for name, (_, summary) in configs.items():
        assert re.search(rf"^org/{name} +cached +{summary}", controlnets, re.MULTILINE), controlnets
    assert re.search(r"^org/several +cached +ControlNets in its folders depth, pose$", controlnets, re.MULTILINE)
    shown = fastdiff("models", "org/canny", **cache).stdout
    assert shown == "org/canny: ControlNet for Stable Diffusion 1, reads pictures of 3 channels\n"


def test_an_error_that_nobody_thought_of_stops_no_list(monkeypatch, capsys):
    read = ModelCard.read

    def failing(name, folder):
        if name == "emoji64":
            raise KeyError("surprise")
        return read(name, folder)

    monkeypatch.setattr(ModelCard, "read", failing)
    assert cli.main(["models"]) == 0
    listed = capsys.readouterr().out
    assert "unusable: KeyError: 'surprise'\n" in listed and "\nemoji64-dit " in listed


def test_the_models_of_a_folder_are_listed_with_what_each_is(here, tmp_path, monkeypatch, refused, text_folder):
    mine = tmp_path / "mine"
    (mine / "loras").mkdir(parents=True)
    shutil.copytree(text_folder("sd1"), mine / "painter")
    headers.write(mine / "sdxl.safetensors", headers.SDXL)
    headers.write(mine / "loras" / "style.safetensors", {"lora_unet_mid_block.lora_up.weight": (2, 2)})
    net = {"control_model.input_hint_block.0.weight": (16, 3, 3, 3), "control_model.x.attn2.to_k.weight": (8, 1024)}
    headers.write(mine / "net.safetensors", net)
    (mine / "broken.safetensors").write_bytes(b"1234")
    monkeypatch.setenv("FASTDIFF_MODELS", str(mine))
    by_variable = here("models").stdout
    monkeypatch.delenv("FASTDIFF_MODELS")
    assert "sdxl" not in here("models").stdout
    listed = here("models", "--models-dir", mine).stdout
    assert listed == by_variable
    for pattern in (
        r"mine/painter +folder +16x16, pndm, draws from prompts",
        r"mine/sdxl\.safetensors +file +checkpoint of Stable Diffusion XL$",
        r"mine/loras/style\.safetensors +file +unusable: LoRA: it has only one of the two matrices of 'mid_block';",
        r"mine/net\.safetensors +file +ControlNet of Stable Diffusion 2$",
        r"mine/broken\.safetensors +file +unusable: .*truncated",
    ):
        assert re.search(pattern, listed, re.MULTILINE), pattern
    refused(here("models", "--models-dir", tmp_path / "none"), "--models-dir: .* is not a folder")


def test_loras_and_embeddings_are_listed_with_base_model_and_rank(here, tmp_path, refused):
    loras, embeddings = tmp_path / "loras", tmp_path / "embeddings"
    for folder in (loras, embeddings):
        folder.mkdir()
    headers.write(loras / "style.safetensors", headers.LORA)
    whole = {key.replace("lora_down", "hada_w1_b"): shape for key, shape in headers.LORA.items() if "down" in key}
    headers.write(loras / "unet.safetensors", {key: shape for key, shape in whole.items() if "_te2_" not in key})
    headers.write(loras / "loha.safetensors", whole)
    headers.write(loras / "cut.safetensors", headers.LORA).write_bytes(b"\x09\0\0\0\0\0\0\0{")
    vectors = {"dtype": "F32", "shape": [2, 768], "data_offsets": [0, 6144]}
    headers.write_raw(embeddings / "cat.safetensors", json.dumps({"emb_params": vectors}).encode(), 6144)
    done = here("models", "--lora-dir", loras, "--embedding-dir", embeddings, "--models-dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for pattern in (
        r"loras/style\.safetensors +file +LoRA of Stable Diffusion XL, ranks 4 to 8, 2 layers, kohya format$",
        r"loras/loha\.safetensors +file +LoHa of Stable Diffusion XL, ranks 4 to 8, 2 layers, kohya format$",
        r"loras/unet\.safetensors +file +LoHa of Stable Diffusion XL, rank 8, 1 layer, kohya format$",
        r"loras/cut\.safetensors +file +unusable: .*damaged",
        r"embeddings/cat\.safetensors +file +embedding for Stable Diffusion 1, token cat, 2 vectors$",
    ):
        assert len(re.findall(pattern, done.stdout, re.MULTILINE)) == 1, pattern
    refused(here("models", "--lora-dir", tmp_path / "none"), "--lora-dir: .* is not a folder; give the folder")


def test_a_file_is_shown_with_the_configs_and_the_vae_that_it_needs(here, tmp_path, text_folder, refused):
    parts = {key: shape for key, shape in headers.SDXL.items() if key not in headers.VAE}
    file = headers.write(tmp_path / "sdxl.safetensors", parts)
    vae = headers.write(tmp_path / "vae.safetensors", headers.VAE)
    refused(here("models", file), "holds no VAE; give a file that does with --vae")
    guidance = "guidance_scale: 5.0\nguidance_scale_with_mask: 7.5\n"
    assert here("models", file, "--vae", vae).stdout == f"{file}: 1024x1024, euler, draws from prompts\n{guidance}"
    small = here("models", file, "--vae", vae, "--config", text_folder("sdxl")).stdout
    assert small.startswith(f"{file}: 16x16, ")
    refused(here("models", "--config", tmp_path), "they are for one file; give its NAME too")
    refused(here("models", "emoji64", "--vae", vae), "--vae: it changes nothing that is shown of emoji64; leave it out")
    refused(here("models", "emoji64", "--config", tmp_path), "config: it is for single files, and emoji64 is none")
