"""LoRAs and embeddings on a GPU: diffusers' latents, bits that come back, and no new CUDA graph."""

import pytest
import torch
from safetensors.torch import save_file

import fastdiff
from tests.adapters.formats import deltas_of, in_diffusers, in_kohya, merge, random_loras, save
from tests.support.text_pipelines import KINDS, text_pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers'
]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp(kind)
    text_pipeline(kind).save_pretrained(folder)
    return folder


def ours_on_gpu(folder, dtype=torch.float32):
    return fastdiff.Pipeline.from_pretrained(folder, device="cuda", torch_dtype=dtype)


def draw(pipe, prompt="a photo of the cat", **options):
    given = {"num_inference_steps": 4, "output_type": "latent"}
    return pipe(prompt, generator=torch.Generator().manual_seed(3), **given | options).images


def graphs(pipe):
    return [id(graph) for each in pipe.unet._graphs.values() for graph in each._graphs.values()]


def assert_close(found, wanted):
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.fixture
def loras(kind):
    ends = ("conv1", "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "proj_in", "q_proj", "fc1")
    return [random_loras(text_pipeline(kind), rank, seed, ends=ends) for seed, rank in ((1, 4), (2, 40))]


def test_two_loras_draw_what_merging_by_hand_draws(kind, folder, loras, tmp_path):
    pipe = ours_on_gpu(folder)
    plain = draw(pipe)
    assert torch.equal(draw(pipe), plain)
    before = graphs(pipe)
    pipe.load_lora_weights(save(tmp_path / "a.safetensors", in_diffusers(loras[0])), adapter_name="a")
    pipe.load_lora_weights(save(tmp_path / "b.safetensors", in_kohya(loras[1], 20.0)), adapter_name="b")
    pipe.set_adapters(["a", "b"], [0.7, 0.4])
    drawn = draw(pipe)
    by_hand = merge(merge(text_pipeline(kind), deltas_of(loras[0]), 0.7), deltas_of(loras[1]), 0.2).to("cuda")
    assert_close(drawn, draw(by_hand))
    assert (drawn - plain).abs().max() > 0.1 * plain.abs().max()
    pipe.disable_lora()
    assert torch.equal(draw(pipe), plain)
    pipe.enable_lora()
    assert torch.equal(draw(pipe), drawn)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), plain)
    assert before and graphs(pipe) == before


@pytest.mark.parametrize("factors", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_weights_are_merged_in_float32_and_rounded_once(dtype, factors, folder, loras):
    pipe, plain = ours_on_gpu(folder, dtype), ours_on_gpu(folder, dtype)
    state = {name: each.to(factors) for name, each in in_diffusers(loras[0]).items()}
    pipe.load_lora_weights(state, adapter_name="a")
    pipe.set_adapters("a", 0.7)
    merged = dict(pipe.unet.named_parameters())
    checked = 0
    for name, weight in plain.unet.named_parameters():
        place = f"unet.{name.removesuffix('.weight')}"
        if f"{place}.lora_A.weight" in state and weight.ndim == 2:
            down, up = (state[f"{place}.lora_{half}.weight"].cuda().double() for half in "AB")
            exact = weight.double() + 0.7 * (up @ down)
            error = (merged[name].double() - exact).abs()
            assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * exact.abs().max()).all()
            checked += 1
    assert checked


@pytest.mark.parametrize("offload", [False, True], ids=["on-gpu", "offload"])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_in_8_bits_the_bits_are_those_of_a_folder_with_the_merged_weights(precision, offload, folder, loras, tmp_path):
    options = {"device": "cuda", "dtype": torch.bfloat16, "offload": offload}
    full = fastdiff.Pipeline.from_pretrained(folder, **options | {"precision": "full"})
    full.save_pretrained(tmp_path / "plain")
    merged = fastdiff.Pipeline.from_pretrained(tmp_path / "plain", **options)
    for pipe in (merged, fastdiff.Pipeline.from_pretrained(tmp_path / "plain", precision=precision, **options)):
        plain = draw(pipe)
        assert torch.equal(draw(pipe), plain)
        before = graphs(pipe)
        for i, each in enumerate(loras):
            pipe.load_lora_weights(in_diffusers(each), f"{i}")
        pipe.set_adapters(["0", "1"], [0.7, 0.4])
        if pipe is merged:
            pipe.fuse_lora([*pipe.get_list_adapters()])
            pipe.unload_lora_weights()
            pipe.save_pretrained(tmp_path / "merged")
    wanted = fastdiff.Pipeline.from_pretrained(tmp_path / "merged", precision=precision, **options)
    drawn = draw(pipe)
    found = dict(pipe.unet.named_parameters())
    for name, each in wanted.unet.named_parameters():
        assert torch.equal(found[name].flatten().view(torch.uint8), each.flatten().view(torch.uint8)), name
    assert torch.equal(drawn, draw(wanted)) and not torch.equal(drawn, plain)
    pipe.disable_lora()
    assert torch.equal(draw(pipe), plain)
    pipe.enable_lora()
    assert torch.equal(draw(pipe), drawn)
    pipe.unload_lora_weights()
    assert torch.equal(draw(pipe), plain)
    assert offload or graphs(pipe) == before  # offloading frees graphs


def test_a_picture_has_the_same_bits_in_any_batch(folder, loras):
    pipe = ours_on_gpu(folder, torch.float16)
    pipe.load_lora_weights(in_diffusers(loras[0]))
    several = pipe(["a photo"] * 3, seed=[1, 2, 3], num_inference_steps=4, output_type="latent").images
    alone = pipe("a photo", seed=2, num_inference_steps=4, output_type="latent").images
    assert torch.equal(several[1], alone[0])


def test_an_embedding(kind, folder, tmp_path):
    if kind == "sdxl":
        pytest.skip("diffusers loads one file for each text encoder")
    theirs, ours = text_pipeline(kind).to("cuda"), ours_on_gpu(folder)
    width = theirs.text_encoder.config.hidden_size
    vectors = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    save_file({"<cat-toy>": vectors}, tmp_path / "learned_embeds.safetensors")
    for pipe in (theirs, ours):
        pipe.load_textual_inversion(str(tmp_path))
    assert_close(draw(ours, "a <cat-toy> photo"), draw(theirs, "a <cat-toy> photo"))
