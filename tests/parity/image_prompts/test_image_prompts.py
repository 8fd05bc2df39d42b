"""IP-Adapters against diffusers' pipelines in float32: one generator, the latents of every step, the pictures."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fastdiff
from tests.parity.control.pipelines import controlled
from tests.parity.image_prompts.adapters import SIZE, ip_adapter, nested, picture, save_ip_adapter, with_encoder
from tests.parity.image_starts import pictures as starts
from tests.support.text_parity import assert_both_draw_the_same, assert_same, draw
from tests.support.text_pipelines import text_pipeline

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword",
        "ignore:You have passed .* text prompts:FutureWarning",
    ),
]
KINDS = ("sd1", "sdxl")
SEVERAL = {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2}


@pytest.fixture(scope="module")
def pair(text_folder):
    """Return diffusers' pipeline of a kind and ours, with image encoders."""
    made = {}

    def pair(kind):
        if kind not in made:
            theirs = with_encoder(text_pipeline(kind))
            encoder = theirs.image_encoder
            ours = fastdiff.Pipeline.from_pretrained(text_folder(kind), device="cpu", image_encoder=encoder)
            made[kind] = theirs, ours
        return made[kind]

    return pair


@pytest.fixture
def both(pair):
    """Load adapters into both pipelines of a kind, and unload them after the test."""
    used = []

    def both(kind, *adapters):
        theirs, ours = pair(kind)
        files = [nested(ip_adapter(theirs.unet, adapter, i)) for i, adapter in enumerate(adapters)]
        theirs.load_ip_adapter(files, [""] * len(files), [""] * len(files), low_cpu_mem_usage=False)
        ours.load_ip_adapter(files)
        used.append((theirs, ours))
        return theirs, ours

    yield both
    for theirs, ours in used:
        theirs.unload_ip_adapter()
        with_encoder(theirs)
        ours._loaded = None


PIXELS = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
CASES = {
    "guided": {},
    "unguided": {"guidance_scale": 1.0},
    "batch": SEVERAL,
    "two-pictures": {"ip_adapter_image": [[picture(0), picture(1, 20, 70)]]},
    "grey": {"ip_adapter_image": picture(2).convert("L")},
    "pixels": {"ip_adapter_image": PIXELS},
    "rescale": {"guidance_rescale": 0.7},
    "latent": {"output_type": "latent", "negative_prompt": "riding"},
}


@pytest.mark.parametrize(
    ("kind", "adapter", "options"),
    [
        pytest.param(kind, adapter, options, id=f"{kind}-{adapter}-{case}")
        for i, (case, options) in enumerate(CASES.items())
        for j, kind in enumerate(KINDS)
        for k, adapter in enumerate(("plain", "plus"))
        if i == 0 or (i + j + k) % 2
    ],
)
def test_options(kind, adapter, options, both):
    assert_both_draw_the_same(*both(kind, adapter), **{"ip_adapter_image": picture()} | options)


SCALES = {
    "number": ("sd1", 0.6),
    "zero": ("sd1", 0),
    "negative": ("sdxl", -0.5),
    "blocks": ("sd1", {"down": {"block_0": [0.3]}, "up": {"block_1": [0.0, 1.2]}}),
    "sides": ("sdxl", {"down": 0.4, "up": 0.9}),
    "middle": ("sdxl", {"mid": 0.7}),
    "one-block": ("sdxl", {"up": {"block_0": [0.0, 1.0]}}),
}


@pytest.mark.parametrize(("kind", "scale"), SCALES.values(), ids=SCALES)
def test_scales(kind, scale, both):
    theirs, ours = both(kind, "plain")
    for pipe in (theirs, ours):
        pipe.set_ip_adapter_scale(scale)
    assert_both_draw_the_same(theirs, ours, ip_adapter_image=picture(), num_inference_steps=2)


@pytest.mark.parametrize(
    ("kind", "scales"), [("sd1", [0.3, {"up": 1.1, "mid": 0.5}]), ("sdxl", [{"down": {"block_1": [0.5]}}, 0.8])]
)
def test_several_adapters(kind, scales, both):
    theirs, ours = both(kind, "plain", "plus")
    for pipe in (theirs, ours):
        pipe.set_ip_adapter_scale(scales)
    given = [picture(0), [picture(1), picture(2)]]
    assert_both_draw_the_same(theirs, ours, ip_adapter_image=given, num_inference_steps=2)


@pytest.mark.parametrize("kind", KINDS)
def test_image_to_image(kind, both):
    theirs, ours = both(kind, "plus")
    theirs = starts.of_same_parts(starts.IMAGE_TO_IMAGE, kind, theirs)
    options = {"image": starts.picture(), "strength": 0.6, "num_inference_steps": 5}
    assert_both_draw_the_same(theirs, ours, ip_adapter_image=picture(), **options)


def test_inpainting(both):
    theirs, ours = both("sd1", "plain")
    theirs = starts.of_same_parts(starts.INPAINTING, "sd1", theirs)
    options = {"image": starts.picture(), "mask_image": starts.mask(), "height": 16, "width": 16}
    assert_both_draw_the_same(theirs, ours, ip_adapter_image=picture(), **options)


@pytest.mark.parametrize(("kind", "adapter"), [("sd1", "plain"), ("sdxl", "plus")])
def test_beside_a_controlnet(kind, adapter, both):
    """The ControlNet reads the text alone."""
    theirs, ours = controlled("text", kind, both(kind, adapter))
    assert_both_draw_the_same(theirs, ours, ip_adapter_image=picture(), image=starts.picture(width=16, height=16))


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("adapter", ["plain", "plus"])
def test_prepared_embeds(adapter, guided, both):
    theirs, ours = both("sd1", adapter)
    given = [[picture(0), picture(1)]], None, "cpu", 1, guided
    wanted = theirs.prepare_ip_adapter_image_embeds(*given)
    found = ours.prepare_ip_adapter_image_embeds(*given)
    for mine, expected in zip(found, wanted, strict=True):
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()
    options = {"ip_adapter_image_embeds": wanted, "guidance_scale": 6.0 if guided else 1.0, "num_inference_steps": 2}
    assert_both_draw_the_same(theirs, ours, **options)


@pytest.mark.parametrize("states", [None, True])
def test_encoded_images(states, both):
    theirs, ours = both("sd1", "plain")
    wanted = theirs.encode_image([picture(0), picture(1)], "cpu", 2, states)
    for mine, expected in zip(ours.encode_image([picture(0), picture(1)], "cpu", 2, states), wanted, strict=True):
        assert mine.shape == expected.shape
        assert (mine - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


def test_a_callback_edits_the_prompt(both):
    def edit(pipe, step, timestep, tensors):
        return {"latents": tensors["latents"], "prompt_embeds": tensors["prompt_embeds"] * 0.9}

    theirs, ours = both("sd1", "plain")
    assert_both_draw_the_same(theirs, ours, ip_adapter_image=picture(), edit=edit, names=["prompt_embeds"])


def test_the_picture_counts(both):
    """The comparisons above can fail."""
    _, ours = both("sd1", "plain")
    first, other = (draw(ours, ip_adapter_image=image) for image in (picture(), Image.new("RGB", (40, 40), "red")))
    with pytest.raises(AssertionError):
        assert_same(first, other)


def test_a_folder_saved_with_an_ip_adapter_is_the_plain_model(text_folder, tmp_path):
    """diffusers saves the image encoder and the IP-Adapter's weights, and leaves these out when it loads the folder."""
    theirs = with_encoder(text_pipeline("sd1"))
    save_ip_adapter(tmp_path, ip_adapter(theirs.unet))
    theirs.load_ip_adapter(str(tmp_path), subfolder="", weight_name="ip-adapter.safetensors")
    theirs.save_pretrained(tmp_path / "saved")
    keys = load_file(tmp_path / "saved/unet/diffusion_pytorch_model.safetensors").keys()
    assert any("to_k_ip" in key for key in keys) and (tmp_path / "saved/image_encoder").is_dir()
    options = {"num_inference_steps": 1, "seed": 3, "output_type": "pt"}
    found, plain = (
        fastdiff.Pipeline.from_pretrained(folder, device="cpu")("a cat", **options).images
        for folder in (tmp_path / "saved", text_folder("sd1"))
    )
    assert torch.equal(found, plain)
