"""The VAE is loaded strictly, and has the bits that diffusers' own loader gives it."""

import json

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff.errors import InputError, NonFiniteError
from fastdiff.models.autoencoder import decode_latents, load_autoencoder

FILE = "diffusion_pytorch_model.safetensors"
OPTIONS = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


@pytest.fixture
def saved(randomise):
    """Save a tiny AutoencoderKL in a folder, which is given."""

    def save(folder, save_options=None, **options):
        randomise(diffusers.AutoencoderKL(**OPTIONS | options)).save_pretrained(folder, **save_options or {})
        return folder

    return save


@pytest.fixture
def folder(saved, tmp_path):
    return saved(tmp_path)


def load(folder, dtype=torch.float32, variant=None):
    return load_autoencoder(folder, variant=variant, dtype=dtype, device=torch.device("cpu"))


def edit_weights(folder, edit) -> None:
    state = load_file(folder / FILE)
    edit(state)
    save_file(state, folder / FILE)


def edit_config(folder, **options) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def assert_refused(folder, *named: str, kind=InputError, **options) -> None:
    with pytest.raises(kind) as error:
        load(folder, **options)
    message = str(error.value)
    assert all(name in message for name in (str(folder), *named)), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "save_options",
    [{}, {"variant": "fp16"}, {"max_shard_size": "20KB"}, {"safe_serialization": False}],
    ids=["single", "variant", "shards", "bin"],
)
def test_the_same_bits_as_diffusers_loads(saved, tmp_path, save_options, dtype):
    folder, variant = saved(tmp_path, save_options), save_options.get("variant")
    theirs = diffusers.AutoencoderKL.from_pretrained(
        folder, variant=variant, torch_dtype=dtype, low_cpu_mem_usage=False
    ).eval()
    ours = load(folder, dtype, variant)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor) and ours.state_dict()[name].stride() == tensor.stride()
    assert ours.dtype == dtype and not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    latents = torch.randn(2, 4, 4, 4)
    assert torch.equal(decode_latents(ours, latents), decode_latents(theirs, latents))


def test_a_missing_tensor_is_named(folder):
    edit_weights(folder, lambda state: state.pop("decoder.conv_out.weight"))
    assert_refused(folder, "does not fit AutoencoderKL: missing: decoder.conv_out.weight; use the weights")


def test_an_unexpected_tensor_is_named(folder):
    edit_weights(folder, lambda state: state.update(ema=torch.zeros(1)))
    assert_refused(folder, "unexpected: ema;")


def test_a_misshapen_tensor_is_named(folder):
    edit_weights(folder, lambda state: state.update({"post_quant_conv.bias": torch.zeros(5)}))
    assert_refused(folder, "wrong shape: post_quant_conv.bias (5,) for (4,);")


@pytest.mark.parametrize("option", ["use_quant_conv", "use_post_quant_conv"])
@pytest.mark.parametrize(("was", "problem"), [(True, "unexpected"), (False, "missing")], ids=["off", "on"])
def test_an_option_that_was_turned(saved, tmp_path, option, was, problem):
    folder = saved(tmp_path, **{option: was})
    edit_config(folder, **{option: not was})
    assert_refused(folder, f"{problem}: ", f"{option.removeprefix('use_')}.weight")


def test_nan(folder):
    edit_weights(folder, lambda state: state["decoder.conv_in.bias"].fill_(float("nan")))
    assert_refused(folder, "NaN or infinity in decoder.conv_in.bias", kind=NonFiniteError)


def test_values_beyond_the_dtype(folder):
    edit_weights(folder, lambda state: state["decoder.conv_in.bias"].fill_(1e6))
    assert_refused(folder, "decoder.conv_in.bias", "torch.float16", dtype=torch.float16)


def test_old_names_load_as_in_diffusers(folder):
    def age(state):
        old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        for new, name in old.items():
            for key in [key for key in state if f".{new}." in key]:
                state[key.replace(f".{new}.", f".{name}.")] = state.pop(key)
        state["embeddings.position_ids"] = torch.arange(4)

    edit_weights(folder, age)
    theirs = diffusers.AutoencoderKL.from_pretrained(folder, low_cpu_mem_usage=False).state_dict()
    ours = load(folder).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"act_fn": None},
        {"norm_num_groups": 0},
        {"block_out_channels": ["x"]},
        {"scaling_factor": None},
        {"scaling_factor": 0},
        {"force_upcast": "no"},
        {"latents_mean": [1, "x"]},
    ],
    ids=str,
)
def test_an_option_of_a_wrong_kind(folder, options):
    edit_config(folder, **options)
    assert_refused(folder, f"config.json: {next(iter(options))}: ")


@pytest.mark.parametrize("options", [{"norm_num_groups": 7}, {"_class_name": 3}], ids=str)
def test_a_config_that_diffusers_cannot_build(folder, options):
    edit_config(folder, **options)
    assert_refused(folder, "config.json: diffusers builds no AutoencoderKL from it")


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json does not exist")
