"""CLIP's text encoders, compared with transformers: every option, every file layout, any batch."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastdiff import CLIPTextModel, CLIPTextModelWithProjection, InputError, NonFiniteError

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "projection_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "eos_token_id": 98,
    "bos_token_id": 97,
}
KINDS = {"plain": CLIPTextModel, "projection": CLIPTextModelWithProjection}
CONFIGS = {
    "sd15": TINY | {"eos_token_id": 2, "bos_token_id": 0},
    "sd21": TINY | {"eos_token_id": 2, "hidden_act": "gelu", "num_hidden_layers": 4},
    "new-end": TINY,
    "end-inside": TINY | {"eos_token_id": 7},
    "one-head": TINY | {"num_attention_heads": 1, "num_hidden_layers": 1},
    "narrow-heads": TINY | {"num_attention_heads": 8, "layer_norm_eps": 1e-3},
    "odd": TINY | {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 37, "projection_dim": 5},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def save(tmp_path, randomise):
    """Save a random transformers model. Return it and its folder."""

    def save(kind, config=TINY, **options):
        model = getattr(transformers, kind.__name__)(transformers.CLIPTextConfig(**config))
        randomise(model)
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, torch.nn.LayerNorm):
                    layer.weight.add_(1)
        model.save_pretrained(tmp_path / "encoder", **options)
        return model, tmp_path / "encoder"

    return save


def prompts(n=3, length=20, seed=0):
    """Return token ids as a tokenizer makes them: a start token, words, and end tokens as padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 97, (n, length), generator=generator)
    ids[:, 0] = 97
    for i in range(n):
        ids[i, 3 + 2 * i :] = 98
    return ids


def assert_equal_to(theirs, ours, kind):
    names = ["last_hidden_state", "text_embeds" if kind is CLIPTextModelWithProjection else "pooler_output"]
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    for mine, expected in [*pairs, *zip(ours.hidden_states, theirs.hidden_states, strict=True)]:
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 1e-4
        assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_those_of_transformers(kind, config, save):
    model, folder = save(kind, config)
    ours = kind.from_pretrained(folder)
    for ids in (prompts(), prompts(1, 7), prompts(2).int(), torch.full((1, 20), 7)):
        with torch.no_grad():
            theirs = model(ids, output_hidden_states=True)
        assert_equal_to(theirs, ours(ids, output_hidden_states=True), kind)


def test_the_first_output_and_the_plain_tuple_are_transformers(kind, save):
    model, folder = save(kind)
    ours = kind.from_pretrained(folder)
    with torch.no_grad():
        theirs = model(prompts(), return_dict=False)
    mine = ours(prompts(), return_dict=False)
    assert [each.shape for each in mine] == [each.shape for each in theirs]
    torch.testing.assert_close(ours(prompts())[0], theirs[0], rtol=0, atol=1e-4)
    assert ours(prompts()).hidden_states is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_prompt_has_the_same_bits_in_any_batch(kind, save, dtype):
    _, folder = save(kind)
    model, ids = kind.from_pretrained(folder, dtype=dtype), prompts(7)
    together, skipped = model(ids, output_hidden_states=True), model.prompt_embeds(ids, 1)
    for i in range(7):
        assert torch.equal(model.prompt_embeds(ids[i : i + 1], 1)[0], skipped[i])
        alone = model(ids[i : i + 1], output_hidden_states=True)
        assert torch.equal(alone[0][0], together[0][i]) and torch.equal(alone[1][0], together[1][i])
        for one, all_of_them in zip(alone.hidden_states, together.hidden_states, strict=True):
            assert torch.equal(one[0], all_of_them[i])


@pytest.mark.parametrize("clip_skip", range(4))
def test_clip_skip_counts_as_stable_diffusion_does(save, clip_skip):
    """The code of StableDiffusionPipeline.encode_prompt."""
    model, folder = save(CLIPTextModel)
    with torch.no_grad():
        states = model(prompts(), output_hidden_states=True)[-1]
        expected = model.final_layer_norm(states[-(clip_skip + 1)])
    ours = CLIPTextModel.from_pretrained(folder).prompt_embeds(prompts(), clip_skip)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("clip_skip", range(3))
def test_clip_skip_counts_as_sdxl_does(kind, save, clip_skip):
    """The code of StableDiffusionXLPipeline.encode_prompt."""
    model, folder = save(kind)
    with torch.no_grad():
        output = model(prompts(), output_hidden_states=True)
    embeds, pooled = kind.from_pretrained(folder).penultimate_embeds(prompts(), clip_skip)
    torch.testing.assert_close(embeds, output.hidden_states[-(clip_skip + 2)], rtol=0, atol=1e-4)
    expected = output.text_embeds if kind is CLIPTextModelWithProjection else output.pooler_output
    torch.testing.assert_close(pooled, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("clip_skip", [-1, 4, 1.5, True])
def test_clip_skip_out_of_range(save, clip_skip):
    model = CLIPTextModel.from_pretrained(save(CLIPTextModel)[1])
    with pytest.raises(InputError, match=r"^clip_skip: .* is not a whole number from 0 to 3$"):
        model.prompt_embeds(prompts(), clip_skip)
    with pytest.raises(InputError, match=r"^clip_skip: .* is not a whole number from 0 to 2$"):
        model.penultimate_embeds(prompts(), clip_skip)


def with_prefix(state):
    return {key if key.startswith("text_") else f"text_model.{key}": tensor for key, tensor in state.items()}


def without_prefix(state):
    return {key.removeprefix("text_model."): tensor for key, tensor in state.items()}


def with_position_ids(state):
    return with_prefix(state) | {"text_model.embeddings.position_ids": torch.arange(20)[None]}


@pytest.mark.parametrize("layout", [with_prefix, without_prefix, with_position_ids])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "model.fp16.safetensors"])
def test_both_layouts_of_keys_in_every_file(kind, save, layout, file):
    _, folder = save(kind)
    expected = kind.from_pretrained(folder)(prompts())[0]
    state = layout(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    if file.endswith("bin"):
        torch.save(state, folder / file)
    else:
        save_file(state, folder / file)
    model = kind.from_pretrained(folder, variant="fp16" if "fp16" in file else None)
    assert torch.equal(model(prompts())[0], expected)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards(kind, save, variant):
    _, folder = save(kind)
    expected = kind.from_pretrained(folder)(prompts())[0]
    (folder / "model.safetensors").unlink()
    save(kind, max_shard_size="20KB", variant=variant)
    assert len(list(folder.glob("model*-of-*.safetensors"))) > 2
    assert torch.equal(kind.from_pretrained(folder, variant=variant)(prompts())[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision(kind, save, dtype):
    model, folder = save(kind)
    with torch.no_grad():
        expected, theirs = model(prompts())[0], model.to(dtype)(prompts())[0].float()
    ours = kind.from_pretrained(folder, dtype=dtype)
    assert ours.dtype == dtype
    assert (ours(prompts())[0].float() - expected).norm() <= 2 * (theirs - expected).norm()


def test_the_encoders_of_a_pipelines_folder(save, tmp_path):
    folders = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
    for name, kind in folders.items():
        save(kind)[1].rename(tmp_path / name)
    (tmp_path / "model_index.json").write_text("{}")
    for name, kind in folders.items():
        expected = kind.from_pretrained(tmp_path / name)(prompts())[0]
        assert torch.equal(kind.from_pretrained(tmp_path)(prompts())[0], expected)
        assert torch.equal(kind.from_pretrained(tmp_path, subfolder=name)(prompts())[0], expected)


def test_every_parameter_is_transformers(kind, save):
    """A model with random weights has the keys and shapes of transformers' model, with separate Q, K and V."""
    from fastdiff.checkpoints.weights import diffusers_shapes

    model, _ = save(kind)
    theirs = {key: tensor.shape for key, tensor in without_prefix(model.state_dict()).items()}
    assert diffusers_shapes(kind.from_config(TINY)) == theirs


def change_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_weights(edit):
    def change(folder):
        path = folder / "model.safetensors"
        state = without_prefix(load_file(path))
        edit(state)
        save_file(state, path)

    return change


FC1 = "encoder.layers.0.mlp.fc1.weight"
BROKEN = {
    "activation": (change_config(hidden_act="relu"), "hidden_act: 'relu' is not one of quick_gelu, gelu"),
    "mask": (change_config(use_attention_mask=True), "use_attention_mask True is not supported"),
    "another-model": (change_config(model_type="t5"), "model_type 't5' is not supported"),
    "unknown": (change_config(rope_theta=1e4), "unknown option rope_theta"),
    "heads": (change_config(num_attention_heads=5), "num_attention_heads: 5 does not divide hidden_size 32"),
    "ends": (change_config(eos_token_id=[98, 2]), "eos_token_id: .* is not a whole number"),
    "hidden-states": (change_config(output_hidden_states=True), "output_hidden_states True is not supported"),
    "more-layers": (change_config(num_hidden_layers=900), "num_hidden_layers is 900, but 3 in the weights"),
    "larger-vocabulary": (change_config(vocab_size=10**6), "vocab_size is 1000000, but 99 in the weights"),
    "wider": (change_config(intermediate_size=65536), "intermediate_size is 65536, but 48 in the weights"),
    "longer": (change_config(max_position_embeddings=65536), "max_position_embeddings is 65536, but 20"),
    "missing": (change_weights(lambda state: state.pop(FC1)), f"missing: {FC1}"),
    "unexpected": (change_weights(lambda state: state.update(more=torch.ones(1))), "unexpected: more"),
    "both-layouts": (
        change_weights(lambda state: state.update({f"text_model.{FC1}": state[FC1].clone()})),
        "unexpected",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_named(kind, save, change, message):
    _, folder = save(kind)
    change(folder)
    with pytest.raises(InputError, match=message) as error:
        kind.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_the_encoders_cannot_be_taken_for_one_another(save):
    _, folder = save(CLIPTextModelWithProjection)
    with pytest.raises(InputError, match=r"unexpected: text_projection\.weight"):
        CLIPTextModel.from_pretrained(folder)
    change_config(projection_dim=None)(folder)
    with pytest.raises(InputError, match="projection_dim: null"):
        CLIPTextModelWithProjection.from_pretrained(folder)


def test_nan_in_the_weights(kind, save):
    _, folder = save(kind)
    change_weights(lambda state: state[FC1].fill_(torch.nan))(folder)
    with pytest.raises(NonFiniteError, match=FC1):
        kind.from_pretrained(folder)


REFUSED = {
    "no-tensor": (([[97, 98]],), {}, "input_ids: .* is not a tensor"),
    "floats": ((torch.zeros(1, 4),), {}, "input_ids: it is torch.float32"),
    "one-dimension": ((torch.zeros(4, dtype=torch.int64),), {}, r"input_ids: its shape is \(4,\)"),
    "too-long": ((torch.zeros(1, 21, dtype=torch.int64),), {}, "L from 1 to 20"),
    "no-prompts": ((torch.zeros(0, 4, dtype=torch.int64),), {}, r"its shape is \(0, 4\)"),
    "beyond-the-vocabulary": ((torch.full((1, 4), 99),), {}, "99 is out of range; use 0 to 98"),
    "mask": ((prompts(),), {"attention_mask": torch.ones(3, 20)}, "attention_mask: "),
    "positions": ((prompts(),), {"position_ids": torch.arange(20)[None]}, "position_ids: "),
    "attentions": ((prompts(),), {"output_attentions": True}, "output_attentions: "),
    "dict": ((prompts(),), {"return_dict": None}, "return_dict: None is not true or false"),
}


@pytest.mark.parametrize(("args", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_argument_is_named(kind, args, options, message):
    with pytest.raises(InputError, match=message):
        kind.from_config(TINY)(*args, **options)


def test_real_configs():
    """The real encoders' configs give the real numbers of parameters."""
    old = {"attention_dropout": 0.0, "bos_token_id": 0, "dropout": 0.0, "eos_token_id": 2, "pad_token_id": 1}
    old |= {"architectures": ["CLIPTextModel"], "torch_dtype": "float16", "transformers_version": "4.32.0.dev0"}
    large = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
    huge = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32}
    huge |= {"hidden_act": "gelu", "projection_dim": 1280}
    with torch.device("meta"):
        counts = [
            sum(parameter.numel() for parameter in kind.from_config(old | sizes).parameters())
            for kind, sizes in ((CLIPTextModel, large), (CLIPTextModelWithProjection, huge))
        ]
    assert counts == [123_060_480, 694_659_840]
