"""Qwen3 as a text encoder, compared with transformers: every option, both classes' folders, any batch and padding."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastdiff import InputError, NonFiniteError, Qwen3Model
from fastdiff.checkpoints.weights import diffusers_shapes
from fastdiff.models.qwen3 import MULTIPLE

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
CONFIGS = {
    "tiny": TINY,
    "default-rope": {key: value for key, value in TINY.items() if key != "rope_parameters"},
    "all-key-heads": TINY | {"num_key_value_heads": 4},
    "one-key-head": TINY | {"num_key_value_heads": 1, "num_hidden_layers": 1},
    "narrow": TINY | {"head_dim": 2, "rms_norm_eps": 1e-3},
    "biases": TINY | {"attention_bias": True},
    "odd": TINY | {"hidden_size": 30, "intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 3},
}


@pytest.fixture
def save(tmp_path, randomise):
    """Save a random transformers model. Return its decoder and its folder."""

    def save(config=TINY, kind=transformers.Qwen3Model, **options):
        model = kind(transformers.Qwen3Config(**config))
        randomise(model)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.add_(1)
        model.save_pretrained(tmp_path / "text_encoder", **options)
        return getattr(model, "model", model), tmp_path / "text_encoder"

    return save


def prompts(n=3, length=40):
    return torch.randint(0, 99, (n, length), generator=torch.Generator().manual_seed(n))


def mask_of(*spans, length=40):
    mask = torch.zeros(len(spans), length, dtype=torch.int64)
    for row, (first, last) in zip(mask, spans, strict=True):
        row[first:last] = 1
    return mask


MASK = mask_of((0, 40), (0, 7), (5, 40))


def theirs_of(model, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, output_hidden_states=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_those_of_transformers(config, save):
    model, folder = save(config)
    ours = Qwen3Model.from_pretrained(folder)
    for ids, mask in (
        (prompts(), None),
        (prompts(), MASK),
        (prompts(2, 1), None),
        (prompts(1, MULTIPLE + 1).int(), None),
    ):
        expected, output = theirs_of(model, ids, mask), ours(ids, mask, output_hidden_states=True)
        pairs = [(output.last_hidden_state, expected.last_hidden_state)]
        for mine, other in [*pairs, *zip(output.hidden_states, expected.hidden_states, strict=True)]:
            other = other if mask is None else other * mask[..., None]
            assert mine.shape == other.shape
            assert (mine - other).abs().max() <= 1e-5 * other.abs().max()
        if config["num_hidden_layers"] > 1:
            assert torch.equal(ours.penultimate_states(ids, mask), output.hidden_states[-2])


def test_folders_of_the_language_model_load(save):
    for kind in (transformers.Qwen3Model, transformers.Qwen3ForCausalLM):
        model, folder = save(kind=kind)
        expected = theirs_of(model, prompts()).last_hidden_state
        torch.testing.assert_close(Qwen3Model.from_pretrained(folder)(prompts())[0], expected, rtol=1e-5, atol=1e-5)


def test_folders_in_shards_load(save):
    model, folder = save(kind=transformers.Qwen3ForCausalLM, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    expected = theirs_of(model, prompts()).last_hidden_state
    torch.testing.assert_close(Qwen3Model.from_pretrained(folder)(prompts())[0], expected, rtol=1e-5, atol=1e-5)
    next(folder.glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(InputError, match="00002-of"):
        Qwen3Model.from_pretrained(folder)


def test_configs_of_older_transformers_load(save):
    model, folder = save()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "float32"}))
    expected = theirs_of(model, prompts()).last_hidden_state
    torch.testing.assert_close(Qwen3Model.from_pretrained(folder)(prompts())[0], expected, rtol=1e-5, atol=1e-5)


def test_the_plain_tuple_is_transformers(save):
    model, folder = save()
    with torch.no_grad():
        expected = model(prompts(), return_dict=False, use_cache=False)
    ours = Qwen3Model.from_pretrained(folder)(prompts(), return_dict=False)
    assert [each.shape for each in ours] == [each.shape for each in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_prompt_has_the_same_bits_in_any_batch_and_padding(save, dtype):
    ours = Qwen3Model.from_pretrained(save()[1], dtype=dtype)
    ids = prompts()
    states = ours.penultimate_states(ids, MASK)
    assert not states[1, 7:].any() and not states[2, :5].any()
    assert torch.equal(ours.penultimate_states(ids[1:2, :7]), states[1:2, :7])
    assert torch.equal(ours.penultimate_states(ids[2:, 5:]), states[2:, 5:])
    assert torch.equal(ours.penultimate_states(ids.flip(0), MASK.flip(0).bool()), states.flip(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_exact_as_transformers(save, dtype):
    model, folder = save()
    exact = theirs_of(model.double(), prompts()).last_hidden_state
    theirs = theirs_of(model.to(dtype), prompts()).last_hidden_state
    ours = Qwen3Model.from_pretrained(folder, dtype=dtype)(prompts())[0]
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_weights_in_8_bits(save):
    model, folder = save()
    expected = theirs_of(model, prompts()).last_hidden_state
    ours = Qwen3Model.from_pretrained(folder, precision="int8")(prompts())[0]
    assert 0 < (ours - expected).abs().max() <= 0.1 * expected.abs().max()


def test_saved_folders_are_read_by_transformers(save, tmp_path):
    model, folder = save()
    Qwen3Model.from_pretrained(folder).save_pretrained(tmp_path / "again")
    again = transformers.Qwen3Model.from_pretrained(tmp_path / "again")
    assert again.config.rope_parameters == model.config.rope_parameters
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def rewrite(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def test_wrong_weights_are_named(save):
    key = "layers.1.mlp.up_proj.weight"
    _, folder = save()
    rewrite(folder, lambda state: state.pop(key))
    with pytest.raises(InputError, match=f"missing: {key}"):
        Qwen3Model.from_pretrained(folder)
    rewrite(folder, lambda state: state.update({key: torch.full((48, 32), torch.nan)}))
    with pytest.raises(NonFiniteError, match=key):
        Qwen3Model.from_pretrained(folder)
    rewrite(folder, lambda state: state.update({key: torch.zeros(48, 32), "layers.1.mlp.bias": torch.zeros(48)}))
    with pytest.raises(InputError, match=r"unexpected: layers\.1\.mlp\.bias"):
        Qwen3Model.from_pretrained(folder)


REFUSED_CONFIGS = {
    "yarn": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}, "rope_parameters .*'yarn'"),
    "scaling": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters .*'linear'"),
    "windows": ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
    "window-layers": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*full_attention"),
    "layer-types": ({"layer_types": 3}, "layer_types: 3 is not a list"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
    "odd-head": ({"head_dim": 7}, "head_dim: 7 is odd"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    "unknown": ({"experts": 8}, "unknown option experts"),
    "another-model": ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS)
def test_a_wrong_config_is_named(options, message):
    with pytest.raises(InputError, match=message):
        Qwen3Model.from_config(TINY | options)


REFUSED = {
    "no-tensor": (([1],), {}, "input_ids: .* is not a tensor"),
    "floats": ((torch.zeros(1, 3),), {}, "input_ids: it is torch.float32"),
    "one-row": ((torch.zeros(3).long(),), {}, "input_ids: its shape"),
    "none": ((torch.zeros(0, 3).long(),), {}, "input_ids: its shape"),
    "range": ((torch.full((1, 3), 99),), {}, "input_ids: 99 is out of range; use 0 to 98"),
    "mask": ((prompts(), [1]), {}, "attention_mask: .* is not a tensor"),
    "mask-shape": ((prompts(), MASK[:2]), {}, r"attention_mask: its shape is \(2, 40\); it must be \(3, 40\)"),
    "mask-gap": ((prompts(1, 3), torch.tensor([[1, 0, 1]])), {}, "attention_mask: a row has padding between tokens"),
    "mask-empty": ((prompts(1, 3), torch.zeros(1, 3).long()), {}, "attention_mask: a row is all padding"),
    "positions": ((prompts(),), {"position_ids": MASK}, "position_ids: "),
    "keys": ((prompts(),), {"past_key_values": ()}, "past_key_values: "),
    "embeds": ((prompts(),), {"inputs_embeds": MASK}, "inputs_embeds: "),
    "cache": ((prompts(),), {"use_cache": True}, "use_cache: "),
    "attentions": ((prompts(),), {"output_attentions": True}, "output_attentions: "),
    "hidden-states": ((prompts(),), {"output_hidden_states": 2}, "output_hidden_states: "),
    "dict": ((prompts(),), {"return_dict": None}, "return_dict: None is not true or false"),
}


@pytest.mark.parametrize(("args", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(args, options, message):
    with pytest.raises(InputError, match=message):
        Qwen3Model.from_config(TINY)(*args, **options)


def test_a_model_of_one_layer_has_no_penultimate_states():
    with pytest.raises(InputError, match="the model has one layer"):
        Qwen3Model.from_config(TINY | {"num_hidden_layers": 1}).penultimate_states(prompts())


def test_the_real_config():
    """The config of Z-Image's text encoder gives as many parameters as in transformers."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    with torch.device("meta"):
        theirs = transformers.Qwen3Model(transformers.Qwen3Config.from_dict(config))
        ours = Qwen3Model.from_config(config)
    assert diffusers_shapes(ours) == {key: tensor.shape for key, tensor in theirs.state_dict().items()}
