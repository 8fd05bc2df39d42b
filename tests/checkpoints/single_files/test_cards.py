"""The card of a single file: its configs, its prediction type, its parts."""

import json
import math

import pytest
import torch
from diffusers.loaders.single_file_utils import infer_diffusers_model_type

import fastdiff
from fastdiff.checkpoints import registry
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_hash import begin_files_hash, begin_hash
from fastdiff.checkpoints.single_files.cards import CONFIGS, FileOptions, file_card, find_card, place_of_part
from fastdiff.errors import InputError
from fastdiff.text.tokenizer import CLIPTokenizer
from tests.checkpoints.single_files import ldm
from tests.checkpoints.single_files.headers import REFINER, SD1, SD2, SDXL, VAE, for_inpainting, unet, write

EMPTY = {"v_pred": (0,)}
ZERO_SNR = {"ztsnr": (0,)}


def card_of(tmp_path, shapes, *, metadata=None, **options):
    return file_card(write(tmp_path / "model.safetensors", shapes, metadata), FileOptions(**options))


@pytest.mark.parametrize(
    ("shapes", "metadata", "asked", "folder", "prediction", "is_guess"),
    [
        (SD1, None, None, "sd1", "epsilon", False),
        (SD1 | EMPTY, None, None, "sd1", "v_prediction", False),
        (SD2, None, None, "sd2-v", "v_prediction", True),
        (SD2, None, "epsilon", "sd2-base", "epsilon", False),
        (SD2, {"modelspec.prediction_type": "epsilon"}, None, "sd2-base", "epsilon", False),
        (SD2 | EMPTY, {"modelspec.prediction_type": "epsilon"}, None, "sd2-v", "v_prediction", False),
        (SDXL, None, None, "sdxl", "epsilon", False),
        (SDXL, {"modelspec.prediction_type": "v"}, None, "sdxl", "v_prediction", False),
        (REFINER, None, None, "sdxl-refiner", "epsilon", False),
        (for_inpainting(SD1), None, None, "sd1-inpainting", "epsilon", False),
        (for_inpainting(SD2), None, None, "sd2-inpainting", "epsilon", True),
        (for_inpainting(SD2), None, "v_prediction", "sd2-inpainting", "v_prediction", False),
        (for_inpainting(SDXL), None, None, "sdxl-inpainting", "epsilon", False),
    ],
)
def test_the_configs_and_the_prediction_type(tmp_path, shapes, metadata, asked, folder, prediction, is_guess):
    card = card_of(tmp_path, shapes, metadata=metadata, prediction_type=asked)
    assert card.folder == CONFIGS / folder
    assert card.read_scheduler().get("prediction_type", "epsilon") == prediction
    assert (card.guess is not None) == is_guess
    assert card.notices == ([card.guess] if is_guess else [])
    if is_guess:
        assert f"{prediction} is a guess" in card.guess and "--prediction-type" in card.guess


@pytest.mark.parametrize("hint", [(SDXL | EMPTY, None), (SDXL, {"modelspec.prediction_type": "v"})])
def test_the_option_overrides_the_file_and_a_line_says_so(tmp_path, hint):
    shapes, metadata = hint
    card = card_of(tmp_path, shapes, metadata=metadata, prediction_type="epsilon")
    assert card.read_scheduler()["prediction_type"] == "epsilon"
    assert card.notices == [
        f"{tmp_path / 'model.safetensors'} says that it predicts v_prediction; --prediction-type overrides it: epsilon"
    ]
    assert card_of(tmp_path, shapes, metadata=metadata, prediction_type="v_prediction").notices == []


def test_the_global_step_of_sd2_base_makes_the_guess_epsilon(tmp_path):
    end = sum(map(math.prod, SD2.values()))
    entry = {"dtype": "I64", "shape": [], "data_offsets": [end, end + 8]}
    path = write(tmp_path / "model.safetensors", SD2 | {"global_step": (8,)}, global_step=entry)
    with open(path, "r+b") as file:
        file.seek(-8, 2)
        file.write((875_000).to_bytes(8, "little"))
    card = file_card(path)
    assert card.folder == CONFIGS / "sd2-base" and "epsilon is a guess" in card.guess


@pytest.mark.parametrize(("shapes", "name"), [(SD1, "ddim"), (SD2, "ddim"), (SDXL, "euler")])
def test_zero_terminal_snr_sets_the_betas_and_the_spacing(tmp_path, shapes, name):
    card = card_of(tmp_path, shapes | EMPTY | ZERO_SNR)
    scheduler = card.read_scheduler()
    assert scheduler["rescale_betas_zero_snr"] is True and scheduler["timestep_spacing"] == "trailing"
    assert card.scheduler == name
    from fastdiff.pipelines.folders import scheduler_of

    made = scheduler_of(card, None)
    assert made.config.rescale_betas_zero_snr and made.config.prediction_type == "v_prediction"
    assert made.schedule(4).timesteps[0] == 999


@pytest.mark.parametrize("name", ["sd1", "sd2-base", "sd2-v", "sdxl"])
def test_the_shipped_configs_build_the_published_models(name):
    """The published models have as many parameters."""
    from fastdiff.execution.devices import on_meta
    from fastdiff.models.clip import CLIPTextModel

    folder, width = CONFIGS / name, {"sd1": 123_060_480, "sdxl": 123_060_480}.get(name, 340_387_840)
    counts = {"sd1": 859_520_964, "sdxl": 2_567_463_684}
    with on_meta():
        unet = fastdiff.UNet2DConditionModel.from_config(json.loads((folder / "unet/config.json").read_text()))
        vae = fastdiff.AutoencoderKL.from_config(json.loads((folder / "vae/config.json").read_text()))
        encoder = CLIPTextModel.from_config(json.loads((folder / "text_encoder/config.json").read_text()))
    assert sum(each.numel() for each in unet.parameters()) == counts.get(name, 865_910_724)
    assert sum(each.numel() for each in vae.parameters()) == 83_653_863
    assert sum(each.numel() for each in encoder.parameters()) == width


@pytest.mark.parametrize("name", ["sd1/tokenizer", "sd2-v/tokenizer", "sdxl/tokenizer_2"])
def test_the_shipped_vocabulary_is_clips(name):
    tokenizer = CLIPTokenizer(CONFIGS / name)
    ids = tokenizer("a photo of an astronaut riding a horse on mars").ids
    assert tokenizer.size == 49_408 and tokenizer.length == 77
    assert ids[:12] == (49406, 320, 1125, 539, 550, 18376, 6765, 320, 4558, 525, 7496, 49407)  # CLIP's own
    assert ids[-1] == (49407 if name == "sd1/tokenizer" else 0)


def test_parts_that_are_missing_are_named(tmp_path):
    without_vae = {key: shape for key, shape in SD1.items() if key not in VAE}
    with pytest.raises(InputError, match=r"holds no VAE; give a file that does with --vae"):
        card_of(tmp_path, without_vae)
    with pytest.raises(InputError, match=r"is a U-Net of Stable Diffusion 1, without vae and text_encoder; give"):
        card_of(tmp_path, unet(768))
    with pytest.raises(InputError, match=r"is a VAE of .*, without a U-Net that draws"):
        card_of(tmp_path, VAE)
    with pytest.raises(InputError, match=r"is a U-Net of an unknown size; give the folder of its configs as config"):
        card_of(tmp_path, unet(64))


def test_options_of_files_are_refused_for_folders_and_the_reverse(tmp_path, saved):
    _, _, folder, file = saved("sd1")
    with pytest.raises(InputError, match="config: it is for single files"):
        find_card(str(folder), FileOptions(config=folder))
    with pytest.raises(InputError, match="prediction-type: it is for single files"):
        find_card(str(folder), FileOptions(prediction_type="epsilon"))
    with pytest.raises(InputError, match=r"variant: 'fp16' is given for .*, but a single file has none"):
        find_card(str(file), variant="fp16")
    with pytest.raises(InputError, match=r"config: .* has no model_index\.json"):
        find_card(str(file), FileOptions(config=tmp_path))


def test_another_vae_replaces_the_models(saved, tmp_path):
    _, pipe, folder, file = saved("sd1")
    state = {key: 2 * tensor for key, tensor in ldm.ldm_vae(pipe.vae).items()}
    vae = ldm.save(state, tmp_path / "vae.safetensors")
    ours = fastdiff.Pipeline.from_single_file(file, config=folder, vae=vae, device="cpu")
    assert torch.equal(ours.vae.quant_conv.weight, 2 * pipe.vae.quant_conv.weight)
    assert find_card(str(folder), FileOptions(vae=vae)).weights["vae"].path == vae
    with pytest.raises(InputError, match="holds no VAE, only U-Net"):
        find_card(str(folder), FileOptions(vae=write(tmp_path / "unet.safetensors", unet(768))))
    with pytest.raises(InputError, match="is a folder; give a safetensors file"):
        find_card(str(folder), FileOptions(vae=folder))


@pytest.mark.parametrize(("kind", "factor"), [("sd1", 0.18215), ("sdxl", 0.13025)])
def test_another_vae_scales_latents_as_the_models_kind_does(kind, factor, saved, tmp_path):
    """A file with a VAE does not say for which kind it is."""
    _, pipe, folder, file = saved(kind)
    vae = ldm.save(ldm.ldm_vae(pipe.vae), tmp_path / "vae.safetensors")
    for card in (find_card(str(folder), FileOptions(vae=vae)), find_card(str(file), FileOptions(folder, vae))):
        made = fastdiff.Pipeline.from_card(card, Load.of(device="cpu"))
        assert card.weights["vae"].path == vae and made.vae.config.scaling_factor == factor
    alone = fastdiff.AutoencoderKL.from_single_file(vae, config=folder)
    given = fastdiff.Pipeline.from_single_file(file, config=folder, vae=alone, device="cpu")
    assert given.vae.config.scaling_factor == factor


def test_a_vae_alone_is_sd1s_without_a_config_as_for_diffusers(saved, tmp_path):
    state = ldm.ldm_vae(saved("sdxl").pipe.vae)
    folder, _ = place_of_part(ldm.save(state, tmp_path / "vae.safetensors"), registry.VAE)
    assert infer_diffusers_model_type(state) == "v1" and folder == CONFIGS / "sd1" / "vae"
    assert AutoencoderKLConfig.from_mapping(read_json(folder / "config.json"), folder).scaling_factor == 0.18215
    inside, _ = place_of_part(write(tmp_path / "sdxl.safetensors", SDXL), registry.VAE)
    assert AutoencoderKLConfig.from_mapping(read_json(inside / "config.json"), inside).scaling_factor == 0.13025


def test_a_unet_alone_draws_with_given_parts(saved, tmp_path):
    _, pipe, folder, file = saved("sd1")
    whole = fastdiff.Pipeline.from_single_file(file, config=folder, device="cpu")
    path = ldm.save(ldm.prefixed("model.diffusion_model.", ldm.ldm_unet(pipe.unet)), tmp_path / "unet.safetensors")
    parts = {name: getattr(whole, name) for name in ("vae", "text_encoder", "tokenizer")}
    made = fastdiff.Pipeline.from_single_file(path, config=folder, device="cpu", **parts)
    folders = fastdiff.Pipeline.from_pretrained(folder, device="cpu")
    assert torch.equal(drawn(made), drawn(folders)) and torch.equal(drawn(whole), drawn(folders))


def drawn(pipe):
    """Return a picture of one step. Models that are called once are not traced."""
    for model in pipe.models:
        model.use_graphs = False
    return pipe("a cat", num_inference_steps=1, output_type="pt", seed=5).images


def test_the_hash_is_the_files(saved):
    import hashlib

    _, _, folder, file = saved("sd1")
    card = find_card(str(file), FileOptions(config=folder))
    assert begin_hash(card, None).result() == hashlib.sha256(file.read_bytes()).hexdigest()
    assert begin_files_hash(card, None).result() != begin_files_hash(find_card(str(folder)), None).result()
