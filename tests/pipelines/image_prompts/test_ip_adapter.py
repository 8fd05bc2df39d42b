"""IP-Adapters in a pipeline: equal bits, files, scales without new graphs, and one line for anything wrong."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastdiff
from fastdiff import InputError, NonFiniteError
from tests.parity.image_prompts.adapters import image_encoder, ip_adapter, nested, picture, save_ip_adapter
from tests.support.text_pipelines import text_pipeline, tiny_unet

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Save the adapters of a kind. Return their folder: models/plain.safetensors, models/plus.bin, the encoder."""
    folder = tmp_path_factory.mktemp("ip")
    unet = text_pipeline("sd1").unet
    save_ip_adapter(folder / "models", ip_adapter(unet, "plain"), "plain.safetensors")
    save_ip_adapter(folder / "models", ip_adapter(unet, "plus", 1), "plus.bin")
    return folder


@pytest.fixture
def pipe(text_folder):
    return fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu")


@pytest.fixture(scope="module")
def loaded(text_folder, files):
    """Return a pipeline with a plain adapter. Tests must not change it."""
    pipe = fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    pipe.load_ip_adapter(files, "models", "plain.safetensors")
    return pipe


def draw(pipe, seeds=(3,), **options):
    given = {"num_inference_steps": 2, "output_type": "latent", "seed": list(seeds)} | options
    return pipe(given.pop("prompt", "a cat"), **given).images


def test_unloaded_and_scaled_to_nothing_it_gives_the_bits_of_the_plain_model(pipe, files):
    plain = draw(pipe)
    pipe.load_ip_adapter(files, subfolder="models", weight_name="plain.safetensors")
    on = draw(pipe, ip_adapter_image=picture())
    assert not torch.equal(on, plain)
    pipe.set_ip_adapter_scale(0.0)
    assert torch.equal(draw(pipe, ip_adapter_image=picture()), plain)
    pipe.set_ip_adapter_scale({"down": 1.0, "mid": 1.0, "up": 1.0})
    assert torch.equal(draw(pipe, ip_adapter_image=picture()), on)
    pipe.unload_ip_adapter()
    assert pipe.image_encoder is None and pipe.feature_extractor is None
    assert torch.equal(draw(pipe), plain)


@pytest.mark.parametrize("guidance_scale", [7.5, 1.0])
def test_equal_bits_in_any_batch(loaded, guidance_scale):
    options = {"ip_adapter_image": picture(), "guidance_scale": guidance_scale}
    together = draw(loaded, range(5), **options)
    for i in range(5):
        assert torch.equal(draw(loaded, [i], **options)[0], together[i])


def test_equal_bits_in_any_company_of_image_prompts(loaded):
    """`ip_adapter_image_embeds` may have a row for each picture."""
    prompts = [loaded.prepare_ip_adapter_image_embeds(picture(i), None, None, 1, True)[0] for i in range(3)]
    away, own = (torch.cat(half) for half in zip(*(each.chunk(2) for each in prompts), strict=True))
    together = draw(loaded, [4, 5, 6], ip_adapter_image_embeds=[torch.cat([away, own])])
    for i, each in enumerate(prompts):
        assert torch.equal(draw(loaded, [4 + i], ip_adapter_image_embeds=[each])[0], together[i])
        assert torch.equal(draw(loaded, [4 + i], ip_adapter_image=picture(i))[0], together[i])


def test_prompts_of_several_lengths_keep_their_image_prompts(loaded):
    long, options = "the cat " * 20, {"prompt_syntax": "weighted", "ip_adapter_image": picture()}
    together = draw(loaded, [1, 2], prompt=["a cat", long], batch_size=2, **options)
    for i, prompt in enumerate(["a cat", long]):
        assert torch.equal(draw(loaded, [1 + i], prompt=prompt, **options)[0], together[i])


def test_a_run_that_goes_on_larger_reads_the_picture_again(loaded):
    options = {"upscale": 2, "num_inference_steps": 4}
    first, other = (draw(loaded, ip_adapter_image=picture(i), **options) for i in (0, 1))
    assert first.shape[-1] == 16 and not torch.equal(first, other)


def test_a_scale_builds_no_new_graph(pipe, files):
    pipe.load_ip_adapter(files, "models", "plain.safetensors")
    for _ in range(3):
        draw(pipe, ip_adapter_image=picture())
    before = {name: id(graph) for name, graph in pipe.unet._graphs.items()}
    programs = {name: len(vars(graph).get("_programs", ())) for name, graph in pipe.unet._graphs.items()}
    assert before
    pipe.set_ip_adapter_scale(0.3)
    draw(pipe, ip_adapter_image=picture(1))
    assert {name: id(graph) for name, graph in pipe.unet._graphs.items()} == before
    assert {name: len(vars(graph).get("_programs", ())) for name, graph in pipe.unet._graphs.items()} == programs


def test_every_way_to_name_the_files_is_the_same(text_folder, files, loaded):
    wanted = draw(loaded, ip_adapter_image=picture())
    tensors = load_file(files / "models" / "plain.safetensors")
    torch.save(nested(tensors), files / "models" / "plain.bin")
    encoder = image_encoder()
    ways = [
        ((files / "models" / "plain.safetensors",), {}),
        ((str(files), "models", "plain.bin"), {"low_cpu_mem_usage": True}),
        (([files], ["models"], ["plain.safetensors"]), {"image_encoder_folder": "models/image_encoder"}),
        ((nested(tensors),), {"image_encoder_folder": None}),
        ((tensors,), {"image_encoder_folder": None}),
    ]
    for args, options in ways:
        given = {"image_encoder": encoder} if "image_encoder_folder" in options else {}
        pipe = fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu", **given)
        pipe.load_ip_adapter(*args, **options)
        assert torch.equal(draw(pipe, ip_adapter_image=picture()), wanted)


def test_several_files_of_one_folder(pipe, files):
    pipe.load_ip_adapter(files, "models", ["plain.safetensors", "plus.bin"])
    both = draw(pipe, ip_adapter_image=[picture(0), picture(1)])
    pipe.set_ip_adapter_scale([1.0, 0.0])
    first = draw(pipe, ip_adapter_image=[picture(0), picture(1)])
    pipe.load_ip_adapter(files, "models", "plain.safetensors")
    assert torch.equal(draw(pipe, ip_adapter_image=picture(0)), first)
    assert not torch.equal(both, first)


def test_another_dtype_and_another_unet(loaded, text_folder, files):
    half = fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu", dtype="bfloat16")
    half.load_ip_adapter(files, "models", "plain.safetensors")
    assert half.image_encoder.dtype == torch.bfloat16
    wanted, found = (draw(pipe, ip_adapter_image=picture()).float() for pipe in (loaded, half))
    assert (found - wanted).norm() <= 0.05 * wanted.norm()
    half.to(torch.float32)
    assert draw(half, ip_adapter_image=picture()).isfinite().all()
    other = loaded.with_parts(unet=tiny_unet("sd1"))
    with pytest.raises(InputError, match=r"^ip_adapter_image: no IP-Adapter is loaded"):
        draw(other, ip_adapter_image=picture())
    assert draw(other).isfinite().all()


def edited(tmp_path, files, edit, name="plain.safetensors"):
    """Save an adapter whose tensors `edit` changes. Return the file."""
    tensors = load_file(files / "models" / "plain.safetensors")
    if name.startswith("plus"):
        tensors = ip_adapter(text_pipeline("sd1").unet, "plus")
    edit(tensors)
    save_file(tensors, tmp_path / "edited.safetensors")
    return tmp_path / "edited.safetensors"


V1 = "ip_adapter.1.to_v_ip.weight"
LORA = "ip_adapter.0.to_q_lora.down.weight"
BAD_FILES = {
    "nan": (lambda t: t[V1].fill_(torch.nan), NonFiniteError, V1),
    "infinity": (lambda t: t["image_proj.norm.bias"].fill_(torch.inf), NonFiniteError, "image_proj.norm.bias"),
    "missing-layer": (lambda t: t.pop(V1), InputError, f"has no {V1}; give an IP-Adapter of this model"),
    "more-layers": (
        lambda t: t.update({"ip_adapter.99.to_k_ip.weight": t[V1].clone()}),
        InputError,
        "has unknown ip_adapter.99",
    ),
    "other-width": (lambda t: t.update({V1: torch.ones(8, 32)}), InputError, r"other shapes: .*\(8, 32\)"),
    "face-id": (lambda t: t.update({LORA: torch.ones(4, 16)}), InputError, "is an IP-Adapter FaceID, .* plain or plus"),
    "face-id-plus": (
        lambda t: t.update({"image_proj.perceiver_resampler.proj_in.weight": torch.ones(4, 4)}),
        InputError,
        "is an IP-Adapter FaceID Plus",
    ),
    "full": (
        lambda t: (t.pop("image_proj.proj.weight"), t.update({"image_proj.proj.3.weight": torch.ones(4)})),
        InputError,
        "is an IP-Adapter Full",
    ),
    "unknown-kind": (lambda t: t.pop("image_proj.proj.weight"), InputError, "it has no image_proj.proj.weight and no"),
    "no-adapter": (
        lambda t: (t.clear(), t.update(weight=torch.ones(2))),
        InputError,
        "is no IP-Adapter: it has no ima",
    ),
    "no-norm": (lambda t: t.pop("image_proj.norm.weight"), InputError, "its image_proj.norm.weight is missing"),
    "bytes": (lambda t: t.update({V1: t[V1].to(torch.uint8)}), InputError, "not floating point"),
    "encoder": (
        lambda t: t.update({"image_proj.proj.weight": torch.ones(128, 32)}),
        InputError,
        "image_encoder: it gives 24 channels, and .* reads 32; give the image encoder",
    ),
    "plus-heads": (
        lambda t: t.update({"image_proj.layers.0.0.to_q.weight": torch.ones(100, 128)}),
        InputError,
        "100 channels, which is no multiple of 64",
    ),
    "plus-layer": (
        lambda t: t.pop("image_proj.layers.2.1.3.weight"),
        InputError,
        r"has no image_proj\.layers\.2\.1\.3\.weight; download it again",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_line_and_changes_nothing(case, loaded, files, tmp_path):
    edit, kind, message = BAD_FILES[case]
    file = edited(tmp_path, files, edit, "plus" if case.startswith("plus") else "plain")
    before = draw(loaded, ip_adapter_image=picture())
    with pytest.raises(kind, match=message) as error:
        loaded.load_ip_adapter(file)
    assert "\n" not in str(error.value)
    assert torch.equal(draw(loaded, ip_adapter_image=picture()), before)


def test_an_adapter_of_another_model_is_one_line(loaded, files, tmp_path, text_folder):
    file = save_ip_adapter(tmp_path, ip_adapter(text_pipeline("sdxl").unet))
    with pytest.raises(
        InputError, match="its tokens have 72 channels, and this model reads 32; give an IP-Adapter of t"
    ):
        loaded.load_ip_adapter(file)
    sdxl = fastdiff.Pipeline.from_pretrained(text_folder("sdxl"), device="cpu")
    plain = draw(sdxl)
    with pytest.raises(InputError, match="its tokens have 32 channels, and this model reads 72"):
        sdxl.load_ip_adapter(files, "models", "plain.safetensors")
    assert sdxl.image_encoder is None and torch.equal(draw(sdxl), plain)


BAD_PLACES = {
    "no-name": (("models",), {}, "weight_name: missing; give the name of the IP-Adapter's file in"),
    "no-file": (("models", "other.bin"), {}, r"other\.bin does not exist"),
    "two-for-three": ((["models"] * 2, ["plain.safetensors"] * 3), {}, "subfolder: 2 given for 3 IP-Adapters"),
    "number": ((3,), {}, "subfolder: 3 is not a string"),
    "argument": (("models", "plain.safetensors"), {"strength": 1}, "strength: load_ip_adapter has no such argument"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD_PLACES.values(), ids=BAD_PLACES)
def test_a_place_without_an_adapter_is_one_line(args, options, message, loaded, files):
    with pytest.raises(InputError, match=message):
        loaded.load_ip_adapter(files, *args, **options)


def test_a_missing_image_encoder_is_one_line(pipe, files, tmp_path):
    save_file(load_file(files / "models" / "plain.safetensors"), tmp_path / "alone.safetensors")
    with pytest.raises(InputError, match=r"image_encoder_folder: .* does not exist; give the folder"):
        pipe.load_ip_adapter(tmp_path / "alone.safetensors")
    with pytest.raises(InputError, match="image_encoder_folder: a dict has none; give None"):
        pipe.load_ip_adapter(load_file(tmp_path / "alone.safetensors"))
    assert not pipe._ip_adapters
    pipe.load_ip_adapter(tmp_path / "alone.safetensors", image_encoder_folder=None)
    with pytest.raises(
        InputError, match=r"ip_adapter_image: there is no image encoder; set pipe.image_encoder, or give"
    ):
        draw(pipe, ip_adapter_image=picture())
    for wrong in (image_encoder(projection_dim=8), pipe.unet, 3):
        with pytest.raises(InputError, match=r"^image_encoder: "):
            pipe.image_encoder = wrong
    pipe.image_encoder = image_encoder()
    assert draw(pipe, ip_adapter_image=picture()).isfinite().all()
    assert pipe.image_encoder in pipe.models


def test_an_image_encoder_for_a_model_of_labels_is_one_line():
    with pytest.raises(InputError, match=r"^image_encoder: a DDIMPipeline has no such part"):
        fastdiff.Pipeline.from_pretrained("emoji64", device="cpu", image_encoder=image_encoder())


NAN = torch.full((2, 1, 24), torch.nan)
BAD_CALLS = {
    "missing": ({}, "ip_adapter_image: an IP-Adapter is loaded; give a picture, or call unload_ip_adapter"),
    "path": ({"ip_adapter_image": "cat.png"}, "ip_adapter_image: 'cat.png' is no picture"),
    "two": ({"ip_adapter_image": [picture(), picture()]}, "ip_adapter_image: 2 given for 1 IP-Adapter; give a list"),
    "none": ({"ip_adapter_image": [[]]}, "ip_adapter_image: 0 pictures given"),
    "pixels": (
        {"ip_adapter_image": torch.zeros(1, 3, 8, 8)},
        r"ip_adapter_image: its shape is .* give \(n, 3, 30, 30\)",
    ),
    "nan-pixels": ({"ip_adapter_image": torch.full((1, 3, 30, 30), torch.nan)}, "ip_adapter_image: it has NaN"),
    "both": (
        {"ip_adapter_image": picture(), "ip_adapter_image_embeds": [NAN]},
        "ip_adapter_image: ip_adapter_image_emb",
    ),
    "no-tensor": ({"ip_adapter_image_embeds": [3]}, "ip_adapter_image_embeds: 3 is not a tensor"),
    "nan": ({"ip_adapter_image_embeds": [NAN]}, "ip_adapter_image_embeds: it has NaN"),
    "width": (
        {"ip_adapter_image_embeds": [torch.zeros(2, 1, 8)]},
        r"ip_adapter_image_embeds: its shape is \(2, 1, 8\)",
    ),
    "one-half": (
        {"ip_adapter_image_embeds": [torch.zeros(1, 1, 24)]},
        "ip_adapter_image_embeds: 1 rows; a guided call",
    ),
    "rows": ({"ip_adapter_image_embeds": [torch.zeros(4, 1, 24)]}, "ip_adapter_image_embeds: 2 given for 1 pictures"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_argument_is_one_line(case, loaded):
    options, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=f"^{message}") as error:
        draw(loaded, **options)
    assert "\n" not in str(error.value)


BAD_SCALES = {
    "text": ("much", "scale: 'much' is not a finite number"),
    "none": (None, "scale: None is not a number"),
    "infinite": (float("inf"), "scale: inf is not a finite number"),
    "two": ([0.5, 0.5], "scale: 2 given for 1 IP-Adapters; give one for each"),
    "part": ({"left": 1}, "scale: 'left' is no part of a U-Net; give down, mid and up"),
    "block": ({"down": {"block_1": 1}}, r"scale\['down'\]: 'block_1' has no attention; give one of block_0"),
    "count": ({"up": {"block_1": [1, 2, 3]}}, r"scale\['up'\]\['block_1'\]: 3 numbers for 2 attentions"),
    "masks": ({"up": {"block_1": [[1, 2], 3]}}, r"scale\['up'\]\['block_1'\]: \[1, 2\] is not a finite number"),
}


@pytest.mark.parametrize(("scale", "message"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_a_wrong_scale_is_one_line_and_changes_nothing(scale, message, loaded):
    before = loaded._loaded
    with pytest.raises(InputError, match=f"^{message}"):
        loaded.set_ip_adapter_scale(scale)
    assert loaded._loaded is before


def test_without_an_adapter_there_is_nothing_to_scale_or_encode(pipe):
    with pytest.raises(InputError, match="scale: no IP-Adapter is loaded; load one with load_ip_adapter first"):
        pipe.set_ip_adapter_scale(0.5)
    with pytest.raises(InputError, match=r"image_encoder: there is none"):
        pipe.encode_image(picture(), None, 1)
    pipe.unload_ip_adapter()


def test_other_unets_are_refused(loaded, files):
    unet = tiny_unet("sd1", only_cross_attention=True)
    pipe = loaded.with_parts(unet=unet)
    with pytest.raises(InputError, match="this U-Net has other attentions than Stable Diffusion's"):
        pipe.load_ip_adapter(files, "models", "plain.safetensors")
