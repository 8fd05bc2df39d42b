"""Adapters on weights in 8 bits: the bits of a folder with the merged weights, loaded in 8 bits."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

import fastdiff
from tests.adapters.formats import in_diffusers, random_loras, save
from tests.support.pairwise import product
from tests.support.text_pipelines import text_pipeline

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=["int8", "fp8"])
def precision(request):
    return request.param


@pytest.fixture(scope="module")
def folder(text_folder):
    return text_folder("sd1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, pipe = tmp_path_factory.mktemp("loras"), text_pipeline("sd1")
    return [save(folder / f"{i}.safetensors", in_diffusers(random_loras(pipe, 4 * i, i))) for i in (1, 2)]


@pytest.fixture
def pipe(folder, precision):
    return fastdiff.Pipeline.from_pretrained(folder, precision=precision)


def draw(pipe, **options):
    return pipe("a cat", num_inference_steps=2, seed=3, output_type="latent", **options).images


def bits(pipe):
    """Return copies of all parameters of the U-Net and the text encoder, as bytes."""
    models = {"unet": pipe.unet, "text_encoder": pipe.text_encoder}
    parameters = {f"{part} {name}": each for part, it in models.items() for name, each in it.named_parameters()}
    return {name: each.contiguous().flatten().view(torch.uint8).clone() for name, each in parameters.items()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name, each in before.items() if not torch.equal(each, after[name])}


def fuse(pipe, files, weights):
    for i, file in enumerate(files):
        pipe.load_lora_weights(file, f"{i}")
    pipe.set_adapters([f"{i}" for i in range(len(files))], weights)
    pipe.fuse_lora(["unet", "text_encoder"])
    pipe.unload_lora_weights()
    return pipe


@pytest.mark.parametrize(("dtype", "precision"), product(DTYPES, ["int8", "fp8"], together=1))
def test_the_bits_are_those_of_the_merged_weights_loaded_in_8_bits(dtype, folder, files, precision, tmp_path):
    fastdiff.Pipeline.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / "plain")
    full = fastdiff.Pipeline.from_pretrained(tmp_path / "plain", dtype=dtype)
    fuse(full, files, [0.7, 0.4]).save_pretrained(tmp_path / "merged")
    wanted, pipe = (
        fastdiff.Pipeline.from_pretrained(tmp_path / name, dtype=dtype, precision=precision)
        for name in ("merged", "plain")
    )
    plain = bits(pipe)
    for i, file in enumerate(files):
        pipe.load_lora_weights(file, f"{i}")
    pipe.set_adapters(["0", "1"], [0.7, 0.4])
    assert not changed(bits(wanted), bits(pipe))
    values = [name for name in changed(plain, bits(pipe)) if name.endswith(".values")]
    assert any(".to_qkv." in name for name in values) and any(".conv1." in name for name in values)
    assert any(name.startswith("text_encoder") for name in values)
    pipe.unload_lora_weights()
    assert not changed(plain, bits(pipe))
    assert not changed(bits(wanted), bits(fuse(pipe, files, [0.7, 0.4])))


def test_off_gives_the_bits_of_the_plain_model_and_on_again_those_from_before(pipe, files):
    plain = draw(pipe)
    for _ in range(2):
        draw(pipe)  # through a program
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
    pipe.unfuse_lora()
    half = draw(pipe)
    pipe.set_adapters("default_0", 0.2)
    assert torch.equal(draw(pipe, cross_attention_kwargs={"scale": 0.5}), half)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), plain)


def test_only_the_layers_of_the_adapter_are_written_and_nothing_moves(pipe, files):
    one = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_k.lora"
    state = {key: each for key, each in load_file(files[0]).items() if key.startswith(one)}
    parameters = dict(pipe.unet.named_parameters())
    places = {name: (each.data_ptr(), each._version) for name, each in parameters.items()}
    pipe.load_lora_weights(state)
    written = {name for name, each in parameters.items() if each._version != places[name][1]}
    owner = "mid_block.attentions.0.transformer_blocks.0.attn1.to_qkv.weight"
    assert written == {f"{owner}.values", f"{owner}.scale"}
    assert [each.data_ptr() for each in pipe.unet.parameters()] == [pointer for pointer, _ in places.values()]


def test_the_state_dict_has_the_weights_that_were_loaded(pipe, files):
    before = {name: each.clone() for name, each in pipe.unet.state_dict().items()}
    pipe.load_lora_weights(files[0])
    after = pipe.unet.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].float(), each.float()) for name, each in before.items())


def test_another_adapter_on_top_of_what_is_a_part_of_the_weights(folder, files, precision, tmp_path):
    full = fuse(fuse(fastdiff.Pipeline.from_pretrained(folder), files[:1], [0.6]), files[1:], [0.3])
    full.save_pretrained(tmp_path)
    wanted = fastdiff.Pipeline.from_pretrained(tmp_path, precision=precision)
    pipe = fuse(fastdiff.Pipeline.from_pretrained(folder, precision=precision), files[:1], [0.6])
    kept = bits(pipe)
    assert not pipe.unet.merging._in_8_bits.loaded and not pipe.unet.merging._in_8_bits._before
    pipe.load_lora_weights(files[1], "b")
    pipe.set_adapters("b", 0.3)
    assert not changed(bits(wanted), bits(pipe))
    pipe.unload_lora_weights()
    assert not changed(kept, bits(pipe))


def test_weights_follow_the_models_dtype(folder, files, precision):
    wanted, pipe = (
        fastdiff.Pipeline.from_pretrained(folder, dtype=dtype, precision=precision)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for each in (wanted, pipe):
        each.load_lora_weights(files[0])
    exact = bits(pipe)
    pipe.to(torch.bfloat16)
    assert not changed(bits(wanted), bits(pipe))
    assert any(name.endswith(".values") for name in changed(exact, bits(pipe)))


def of_other_weights(folder):
    torch.manual_seed(5)
    pipe = fastdiff.Pipeline.from_pretrained(folder)
    with torch.no_grad():
        for weight in pipe.unet.parameters():
            weight.mul_(1.01).add_(0.001)
    pipe.save_pretrained(folder)


DAMAGE = {
    "gone": (shutil.rmtree, "the model's files are read again for weights in 8 bits: "),
    "changed": (of_other_weights, "is not the weight that was loaded; load the model again"),
}


@pytest.mark.parametrize(("damage", "precision"), product(list(DAMAGE), ["int8", "fp8"], together=1))
def test_files_that_are_gone_or_have_changed_are_one_error_and_change_nothing(
    damage, folder, files, precision, tmp_path
):
    change, message = DAMAGE[damage]
    copy = shutil.copytree(folder, tmp_path / "model")
    pipe = fastdiff.Pipeline.from_pretrained(copy, precision=precision)
    before, plain = bits(pipe), draw(pipe)
    change(copy)
    for _ in range(2):
        with pytest.raises(fastdiff.InputError, match=message) as error:
            pipe.load_lora_weights(files[0])
        assert "\n" not in str(error.value)
    assert not changed(before, bits(pipe)) and not pipe.get_list_adapters()
    assert torch.equal(draw(pipe), plain)


def test_a_sum_beyond_the_range_of_the_dtype_is_one_error_and_changes_nothing(folder, files, precision):
    pipe = fastdiff.Pipeline.from_pretrained(folder, dtype=torch.float16, precision=precision)
    pipe.load_lora_weights(files[0], "a")
    before = bits(pipe)
    convolutions = {key: 1e4 * each for key, each in load_file(files[1]).items() if ".conv1." in key}
    with pytest.raises(fastdiff.NonFiniteError, match="beyond the range of float16"):
        pipe.load_lora_weights(convolutions, "b")
    assert not changed(before, bits(pipe)) and pipe.get_active_adapters() == ["a"]


def test_a_model_whose_files_are_not_known_takes_no_adapter(pipe, files):
    pipe.unet.origin = None
    with pytest.raises(fastdiff.InputError, match="the files of the weights in 8 bits are not known"):
        pipe.load_lora_weights(files[0])


def test_a_folder_that_was_named_from_another_current_folder(folder, files, precision, monkeypatch, tmp_path):
    monkeypatch.chdir(folder.parent)
    pipe = fastdiff.Pipeline.from_pretrained(folder.name, precision=precision)
    monkeypatch.chdir(tmp_path)
    pipe.load_lora_weights(files[0])
    assert pipe.get_active_adapters() == ["default_0"]
