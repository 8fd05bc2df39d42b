"""CLIP's image encoder, compared with transformers: every option, both layouts of keys, any batch."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastdiff import CLIPVisionModelWithProjection, InputError, NonFiniteError
from fastdiff.checkpoints.weights import diffusers_shapes

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "projection_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 10,
}
CONFIGS = {
    "vit-h": TINY | {"hidden_act": "gelu"},
    "vit-l": TINY,
    "pixels-left-over": TINY | {"patch_size": 7, "num_hidden_layers": 1},
    "one-patch": TINY | {"patch_size": 30, "num_attention_heads": 1},
    "odd": TINY | {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 37, "projection_dim": 5},
    "other-channels": TINY | {"num_channels": 4, "layer_norm_eps": 1e-3},
}


@pytest.fixture
def save(tmp_path, randomise):
    """Save a random transformers model. Return it and its folder."""

    def save(config=TINY, **options):
        model = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**config))
        randomise(model)
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, torch.nn.LayerNorm):
                    layer.weight.add_(1)
        model.save_pretrained(tmp_path / "image_encoder", **options)
        return model, tmp_path / "image_encoder"

    return save


def pixels(count=2, channels=3):
    return torch.randn(count, channels, 30, 30, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_those_of_transformers(config, save):
    model, folder = save(config)
    ours = CLIPVisionModelWithProjection.from_pretrained(folder)
    x = pixels(channels=config.get("num_channels", 3))
    with torch.no_grad():
        theirs = model(x, output_hidden_states=True)
    output = ours(x, output_hidden_states=True)
    pairs = [(output.image_embeds, theirs.image_embeds), (output.last_hidden_state, theirs.last_hidden_state)]
    for mine, expected in [*pairs, *zip(output.hidden_states, theirs.hidden_states, strict=True)]:
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(ours.penultimate_states(x), output.hidden_states[-2])


def test_the_plain_tuple_is_transformers(save):
    model, folder = save()
    with torch.no_grad():
        theirs = model(pixels(), return_dict=False)
    ours = CLIPVisionModelWithProjection.from_pretrained(folder)(pixels(), return_dict=False)
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_picture_has_the_same_bits_in_any_batch(save, dtype):
    model = CLIPVisionModelWithProjection.from_pretrained(save()[1], dtype=dtype)
    together, states = model(pixels(5)), model.penultimate_states(pixels(5))
    for i in range(5):
        alone = pixels(5)[i : i + 1]
        assert torch.equal(model(alone).image_embeds[0], together.image_embeds[i])
        assert torch.equal(model.penultimate_states(alone)[0], states[i])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(save, dtype):
    model, folder = save()
    with torch.no_grad():
        expected, theirs = model(pixels())[0], model.to(dtype)(pixels().to(dtype))[0].float()
    ours = CLIPVisionModelWithProjection.from_pretrained(folder, dtype=dtype)(pixels())[0]
    assert ours.dtype == dtype
    assert (ours.float() - expected).norm() <= 2 * (theirs - expected).norm()


def rewrite(folder, edit):
    """Change the weights of a folder, whose keys lose their prefix."""
    path = folder / "model.safetensors"
    state = {key.removeprefix("vision_model."): tensor for key, tensor in load_file(path).items()}
    edit(state)
    save_file(state, path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_both_layouts_of_keys_in_every_file(save, file, prefix):
    _, folder = save()
    expected = CLIPVisionModelWithProjection.from_pretrained(folder)(pixels())[0]
    rewrite(folder, lambda state: state.update({"embeddings.position_ids": torch.arange(10)[None]}))
    state = load_file(folder / "model.safetensors")
    state = {key if key.startswith("visual_") else prefix + key: tensor for key, tensor in state.items()}
    (folder / "model.safetensors").unlink()
    (torch.save if file.endswith("bin") else save_file)(state, folder / file)
    assert torch.equal(CLIPVisionModelWithProjection.from_pretrained(folder)(pixels())[0], expected)


def test_transformers_reads_what_is_saved(save, tmp_path):
    model, folder = save()
    CLIPVisionModelWithProjection.from_pretrained(folder).save_pretrained(tmp_path / "again")
    again = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in model.state_dict().items())


def test_the_encoder_of_a_pipelines_folder(save, tmp_path):
    _, folder = save()
    expected = CLIPVisionModelWithProjection.from_pretrained(folder)(pixels())[0]
    (tmp_path / "model_index.json").write_text("{}")
    assert torch.equal(CLIPVisionModelWithProjection.from_pretrained(tmp_path)(pixels())[0], expected)


def test_every_parameter_is_transformers(save):
    model, _ = save()
    theirs = {key.removeprefix("vision_model."): tensor.shape for key, tensor in model.state_dict().items()}
    assert diffusers_shapes(CLIPVisionModelWithProjection.from_config(TINY)) == theirs


FC1 = "encoder.layers.0.mlp.fc1.weight"
BAD_CONFIGS = {
    "activation": ({"hidden_act": "relu"}, "hidden_act: 'relu' is not one of quick_gelu, gelu"),
    "another-model": ({"model_type": "siglip_vision_model"}, "model_type 'siglip_vision_model' is not supported"),
    "unknown": ({"rope_theta": 1e4}, "unknown option rope_theta"),
    "heads": ({"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size 32"),
    "patches": ({"patch_size": 31}, "patch_size: 31 is more than image_size 30"),
    "more-layers": ({"num_hidden_layers": 900}, "num_hidden_layers is 900, but 3 in the weights"),
    "larger-pictures": ({"image_size": 4096}, "image_size is 167282, but 10 in the weights"),
    "wider": ({"intermediate_size": 65536}, "intermediate_size is 65536, but 48 in the weights"),
    "projection": ({"projection_dim": 65536}, "projection_dim is 65536, but 24 in the weights"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_bad_config_is_named(changes, message, save):
    _, folder = save()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=message) as error:
        CLIPVisionModelWithProjection.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_bad_weights_are_named(save):
    _, folder = save()
    rewrite(folder, lambda state: state.pop(FC1))
    with pytest.raises(InputError, match=f"missing: {FC1}"):
        CLIPVisionModelWithProjection.from_pretrained(folder)
    rewrite(folder, lambda state: state.update({FC1: torch.full((48, 32), torch.nan)}))
    with pytest.raises(NonFiniteError, match=FC1):
        CLIPVisionModelWithProjection.from_pretrained(folder)


REFUSED = {
    "no-tensor": (([1.0],), {}, "pixel_values: .* is not a tensor"),
    "bytes": ((torch.zeros(1, 3, 30, 30, dtype=torch.uint8),), {}, "pixel_values: it is torch.uint8"),
    "another-size": ((torch.zeros(1, 3, 32, 30),), {}, r"pixel_values: its shape is \(1, 3, 32, 30\)"),
    "one-picture": ((torch.zeros(3, 30, 30),), {}, "pixel_values: its shape"),
    "none": ((torch.zeros(0, 3, 30, 30),), {}, "pixel_values: its shape"),
    "interpolation": ((pixels(),), {"interpolate_pos_encoding": True}, "interpolate_pos_encoding: "),
    "attentions": ((pixels(),), {"output_attentions": True}, "output_attentions: "),
    "hidden-states": ((pixels(),), {"output_hidden_states": 2}, "output_hidden_states: "),
    "dict": ((pixels(),), {"return_dict": None}, "return_dict: None is not true or false"),
}


@pytest.mark.parametrize(("args", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, options, message):
    with pytest.raises(InputError, match=message):
        CLIPVisionModelWithProjection.from_config(TINY)(*args, **options)


def test_real_configs():
    """The configs of the IP-Adapters' encoders give as many parameters as in transformers."""
    huge = {"architectures": ["CLIPVisionModelWithProjection"], "_name_or_path": "./image_encoder", "dropout": 0.0}
    huge |= {"hidden_act": "gelu", "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    huge |= {"num_attention_heads": 16, "patch_size": 14, "projection_dim": 1024, "torch_dtype": "float16"}
    giant = huge | {"hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48, "projection_dim": 1280}
    for config in (huge, giant):
        sizes = {
            key: value for key, value in config.items() if key not in ("architectures", "_name_or_path", "dropout")
        }
        with torch.device("meta"):
            theirs = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**sizes))
            ours = CLIPVisionModelWithProjection.from_config(config)
        assert ours.num_parameters() == theirs.num_parameters()
