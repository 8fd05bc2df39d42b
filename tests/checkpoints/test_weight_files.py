"""Weight files: which are chosen, what their headers say, and configs that do not fit them."""

import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.checkpoints import weight_files
from fastdiff.checkpoints.configs.autoencoder import AutoencoderKLConfig
from fastdiff.checkpoints.configs.clip import CLIPTextConfig, CLIPTextConfigWithProjection
from fastdiff.checkpoints.configs.dit import DiTTransformer2DConfig
from fastdiff.checkpoints.configs.qwen3 import Qwen3Config
from fastdiff.checkpoints.configs.unet1d import UNet1DConfig
from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.checkpoints.configs.unet2d_condition import UNet2DConditionConfig
from fastdiff.checkpoints.configs.z_image import ZImageTransformer2DConfig
from fastdiff.checkpoints.hub import bundled_models
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.names import weights_name
from fastdiff.checkpoints.weights import diffusers_shapes, load_state_dict
from fastdiff.errors import InputError
from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.models.clip import CLIPTextModelWithProjection
from fastdiff.models.dit import DiTTransformer2DModel
from fastdiff.models.unet1d import UNet1DModel
from fastdiff.models.unet2d import UNet2DModel
from fastdiff.models.unet2d_condition import UNet2DConditionModel
from fastdiff.models.z_image import ZImageTransformer2DModel
from tests.support.planners import policy
from tests.support.timing import at_once

NAME = "diffusion_pytorch_model.safetensors"
UNET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
    "num_class_embeds": 5,
    "time_embedding_type": "learned",
    "num_train_timesteps": 10,
}
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 5}
UNET_CONDITION = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 4,
    "attention_head_dim": 2,
    "cross_attention_dim": 12,
    "encoder_hid_dim": 10,
    "num_class_embeds": 5,
    "time_cond_proj_dim": 6,
}
VAE = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
}
UNET_1D = policy(8, 16, in_channels=3, out_channels=3, time_embedding_type="fourier")
CLIP = {
    "vocab_size": 99,
    "hidden_size": 16,
    "intermediate_size": 24,
    "projection_dim": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 9,
}
Z_IMAGE = {
    "dim": 16,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "in_channels": 4,
    "cap_feat_dim": 8,
    "axes_dims": (4, 2, 2),
}
MODELS = {
    "clip": (CLIPTextModelWithProjection, CLIPTextConfigWithProjection, CLIP),
    "unet": (UNet2DModel, UNet2DConfig, UNET),
    "unet-condition": (UNet2DConditionModel, UNet2DConditionConfig, UNET_CONDITION),
    "unet-1d": (UNet1DModel, UNet1DConfig, UNET_1D),
    "dit": (DiTTransformer2DModel, DiTTransformer2DConfig, DIT),
    "vae": (AutoencoderKL, AutoencoderKLConfig, VAE),
    "z-image": (ZImageTransformer2DModel, ZImageTransformer2DConfig, Z_IMAGE),
}


def save(folder, kind: str, extension: str) -> None:
    """Save the config and weights of a tiny model in `folder`."""
    model, config, options = MODELS[kind]
    with torch.device("meta"):
        shapes = diffusers_shapes(model.from_config(config(**options)))
    state = {key: torch.full(shape, 0.1) for key, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(options))
    path = folder / weights_name(extension, library=config.LIBRARY)
    if extension == "bin":
        torch.save(state, path)
    else:
        save_file(state, path)


def load(folder, kind: str, **changes: object):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return MODELS[kind][0].from_folder(folder, Load.of(device="cpu"))


@pytest.mark.parametrize("extension", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_fits_is_loaded(tmp_path, kind, extension):
    save(tmp_path, kind, extension)
    assert load(tmp_path, kind).config == MODELS[kind][1](**MODELS[kind][2])


@pytest.mark.parametrize("name", ["emoji64", "emoji64-dit"])
def test_a_header_tells_the_shapes_of_the_tensors(name):
    folder = next(path.parent for path in bundled_models()[name].glob(f"*/{NAME}"))
    shapes = weight_files.read_shapes(weight_files.find(folder))
    assert shapes == {key: tuple(tensor.shape) for key, tensor in load_state_dict(folder).items()}


@pytest.mark.parametrize(
    ("kind", "option", "value", "named"),
    [
        ("unet", "num_class_embeds", 90_000, "num_class_embeds"),
        ("unet", "num_train_timesteps", 90_000, "num_train_timesteps"),
        ("unet", "layers_per_block", 60, "layers_per_block"),
        ("unet", "block_out_channels", [8, 60_000], r"block_out_channels\[1\]"),
        ("unet", "time_embedding_dim", 60_000, "time_embedding_dim"),
        ("unet", "in_channels", 60_000, "in_channels"),
        ("unet", "out_channels", 60_000, "out_channels"),
        ("unet-condition", "num_class_embeds", 90_000, "num_class_embeds"),
        ("unet-condition", "layers_per_block", 60, r"layers_per_block\[0\]"),
        ("unet-condition", "block_out_channels", [8, 60_000], r"block_out_channels\[1\]"),
        (
            "unet-condition",
            "transformer_layers_per_block",
            60,
            "transformer_layers_per_block of down_blocks.0, layer 0,",
        ),
        (
            "unet-condition",
            "reverse_transformer_layers_per_block",
            [1, 60],
            "transformer_layers_per_block of up_blocks.1",
        ),
        ("unet-condition", "cross_attention_dim", 60_000, "cross_attention_dim"),
        ("unet-condition", "encoder_hid_dim", 60_000, "encoder_hid_dim"),
        ("unet-condition", "time_cond_proj_dim", 60_000, "time_cond_proj_dim"),
        ("unet-condition", "time_embedding_dim", 60_000, "time_embedding_dim"),
        ("unet-condition", "in_channels", 60_000, "in_channels"),
        ("unet-condition", "out_channels", 60_000, "out_channels"),
        ("unet-condition", "conv_in_kernel", 31, "conv_in_kernel"),
        ("unet-1d", "layers_per_block", 60, r"1 \+ layers_per_block"),
        ("unet-1d", "block_out_channels", [8, 60_000], r"block_out_channels\[1\]"),
        ("unet-1d", "time_embedding_dim", 60_000, "time_embedding_dim"),
        ("unet-1d", "in_channels", 60_000, r"in_channels \+ extra_in_channels"),
        ("unet-1d", "extra_in_channels", 60_000, r"in_channels \+ extra_in_channels"),
        ("unet-1d", "out_channels", 60_000, "out_channels"),
        ("unet-1d", "up_block_types", ["UpResnetBlock1D"] * 2, "up_block_types: its length"),
        ("clip", "num_hidden_layers", 1000, "num_hidden_layers"),
        ("clip", "vocab_size", 900_000, "vocab_size"),
        ("clip", "hidden_size", 60_000, "hidden_size"),
        ("clip", "intermediate_size", 60_000, "intermediate_size"),
        ("clip", "max_position_embeddings", 60_000, "max_position_embeddings"),
        ("clip", "projection_dim", 60_000, "projection_dim"),
        ("dit", "num_layers", 1000, "num_layers"),
        ("dit", "num_embeds_ada_norm", 90_000, "num_embeds_ada_norm"),
        ("dit", "attention_head_dim", 32_000, "num_attention_heads x attention_head_dim"),
        ("dit", "patch_size", 4, "patch_size"),
        ("vae", "block_out_channels", [8, 60_000], r"block_out_channels\[1\]"),
        ("vae", "layers_per_block", 60, "layers_per_block"),
        ("vae", "in_channels", 60_000, "in_channels"),
        ("vae", "out_channels", 60_000, "out_channels"),
        ("vae", "latent_channels", 60_000, "latent_channels"),
        ("z-image", "n_layers", 1000, "n_layers"),
        ("z-image", "n_refiner_layers", 1000, "n_refiner_layers"),
        ("z-image", "cap_feat_dim", 60_000, "cap_feat_dim"),
        ("z-image", "in_channels", 60_000, "in_channels x all_patch_size"),
    ],
)
def test_an_option_that_the_weights_were_not_saved_with_is_named(tmp_path, monkeypatch, kind, option, value, named):
    save(tmp_path, kind, "safetensors")
    monkeypatch.setattr(MODELS[kind][0], "from_config", None)  # nothing is built
    with at_once(0.2), pytest.raises(InputError, match=rf"config\.json: {named}.* in the weights") as error:
        load(tmp_path, kind, **{option: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("unet", "num_class_embeds", 90_000),
        ("unet", "num_train_timesteps", 90_000),
        ("unet", "block_out_channels", [8, 60_000]),
        ("unet", "time_embedding_dim", 60_000),
        ("unet", "in_channels", 60_000),
        ("unet", "out_channels", 60_000),
        ("unet-condition", "num_class_embeds", 90_000),
        ("unet-condition", "block_out_channels", [8, 60_000]),
        ("unet-condition", "cross_attention_dim", 60_000),
        ("unet-condition", "encoder_hid_dim", 60_000),
        ("unet-condition", "time_embedding_dim", 60_000),
        ("unet-condition", "in_channels", 60_000),
        ("clip", "num_hidden_layers", 1000),
        ("clip", "vocab_size", 900_000),
        ("clip", "intermediate_size", 60_000),
        ("clip", "max_position_embeddings", 60_000),
        ("clip", "projection_dim", 60_000),
        ("dit", "num_layers", 1000),
        ("unet-1d", "block_out_channels", [8, 60_000]),
        ("unet-1d", "time_embedding_dim", 60_000),
        ("unet-1d", "in_channels", 60_000),
        ("unet-1d", "out_channels", 60_000),
        ("dit", "num_embeds_ada_norm", 90_000),
        ("dit", "in_channels", 60_000),
        ("dit", "out_channels", 60_000),
        ("vae", "block_out_channels", [8, 60_000]),
        ("vae", "in_channels", 60_000),
        ("vae", "out_channels", 60_000),
        ("vae", "latent_channels", 60_000),
        ("z-image", "n_layers", 1000),
        ("z-image", "n_refiner_layers", 1000),
        ("z-image", "in_channels", 60_000),
    ],
)
def test_a_bin_must_be_as_large_as_its_config_asks(tmp_path, monkeypatch, kind, option, value):
    save(tmp_path, kind, "bin")
    monkeypatch.setattr(MODELS[kind][0], "from_config", None)
    with pytest.raises(InputError, match=rf"config\.json: {option} makes \d+ parameters, but the weights hold \d+"):
        load(tmp_path, kind, **{option: value})


@pytest.mark.parametrize("options", [{}, {"class_embed_type": "timestep"}, {"time_embedding_type": "fourier"}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_has_at_least_as_many_parameters_as_counted(kind, options):
    model, config, own = MODELS[kind]
    with torch.device("meta"):
        built = model.from_config(config(**(own | (options if kind == "unet" else {}))))
    total = sum(parameter.numel() for parameter in built.parameters())
    assert 0 < max(built.config.least_parameters.values()) < total
    shapes = diffusers_shapes(built)
    for option, place in built.config.places.items():
        assert weight_files.size_at(place, shapes) == place.size, option


@pytest.mark.parametrize(
    ("library", "variant", "name"),
    [
        ("diffusers", None, "diffusion_pytorch_model.safetensors"),
        ("diffusers", "fp16", "diffusion_pytorch_model.fp16.bin"),
        ("transformers", None, "model.safetensors"),
        ("transformers", "fp16", "model.fp16.safetensors"),
        ("transformers", None, "pytorch_model.bin"),
        ("transformers", "fp16", "pytorch_model.fp16.bin"),
    ],
)
def test_each_library_names_its_files_its_own_way(tmp_path, library, variant, name):
    (tmp_path / name).write_bytes(b"")
    assert [file.path.name for file in weight_files.find(tmp_path, variant, library)] == [name]
    other = "transformers" if library == "diffusers" else "diffusers"
    with pytest.raises(InputError, match=weights_name("safetensors", variant, other)):
        weight_files.find(tmp_path, variant, other)
    if variant:
        with pytest.raises(InputError, match=f"ask for one of its variants: {variant}"):
            weight_files.find(tmp_path, None, library)


def test_a_prefix_goes_where_no_two_keys_become_one():
    clip, unet = CLIPTextConfig(), UNet2DConfig()
    assert weight_files.own_keys({"text_model.a": 1, "b": 2}, clip) == {"a": 1, "b": 2}
    both = {"text_model.a": 1, "a": 2}
    assert weight_files.own_keys(both, clip) == weight_files.own_keys(both, unet) == both


def test_weights_that_a_model_does_not_have_go():
    assert weight_files.own_keys({"model.a": 1, "lm_head.weight": 2}, Qwen3Config()) == {"a": 1}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices among the files")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", [NAME, f"{NAME}.index.json", NAME.replace("safetensors", "bin")])
def test_what_is_no_file_is_refused_without_opening_it(tmp_path, name, kind):
    make = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}
    make[kind](tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is not a regular file"):
        load_state_dict(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices among the files")
def test_shards_that_are_no_files_or_have_no_possible_name_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for shard, named in (("pipe", "pipe is not a regular file"), ("x" * 300, "which does not exist"), ("C:w", "plain")):
        (tmp_path / f"{NAME}.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(InputError, match=named):
            load_state_dict(tmp_path)


def test_a_bin_that_unpacks_to_more_than_it_is_is_refused_before_it_does(tmp_path):
    name = NAME.replace("safetensors", "bin")
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "plain")
    with (
        zipfile.ZipFile(tmp_path / "plain") as plain,
        zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    with pytest.raises(InputError, match=rf"{name} unpacks to 400\d{{4}} bytes, more than its size"):
        load_state_dict(tmp_path)


@pytest.mark.parametrize("variant", ["x/../../../w", "**"])
def test_a_variant_leads_to_no_other_folder(tmp_path, variant):
    inside = tmp_path / "model" / "diffusion_pytorch_model.x"
    inside.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match="variant"):
        load_state_dict(tmp_path / "model", variant)
