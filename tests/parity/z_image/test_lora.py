"""LoRA files of each format draw with ZImagePipeline what diffusers and peft draw; methods do the same."""

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

import fastdiff
from fastdiff import InputError, NonFiniteError
from tests.parity.z_image import tiny
from tests.parity.z_image.loras import (
    in_kohya,
    in_lokr,
    in_peft,
    of_blocks,
    random_loras,
    sharing_down,
    stacked,
    written_twice,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # peft's, for a second adapter
    pytest.mark.filterwarnings("ignore:Adapter b was active which is now deleted"),  # peft then chooses another
]

FORMATS = {
    "diffusers": lambda model: in_peft(random_loras(model)),
    "ai-toolkit": lambda model: in_peft(of_blocks(random_loras(model)), "diffusion_model."),
    "with an alpha": lambda model: in_peft(of_blocks(random_loras(model)), "diffusion_model.", alpha=2.0),
    "of a named adapter": lambda model: in_peft(of_blocks(random_loras(model)), "", ".default"),
    "kohya": lambda model: in_kohya(random_loras(model), (2.0, 4.0, 1.0)),
    "kohya, with dots": lambda model: in_kohya(of_blocks(random_loras(model)), prefix="diffusion_model.", flat=False),
    "kohya, with qkv": lambda model: in_kohya(stacked(sharing_down(of_blocks(random_loras(model))))),
    "both names": lambda model: written_twice(sharing_down(of_blocks(random_loras(model)))),
    "LoKr": in_lokr,
}


@pytest.fixture(scope="module")
def folder(randomise_once, tmp_path_factory):
    path = tmp_path_factory.mktemp("z-image")
    tiny.pipeline(randomise_once).save_pretrained(path)
    return path


@pytest.fixture
def theirs(folder):
    pipe = diffusers.ZImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def ours(folder):
    return fastdiff.Pipeline.from_pretrained(folder, device="cpu")


def draw(pipe, **options):
    given = {"num_inference_steps": 2, "guidance_scale": 2.0, "height": 16, "width": 24, "output_type": "latent"}
    return pipe(["a cat"], generator=torch.Generator().manual_seed(1), **given | options).images


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def save(tensors, path):
    save_file({key: each.contiguous().clone() for key, each in tensors.items()}, path)
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_draws_what_diffusers_draws(form, theirs, ours, tmp_path):
    plain = draw(ours)
    file = save(FORMATS[form](theirs.transformer), tmp_path / "lora.safetensors")
    for pipe in (theirs, ours):
        pipe.load_lora_weights(file)
    found = draw(ours)
    assert_same(found, draw(theirs))
    assert (found - plain).abs().max() > 0.02 * plain.abs().max()
    ours.unload_lora_weights()
    assert torch.equal(draw(ours), plain)


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "lora_transformer_"])
def test_names_that_diffusers_does_not_read(prefix, ours, folder):
    loras = of_blocks(random_loras(diffusers.ZImageTransformer2DModel.from_pretrained(folder / "transformer")))
    ours.load_lora_weights(in_peft(loras), "a")
    wanted = draw(ours)
    ours.load_lora_weights(in_peft(loras, prefix), "b")
    assert torch.equal(draw(ours), wanted)


def test_the_authors_names_of_the_first_and_the_last_layer(ours, theirs):
    names = {"all_x_embedder.2-1": "x_embedder", "all_final_layer.2-1.linear": "final_layer.linear"}
    loras = {name: pair for name, pair in random_loras(theirs.transformer).items() if name in names}
    ours.load_lora_weights(in_peft(loras))
    wanted = draw(ours)
    ours.load_lora_weights(in_peft({names[name]: pair for name, pair in loras.items()}, "diffusion_model."))
    assert torch.equal(draw(ours), wanted)


def test_methods_do_what_diffusers_and_peft_do(theirs, ours, tmp_path):
    files = [
        save(in_peft(of_blocks(random_loras(theirs.transformer, rank, rank))), tmp_path / f"{rank}.safetensors")
        for rank in (2, 5)
    ]
    pipes = theirs, ours
    for pipe in pipes:
        pipe.load_lora_weights(files[0])
        pipe.load_lora_weights(files[1], adapter_name="b")

    def compare(**options):
        assert_same(draw(ours, **options), draw(theirs, **options))
        assert ours.get_active_adapters() == theirs.get_active_adapters()
        assert ours.get_list_adapters() == theirs.get_list_adapters()

    for pipe in pipes:
        pipe.set_adapters(["default_0", "b"], [0.7, 0.4])
    compare()
    compare(joint_attention_kwargs={"scale": 0.5})
    for pipe in pipes:
        pipe.set_adapters("b", {"transformer": 0.6})
        pipe.fuse_lora(lora_scale=0.5)
    compare()
    assert ours.fused_loras == theirs.fused_loras == {"b"}
    for pipe in pipes:
        pipe.unfuse_lora()
        pipe.delete_adapters("b")
        pipe.set_adapters("default_0", 1.0)
    compare()


def test_off_and_unloaded_give_the_bits_of_the_plain_model(ours, theirs, folder, tmp_path):
    plain = draw(ours)
    ours.load_lora_weights(in_peft(random_loras(theirs.transformer)))
    on = draw(ours)
    ours.disable_lora()
    assert torch.equal(draw(ours), plain)
    ours.enable_lora()
    assert torch.equal(draw(ours), on)
    assert torch.equal(draw(ours, joint_attention_kwargs={"scale": 0}), plain)
    ours.save_pretrained(tmp_path)
    name = "transformer/diffusion_pytorch_model.safetensors"
    wanted, saved = load_file(folder / name), load_file(tmp_path / name)
    assert all(torch.equal(saved[key], each) for key, each in wanted.items())
    ours.unload_lora_weights()
    assert torch.equal(draw(ours), plain)


def test_a_picture_has_the_same_bits_in_any_batch(ours, theirs):
    ours.load_lora_weights(in_peft(random_loras(theirs.transformer)))
    options = {"num_inference_steps": 2, "height": 16, "width": 24, "output_type": "latent"}
    together = ours(["a cat", "a dog"], seed=[3, 4], **options).images
    assert torch.equal(together[3:], ours("a dog", seed=4, **options).images)


def test_in_8_bits_the_bits_are_those_of_the_merged_weights(ours, theirs, folder, tmp_path):
    loras = in_kohya(stacked(sharing_down(of_blocks(random_loras(theirs.transformer)))))
    ours.load_lora_weights(loras)
    ours.fuse_lora()
    ours.unload_lora_weights()
    ours.save_pretrained(tmp_path)
    wanted = draw(fastdiff.Pipeline.from_pretrained(tmp_path, device="cpu", precision="int8"))
    pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu", precision="int8")
    plain = draw(pipe)
    pipe.load_lora_weights(loras)
    assert torch.equal(draw(pipe), wanted) and not torch.equal(wanted, plain)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), plain)


LAYER = "layers.0.attention.to_q"


def lora(layer=f"transformer.{LAYER}", rank=2, inputs=48, outputs=48, up_rank=None):
    down, up = torch.ones(rank, inputs), torch.ones(outputs, up_rank or rank)
    return {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}


def kohya(layer, rows=144):
    stem = f"lora_unet_{layer}"
    return {f"{stem}.lora_down.weight": torch.ones(2, 48), f"{stem}.lora_up.weight": torch.ones(rows, 2)}


SD = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"
QKV = "diffusion_model.layers.0.attention.qkv"
BAD = {
    "of Stable Diffusion 1": (lora(SD, inputs=768), "is a LoRA of Stable Diffusion 1, and the model is Z-Image"),
    "of Flux": (lora("transformer.single_transformer_blocks.0.attn.to_q"), "another model family"),
    "an unknown layer": (lora("transformer.layers.7.attention.to_q"), "have no layer in this model"),
    "a text encoder": (lora("text_encoder.layers.0.self_attn.q_proj"), "have no layer in this model"),
    "another width": (lora(inputs=40), "it changes 48 x 40 numbers, and the model has"),
    "two ranks": (lora(up_rank=3), "its two matrices have ranks 2 and 3"),
    "half a layer": ({f"transformer.{LAYER}.lora_A.weight": torch.ones(2, 48)}, "has down but no up"),
    "rows of qkv": (kohya("layers_0_attention_qkv", 145), "it changes 145 x 48 numbers"),
    "a scalar of qkv": (
        {f"{QKV}.lora_down.weight": torch.ones(2, 48), f"{QKV}.lora_up.weight": torch.ones(())},
        "are no matrices",
    ),
    "LoKr of qkv": ({f"{QKV}.lokr_w1": torch.ones(4, 4), f"{QKV}.lokr_w2": torch.ones(36, 12)}, "have no layer"),
    "one layer twice": (lora() | lora(f"diffusion_model.{LAYER}"), "name the same layer"),
    "dora": (lora() | {f"transformer.{LAYER}.dora_scale": torch.ones(48)}, "DoRA of kohya's"),
    "nan": ({key: each * torch.nan for key, each in lora().items()}, "NaN or infinity"),
}


@pytest.fixture(scope="module")
def loaded(folder, randomise_once):
    """Return a pipeline with an adapter, which stays as it is, and its picture."""
    pipe = fastdiff.Pipeline.from_pretrained(folder, device="cpu")
    pipe.load_lora_weights(lora(), "a")
    return pipe, draw(pipe, num_inference_steps=1)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_error_and_changes_nothing(name, loaded, tmp_path):
    (pipe, before), (tensors, message) = loaded, BAD[name]
    with pytest.raises((InputError, NonFiniteError), match=message) as caught:
        pipe.load_lora_weights(save(tensors, tmp_path / "lora.safetensors"))
    assert "\n" not in str(caught.value)
    assert torch.equal(draw(pipe, num_inference_steps=1), before)


WRONG = {
    "blocks": (lambda pipe: pipe.set_adapters("a", {"transformer": {"down": 1}}), "this part has no blocks"),
    "a part": (lambda pipe: pipe.set_adapters("a", {"unet": 1}), "'unet' is no part of the pipeline; give transformer"),
    "components": (lambda pipe: pipe.fuse_lora(["text_encoder"]), "'text_encoder' takes no LoRA"),
    "scale": (lambda pipe: draw(pipe, joint_attention_kwargs={"scale": "x"}), "joint_attention_kwargs: its scale"),
    "processors": (lambda pipe: draw(pipe, joint_attention_kwargs={"x": 1}), "joint_attention_kwargs: 'x' is not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_error_and_changes_nothing(name, loaded):
    (pipe, before), (call, message) = loaded, WRONG[name]
    with pytest.raises(InputError, match=message):
        call(pipe)
    assert torch.equal(draw(pipe, num_inference_steps=1), before)


def test_stable_diffusion_refuses_a_lora_of_z_image(text_folder):
    pipe = fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    with pytest.raises(InputError, match="have no layer in this model"):
        pipe.load_lora_weights(lora())
