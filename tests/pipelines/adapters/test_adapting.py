"""Adapters in a pipeline: equal bits, stable memory, refused files and arguments."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file

import fastdiff
from fastdiff.adapters.names import PARTS
from tests.adapters.formats import in_diffusers, random_loras, save
from tests.support.text_pipelines import text_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd1")
    text_pipeline("sd1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, pipe = tmp_path_factory.mktemp("loras"), text_pipeline("sd1")
    return [save(folder / f"{i}.safetensors", in_diffusers(random_loras(pipe, 4 * i, i))) for i in (1, 2)]


@pytest.fixture
def pipe(folder):
    return fastdiff.Pipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def loaded(folder, files):
    """Return a pipeline with an adapter, which stays as it is, and its picture."""
    pipe = fastdiff.Pipeline.from_pretrained(folder)
    pipe.load_lora_weights(files[0], "a")
    pipe.set_adapters("a", 0.5)
    pipe.file = files[0]
    return pipe, draw(pipe)


def draw(pipe, count=1, **options):
    return pipe("a cat", num_inference_steps=2, seed=list(range(3, 3 + count)), output_type="latent", **options).images


def test_off_and_unloaded_give_the_bits_of_the_plain_model_and_on_again_those_from_before(pipe, files):
    plain = draw(pipe)
    for file in files:
        pipe.load_lora_weights(file)
    pipe.set_adapters(["default_0", "default_1"], [0.7, 0.4])
    on = draw(pipe)
    assert not torch.equal(on, plain)
    pipe.disable_lora()
    assert torch.equal(draw(pipe), plain)
    pipe.enable_lora()
    assert torch.equal(draw(pipe), on)
    pipe.fuse_lora()
    pipe.set_adapters("default_0", 0.1)
    assert torch.equal(draw(pipe), on)
    pipe.set_adapters(["default_0", "default_1"], [0.7, 0.4])
    pipe.unfuse_lora()
    assert torch.equal(draw(pipe), on)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), plain)


def test_a_picture_has_the_same_bits_in_any_batch(pipe, files):
    pipe.load_lora_weights(files[0])
    assert torch.equal(draw(pipe, 3)[1:2], draw(pipe, 2)[1:2])


def test_nothing_moves_and_no_program_is_made_again(pipe, files):
    for _ in range(3):
        draw(pipe)
    models = {"unet": pipe.unet, "text_encoder": pipe.text_encoder}
    pointers = {part: [each.data_ptr() for each in model.parameters()] for part, model in models.items()}
    programs = {part: dict(model._graphs) for part, model in models.items()}
    for file in files:
        pipe.load_lora_weights(file)
    draw(pipe, cross_attention_kwargs={"scale": 0.5})
    pipe.set_adapters("default_0", 0.3)
    for part, before in pointers.items():
        assert [each.data_ptr() for each in models[part].parameters()] == before
        assert dict(models[part]._graphs) == programs[part]


def test_state_dict_and_saved_folders_have_the_weights_that_were_loaded(pipe, files, folder, tmp_path):
    before = {
        part: {name: each.clone() for name, each in getattr(pipe, part).state_dict().items()} for part in PARTS[:2]
    }
    pipe.load_lora_weights(files[0])
    for part, state in before.items():
        after = getattr(pipe, part).state_dict()
        assert after.keys() == state.keys()
        assert all(torch.equal(after[name], each) for name, each in state.items())
    pipe.save_pretrained(tmp_path)
    name = "unet/diffusion_pytorch_model.safetensors"
    wanted, saved = load_file(folder / name), load_file(tmp_path / name)
    assert all(torch.equal(saved[key], each) for key, each in wanted.items())


def test_what_is_fused_and_unloaded_is_saved(pipe, files, tmp_path):
    pipe.load_lora_weights(files[0])
    pipe.fuse_lora(["unet", "text_encoder"])
    pipe.unload_lora_weights()
    drawn = draw(pipe)
    pipe.save_pretrained(tmp_path)
    assert torch.equal(draw(fastdiff.Pipeline.from_pretrained(tmp_path)), drawn)


def test_weights_are_merged_in_float32_and_rounded_once_in_any_dtype(folder, files):
    first = fastdiff.Pipeline.from_pretrained(folder, dtype=torch.bfloat16)
    first.load_lora_weights(files[0])
    second = fastdiff.Pipeline.from_pretrained(folder)
    second.load_lora_weights(files[0])
    exact = dict(second.unet.named_parameters())
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_qkv.weight"
    merged = dict(first.unet.named_parameters())[name]
    loaded = first.unet.state_dict()[name]
    wanted = (loaded.double() + exact[name].double() - second.unet.state_dict()[name].double()).bfloat16()
    assert (merged != wanted).float().mean() < 0.01  # but for values beside the middle between two bfloat16
    second.to(torch.bfloat16)
    assert torch.equal(dict(second.unet.named_parameters())[name], merged)


def test_runs_side_by_side_keep_their_own_scale(pipe, files):
    pipe.load_lora_weights(files[0])
    options = {"num_inference_steps": 3, "seed": 1, "output_type": "latent"}
    alone = [pipe("a cat", cross_attention_kwargs={"scale": scale}, **options).images for scale in (0.2, 0.9)]
    runs = [pipe.stream("a cat", cross_attention_kwargs={"scale": scale}, **options) for scale in (0.2, 0.9)]
    for pair in zip(*runs, strict=True):
        last = pair
    assert all(torch.equal(step.images, wanted) for step, wanted in zip(last, alone, strict=True))


def test_the_prompt_is_encoded_again_with_other_weights(pipe, files):
    pipe.encoders.remember(8)
    plain = pipe.encode_prompt("a cat")[0]
    pipe.load_lora_weights(files[0])
    changed = pipe.encode_prompt("a cat")[0]
    assert not torch.equal(changed, plain)
    assert not torch.equal(pipe.encode_prompt("a cat", lora_scale=0.5)[0], changed)
    pipe.disable_lora()
    assert torch.equal(pipe.encode_prompt("a cat")[0], plain)


def test_hotswap_takes_the_place_of_an_adapter_of_any_rank(pipe, files):
    pipe.load_lora_weights(files[1])
    wanted = draw(pipe)
    pipe.unload_lora_weights()
    pipe.load_lora_weights(files[0], "style")
    pipe.load_lora_weights(files[1], "style", hotswap=True)
    assert pipe.get_list_adapters() == {"unet": ["style"], "text_encoder": ["style"]}
    assert torch.equal(draw(pipe), wanted)


def test_a_folder_a_dict_and_the_name_of_a_file(pipe, files, tmp_path):
    pipe.load_lora_weights(files[0])
    wanted = draw(pipe)
    for given, options in (
        (files[0].parent, {"weight_name": "1.safetensors"}),
        (files[0].parent.parent, {"weight_name": "1.safetensors", "subfolder": files[0].parent.name}),
        (load_file(files[0]), {}),
        (str(files[0]), {"local_files_only": True}),
    ):
        pipe.unload_lora_weights()
        pipe.load_lora_weights(given, **options)
        assert torch.equal(draw(pipe), wanted)


LAYER = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
KOHYA = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
R = torch.ones


def lora(layer=LAYER, rank=2, inputs=32, outputs=32, up_rank=None):
    return {f"{layer}.lora_A.weight": R(rank, inputs), f"{layer}.lora_B.weight": R(outputs, up_rank or rank)}


def kohya(**extra):
    tensors = {f"{KOHYA}.lora_down.weight": R(2, 32), f"{KOHYA}.lora_up.weight": R(32, 2)}
    return tensors | {f"{KOHYA}.{name}": each for name, each in extra.items()}


BAD = {
    "NaN": (lora() | {f"{LAYER}.lora_A.weight": R(2, 32) * float("nan")}, "NaN or infinity in unet.mid_block"),
    "ranks that differ": (lora(up_rank=3), "its two matrices have ranks 2 and 3"),
    "down without up": ({f"{LAYER}.lora_A.weight": R(2, 32)}, "has down but no up"),
    "another width": (lora(inputs=31), r"it changes 32 x 31 numbers, and the model has \(32, 32\)"),
    "integers": (lora() | {f"{LAYER}.lora_A.weight": R(2, 32).int()}, "down is torch.int32"),
    "no matrix": (lora() | {f"{LAYER}.lora_A.weight": R(32)}, r"down \(32,\) .* no matrices"),
    "empty": ({f"{LAYER}.lora_A.weight": R(0, 32), f"{LAYER}.lora_B.weight": R(32, 0)}, "its rank is 0"),
    "a layer beside the model": (
        lora() | lora("unet.nowhere") | lora("unet.a") | lora("unet.b"),
        r"unet\.\w+\.lora_A.weight, .* and 3 more \(6 keys\) have no layer in this model",
    ),
    "a complex alpha": (lora() | {f"{LAYER}.alpha": torch.tensor(1j)}, "its alpha is a complex number"),
    "control characters": (lora("unet.\x1b[31m\n"), r"'unet\.\\x1b\[31m\\n\.lora_A.*have no layer"),
    "another key": (lora() | {"unet.more": R(1)}, "unet.more have no layer"),
    "one layer in two namings": (lora() | kohya(), "name the same layer"),
    "alpha alone": ({f"{KOHYA}.alpha": torch.tensor(1.0)}, "has only its alpha"),
    "two alphas": (kohya(alpha=R(2)), "its alpha has 2 numbers"),
    "another model": (
        {f"{LAYER.replace('attn1.to_q', 'attn2.to_k')}.lora_A.weight": R(2, 2048)}
        | {f"{LAYER.replace('attn1.to_q', 'attn2.to_k')}.lora_B.weight": R(32, 2)},
        r"it changes 32 x 2048 numbers",
    ),
    "kohya's DoRA": (kohya(dora_scale=R(32, 1)), "dora_scale"),
    "differences": (kohya(diff=R(32, 32)), "whole differences"),
    "differences of biases": (kohya(diff_b=R(32)), "whole differences"),
    "IA3": ({f"{KOHYA}.weight": R(32), f"{KOHYA}.on_input": torch.tensor(True)}, "IA3"),
    "GLoRA": ({f"{KOHYA}.a1.weight": R(2, 32)}, "GLoRA"),
    "OFT": ({f"{KOHYA}.oft_blocks": R(2, 2, 2)}, "OFT"),
    "embeddings beside": (kohya() | {"bundle_emb.word.string_to_param.*": R(1, 32)}, "bundle_emb"),
    "biases": (lora() | {f"{LAYER}.lora_B.bias": R(32)}, "biases of lora_B"),
    "Flux": (lora("transformer.single_transformer_blocks.0.attn.to_q"), "another model family"),
    "a mid of another size": (kohya(**{"lora_mid.weight": R(3, 3, 1, 1)}), r"mid is \(3, 3, 1, 1\) for rank 2"),
    "half of a LoHa": ({f"{KOHYA}.hada_w1_a": R(32, 2)}, "no w1_b"),
    "half of a LoKr": ({f"{KOHYA}.lokr_w1": R(4, 4)}, "lokr_w2_a"),
    "a LoKr of another size": ({f"{KOHYA}.lokr_w1": R(4, 4), f"{KOHYA}.lokr_w2": R(4, 8)}, "it changes 16 x 32"),
    "a magnitude of another size": (lora() | {f"{LAYER}.lora_magnitude_vector": R(3)}, "for 32 outputs"),
    "a checkpoint": ({"unet.conv_in.weight": R(2, 2)}, "no LoRA|no keys of a LoRA"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_error_and_changes_nothing(name, loaded, tmp_path):
    (tensors, message), (pipe, before) = BAD[name], loaded
    file = save(tmp_path / "bad.safetensors", tensors)
    for given in (file, tensors):
        with pytest.raises(fastdiff.InputError, match=message) as error:
            pipe.load_lora_weights(given)
        assert "\n" not in str(error.value)
    assert pipe.get_list_adapters() == {"unet": ["a"], "text_encoder": ["a"]}
    assert pipe.get_active_adapters() == ["a"]
    assert torch.equal(draw(pipe), before)


def test_a_file_that_claims_a_huge_rank_or_is_cut_is_refused_from_its_header(pipe, tmp_path):
    shapes = {f"{LAYER}.lora_A.weight": [10**6, 32], f"{LAYER}.lora_B.weight": [32, 10**6]}
    header = {key: {"dtype": "F32", "shape": shape, "data_offsets": [0, 128 * 10**6]} for key, shape in shapes.items()}
    text = json.dumps(header).encode()
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(fastdiff.InputError, match="ends beyond the end of the file"):
        pipe.load_lora_weights(tmp_path / "huge.safetensors")
    with pytest.raises(fastdiff.InputError, match=r"its rank is 1000000; the most is"):
        pipe.load_lora_weights({key: torch.empty(1).expand(shape) for key, shape in shapes.items()})


def test_a_file_with_very_many_unknown_keys_is_refused_quickly(pipe, tmp_path):
    file = save(tmp_path / "many.safetensors", {f"lora_unet_x{i}.alpha": torch.tensor(1.0) for i in range(20_000)})
    with pytest.raises(fastdiff.InputError, match=r"and 19997 more \(20000 keys\)"):
        pipe.load_lora_weights(file)


@pytest.mark.parametrize("name", ["lora.ckpt", "lora.safetensors"])
def test_pickles_and_other_files_are_refused(name, pipe, tmp_path):
    torch.save({"a": R(1)}, tmp_path / name)
    with pytest.raises(fastdiff.InputError, match="pickle"):
        pipe.load_lora_weights(tmp_path / name)


def test_missing_files_and_folders_with_several(pipe, files, tmp_path):
    for given, options, message in (
        (tmp_path / "none.safetensors", {}, "does not exist"),
        (tmp_path, {}, "no safetensors file; give the name"),
        (files[0].parent, {}, "1.safetensors, 2.safetensors; give the name"),
        (tmp_path, {"weight_name": "none.safetensors"}, "does not exist"),
        (5, {}, "is not a file"),
        ({}, {}, "the dict is empty"),
        ({"a": 1}, {}, "is not a tensor"),
    ):
        with pytest.raises(fastdiff.InputError, match=message):
            pipe.load_lora_weights(given, **options)


WRONG_CALLS = {
    "an unknown argument": (lambda pipe: pipe.load_lora_weights({}, rank=3), "rank: load_lora_weights has no such"),
    "a name that is taken": (lambda pipe: pipe.load_lora_weights(pipe.file, "a"), "'a' is loaded already"),
    "a name to swap that is not loaded": (
        lambda pipe: pipe.load_lora_weights(pipe.file, "b", hotswap=True),
        "no adapter 'b' is loaded",
    ),
    "a swap without a name": (lambda pipe: pipe.load_lora_weights(pipe.file, hotswap=True), "hotswap needs the name"),
    "an unknown adapter": (lambda pipe: pipe.set_adapters(["a", "b"]), "no adapter 'b' is loaded; use one of a"),
    "too few weights": (lambda pipe: pipe.set_adapters("a", [1, 2]), "2 given for 1 adapters"),
    "a weight of text": (lambda pipe: pipe.set_adapters("a", "strong"), "'strong' is not a finite number"),
    "an infinite weight": (lambda pipe: pipe.set_adapters("a", float("inf")), "is not a finite number"),
    "an unknown part": (lambda pipe: pipe.set_adapters("a", {"vae": 1}), "'vae' is no part"),
    "an unknown side": (lambda pipe: pipe.set_adapters("a", {"unet": {"left": 1}}), "'left' is no part of a U-Net"),
    "a block without attention": (
        lambda pipe: pipe.set_adapters("a", {"unet": {"down": {"block_1": 1}}}),
        "'block_1' has no attention; give one of block_0",
    ),
    "too many numbers": (
        lambda pipe: pipe.set_adapters("a", {"unet": {"up": {"block_1": [1, 2, 3]}}}),
        "3 numbers for 2 attentions",
    ),
    "blocks of a text encoder": (lambda pipe: pipe.set_adapters("a", {"text_encoder": {"down": 1}}), "has no blocks"),
    "no component": (lambda pipe: pipe.fuse_lora([]), "components: none given; give some of unet, text_encoder"),
    "another component": (lambda pipe: pipe.fuse_lora(["vae"]), "'vae' takes no LoRA"),
    "a fused scale of text": (lambda pipe: pipe.fuse_lora(["unet"], lora_scale="x"), "lora_scale: 'x'"),
    "a name to delete": (lambda pipe: pipe.delete_adapters("b"), "no adapter 'b'"),
    "a scale of text": (lambda pipe: draw(pipe, cross_attention_kwargs={"scale": "x"}), "scale is not a finite number"),
    "another key of a call": (lambda pipe: draw(pipe, cross_attention_kwargs={"gligen": 1}), "'gligen' is not"),
    "no dict": (lambda pipe: draw(pipe, cross_attention_kwargs=3), "is not a dict"),
    "other weights": (lambda pipe: pipe.unet.load_state_dict({}), "adapters have changed the model"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_one_error_and_changes_nothing(name, loaded):
    (call, message), (pipe, before) = WRONG_CALLS[name], loaded
    with pytest.raises(fastdiff.InputError, match=message):
        call(pipe)
    assert torch.equal(draw(pipe), before)


def test_a_sum_beyond_float16_is_refused_and_taken_back(folder, files):
    pipe = fastdiff.Pipeline.from_pretrained(folder, dtype=torch.float16)
    pipe.load_lora_weights(files[0], "a")
    before = {name: each.clone() for name, each in pipe.unet.named_parameters()}
    with pytest.raises(fastdiff.NonFiniteError, match="beyond the range of float16; use a smaller weight"):
        pipe.set_adapters("a", 1e6)
    assert all(torch.equal(each, before[name]) for name, each in pipe.unet.named_parameters())
    with pytest.raises(fastdiff.NonFiniteError, match="beyond the range"):
        pipe.load_lora_weights({key: 1e4 * each for key, each in load_file(files[1]).items()}, "b")
    assert pipe.get_list_adapters()["unet"] == pipe.get_active_adapters() == ["a"]
    assert all(torch.equal(each, before[name]) for name, each in pipe.unet.named_parameters())


def test_a_move_to_float16_of_a_sum_beyond_it_is_one_error(pipe, files):
    pipe.load_lora_weights(files[0])
    pipe.set_adapters("default_0", 1e6)
    with pytest.raises(fastdiff.NonFiniteError, match="beyond the range of float16"):
        pipe.to(torch.float16)
    assert all(each.isfinite().all() for each in pipe.unet.parameters())


def test_a_weight_beyond_float32_is_one_error_and_changes_nothing(pipe, files):
    pipe.load_lora_weights(files[0], "a")
    before = draw(pipe)
    with pytest.raises(fastdiff.NonFiniteError, match="beyond the range of float32; use a smaller one"):
        pipe.set_adapters("a", 1e300)
    assert torch.equal(draw(pipe), before)


def test_metadata_that_is_not_json_and_an_alpha_that_is_no_number(pipe, tmp_path):
    deep = ("[" * 10**5, "is not JSON")
    for text, message in (
        ("{", "is not JSON"),
        deep,
        (json.dumps({"unet.lora_alpha": "x"}), "alpha in the config is 'x'"),
    ):
        file = save(tmp_path / "lora.safetensors", lora(), lora_adapter_metadata=text)
        with pytest.raises(fastdiff.InputError, match=message):
            pipe.load_lora_weights(file)
