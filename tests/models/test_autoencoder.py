"""AutoencoderKL: strict loading, the same bits in any batch, finite output if 16 bits overflow, and errors."""

import json

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff import AutoencoderKL, InputError, NonFiniteError
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.weights import diffusers_keys, split_stacked

FILE = "diffusion_pytorch_model.safetensors"
OPTIONS = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


@pytest.fixture
def saved(randomise):
    """Save a tiny AutoencoderKL in a folder. Return the folder."""

    def save(folder, save_options=None, **options):
        randomise(diffusers.AutoencoderKL(**OPTIONS | options)).save_pretrained(folder, **save_options or {})
        return folder

    return save


@pytest.fixture
def folder(saved, tmp_path):
    return saved(tmp_path)


def load(folder, dtype=torch.float32, variant=None):
    return AutoencoderKL.from_folder(folder, Load.of(variant=variant, dtype=dtype, device="cpu"))


def edit_weights(folder, edit) -> None:
    state = load_file(folder / FILE)
    edit(state)
    save_file(state, folder / FILE)


def edit_config(folder, **options) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def assert_same_weights(ours, theirs) -> None:
    found = {
        key: each
        for name, tensor in ours.state_dict().items()
        for key, each in split_stacked(tensor, diffusers_keys(ours, name)).items()
    }
    assert found.keys() == theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)


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
def test_the_weights_that_diffusers_loads(saved, tmp_path, save_options, dtype):
    folder, variant = saved(tmp_path, save_options), save_options.get("variant")
    theirs = diffusers.AutoencoderKL.from_pretrained(
        folder, variant=variant, torch_dtype=dtype, low_cpu_mem_usage=False
    ).eval()
    ours = load(folder, dtype, variant)
    assert_same_weights(ours, theirs.state_dict())
    assert ours.dtype == dtype and not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


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
    assert_same_weights(load(folder), theirs)


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"norm_num_groups": 7}, "correct this option"),
        ({"_class_name": 3}, "describes a 3, but AutoencoderKL is wanted"),
        ({"up_block_types": ["UpDecoderBlock2D"]}, "must have the same length"),
        ({"down_block_types": ["DownEncoderBlock2D", "DownBlock2D"]}, "down_block_types: block type 'DownBlock2D'"),
        ({"sample_size": [16, 16, 16]}, "sample_size: [16, 16, 16] is not a whole number"),
        ({"latent_channels": 5}, "latent_channels is 5, but 4 in the weights"),
        ({"flavour": 1}, "unknown option flavour"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_such_model(folder, options, named):
    edit_config(folder, **options)
    assert_refused(folder, "config.json", named)


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json does not exist")


@pytest.fixture
def vae(folder):
    return load(folder)


@pytest.mark.parametrize("tiling", [False, True], ids=["whole", "tiles"])
def test_the_same_bits_in_any_company(vae, tiling):
    vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = tiling, 8, 16
    z, x = torch.randn(5, 4, 12, 12), torch.randn(5, 3, 24, 24)
    samples, parameters = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
    for i in range(5):
        assert torch.equal(vae.decode(z[i : i + 1]).sample[0], samples[i])
        assert torch.equal(vae.encode(x[i : i + 1]).latent_dist.parameters[0], parameters[i])


def test_a_call_is_an_encoding_and_a_decoding(vae):
    x = torch.randn(2, 3, 8, 8)
    latents = vae.encode(x).latent_dist
    assert torch.equal(vae(x).sample, vae.decode(latents.mode()).sample)
    seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
    drawn = vae(x, sample_posterior=True, generator=seeded[0], return_dict=False)[0]
    assert torch.equal(drawn, vae.decode(latents.sample(seeded[1]), return_dict=False)[0])
    assert not torch.equal(drawn, vae(x).sample)


def loud(vae, factor=1e5):
    """Make activations in the decoder and encoder far exceed 65,504. Norms bring them back into range."""
    for conv in (vae.decoder.up_blocks[0].upsamplers[0].conv, vae.encoder.down_blocks[0].resnets[0].conv1):
        conv.weight.data *= factor
        conv.bias.data *= factor
    return vae


def test_these_weights_do_overflow(vae):
    """The tests below can fail: computed in 16 bits throughout, as in diffusers, the output is not finite."""
    half = loud(vae).half()
    for run, x in ((half._decode, torch.randn(1, 4, 4, 4)), (half._encode, torch.randn(1, 8, 8, 3))):
        assert not run(x.half()).isfinite().all()


@pytest.mark.parametrize("force_upcast", [True, False], ids=["by rule", "after a NaN"])
def test_float16_that_overflows_is_computed_in_float32(saved, tmp_path, caplog, force_upcast):
    vae = loud(load(saved(tmp_path, force_upcast=force_upcast))).half()
    wide = loud(load(tmp_path)).half().float()  # the same weights
    z, x = torch.randn(3, 4, 4, 4).half(), torch.randn(3, 3, 8, 8).half()
    for _ in range(2):
        sample, parameters = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
    assert (sample.dtype, parameters.dtype) == (torch.float16, torch.float16)
    assert torch.equal(sample, wide.decode(z.float()).sample.half())
    assert torch.equal(parameters, wide.encode(x.float()).latent_dist.parameters.half())
    assert sample.isfinite().all() and sample.std() > 0
    said = ["the VAE's output was NaN or infinite in float16; computed again in float32"]
    assert caplog.messages == ([] if force_upcast else said)


def test_only_the_picture_that_overflows_is_computed_again(saved, tmp_path, monkeypatch):
    vae, dtypes = load(saved(tmp_path, force_upcast=False), torch.float16), []
    in_turn = AutoencoderKL._in_turn

    def spoil(self, half, x, dtype):
        dtypes.append((dtype, len(x)))
        y = in_turn(self, half, x, dtype)
        if dtype == torch.float16:
            y[1, 0, 0, 0] = float("inf")
        return y

    z = torch.randn(3, 4, 4, 4).half()
    expected = vae.decode(z).sample
    monkeypatch.setattr(AutoencoderKL, "_in_turn", spoil)
    found = vae.decode(z).sample
    assert dtypes == [(torch.float16, 3), (torch.float32, 1)]
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-2 * float(expected[1].abs().max()))


def test_bfloat16_has_the_range(vae, caplog):
    z = torch.randn(2, 4, 4, 4)
    expected = loud(vae).decode(z).sample
    found = vae.bfloat16().decode(z).sample
    assert found.dtype == torch.float32 and not caplog.messages
    assert (found - expected).norm() <= 0.03 * expected.norm()


def test_what_nothing_makes_finite_stays_so(vae):
    vae = vae.bfloat16()
    vae.decoder.conv_out.bias.data.fill_(float("inf"))
    assert not vae.decode(torch.randn(1, 4, 4, 4)).sample.isfinite().any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda vae: vae.decode(3), "z: 3 is not a tensor"),
        (lambda vae: vae.decode(torch.zeros(1, 4, 4, 4, dtype=torch.int64)), "z: it is torch.int64"),
        (lambda vae: vae.decode(torch.zeros(1, 3, 4, 4)), r"z: expected \(N, 4, H, W\), got \(1, 3, 4, 4\)"),
        (lambda vae: vae.decode(torch.zeros(0, 4, 4, 4)), "z: expected"),
        (lambda vae: vae.decode(torch.zeros(1, 4, 4, 4, device="meta")), "z: it is a torch.strided tensor on meta"),
        (lambda vae: vae.decode(torch.zeros(1, 4, 4, 4), return_dict=1), "return_dict: 1 is not true or false"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 1, 4)), "x: 1 x 4 is too small; each side must be at least 2"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 8, 8)).latent_dist.sample([]), "generator: 0 given for 1 pictures"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 8, 8)).latent_dist.sample(7), "generator: 7 is not a generator"),
        (lambda vae: vae(torch.zeros(1, 3, 8, 8), sample_posterior="no"), "sample_posterior: 'no' is not"),
        (lambda vae: vae.encode(torch.zeros(1, 3, 8, 8, requires_grad=True)), "x: it requires grad"),
    ],
)
def test_bad_input_is_one_line(vae, call, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        call(vae)
    assert "\n" not in str(error.value)
