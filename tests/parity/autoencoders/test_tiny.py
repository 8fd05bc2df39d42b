"""AutoencoderTiny against diffusers' in float32: options, tiles, bytes, folders; in a pipeline and for its previews."""

import json
import shutil

import diffusers
import pytest
import torch

import fastdiff
from fastdiff import AutoencoderKL, AutoencoderTiny, InputError, Pipeline
from tests.support.pairwise import each_option
from tests.support.text_pipelines import text_pipeline

BASE = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
TWO_LEVELS = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 2),
    "num_decoder_blocks": (2, 1),
}
OPTIONS = {
    "taesd": {},
    "taesd3": {"latent_channels": 16},
    "channels": {"in_channels": 1, "out_channels": 5},
    "two-levels": TWO_LEVELS,
    "no-blocks": {"num_encoder_blocks": (0, 1, 0, 2), "num_decoder_blocks": (1, 0, 2, 0)},
    "one-level": {name: value[:1] for name, value in TWO_LEVELS.items()},
    "times-three": TWO_LEVELS | {"upsampling_scaling_factor": 3},
    "bytes": {"latent_magnitude": 2, "latent_shift": 0.4},
    "scales": {"scaling_factor": 0.5, "shift_factor": 0.1, "force_upcast": True},
    **{name: {"upsample_fn": name} for name in ("nearest-exact", "bilinear", "bicubic")},
    **{name: {"act_fn": name} for name in ("silu", "mish", "gelu")},
}


@pytest.fixture
def pair(tmp_path, randomise):
    """Return diffusers' model and ours, loaded from the same files."""

    def build(**options):
        theirs = randomise(diffusers.AutoencoderTiny(**BASE | options))
        theirs.save_pretrained(tmp_path / "vae")
        return theirs, AutoencoderTiny.from_pretrained(tmp_path / "vae")

    return build


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max().item()
    assert error <= 1e-4
    assert error <= 2e-5 * max(1, theirs.abs().max().item())


def pictures(config, height: int = 40, width: int = 24) -> torch.Tensor:
    return torch.rand(2, config.in_channels, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def latents(config, height: int = 5, width: int = 3) -> torch.Tensor:
    """Return latents, some of them beyond the limit of the decoder's tanh."""
    return 3 * torch.randn(2, config.latent_channels, height, width, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", each_option(OPTIONS))
@torch.no_grad()
def test_option(case, pair):
    theirs, ours = pair(**OPTIONS[case])
    x, z = pictures(ours.config), latents(ours.config)
    assert_close(ours.encode(x).latents, theirs.encode(x).latents)
    assert_close(ours.decode(z).sample, theirs.decode(z).sample)
    assert ours.decode(z, return_dict=False)[0].shape[2] == ours.config.scale * z.shape[2]


@torch.no_grad()
def test_latents_pass_through_bytes(pair):
    theirs, ours = pair(latent_magnitude=0.5)
    x = pictures(ours.config)
    assert_close(ours(x).sample, theirs(x).sample)
    assert torch.equal(ours(x, return_dict=False)[0], ours(x).sample)
    assert_close(ours.unscale_latents(ours.scale_latents(x)), theirs.unscale_latents(theirs.scale_latents(x)))


@torch.no_grad()
def test_tiles(pair):
    theirs, ours = pair()
    for model in (theirs, ours):
        model.enable_tiling()
        model.tile_sample_min_size, model.tile_latent_min_size, model.tile_overlap_factor = 64, 8, 0.25
    x, z = pictures(ours.config, 136, 96), latents(ours.config, 17, 12)
    assert_close(ours.encode(x).latents, theirs.encode(x).latents)
    assert_close(ours.decode(z).sample, theirs.decode(z).sample)
    whole = ours.decode(z).sample
    ours.disable_tiling()
    assert not torch.equal(ours.decode(z).sample, whole)
    ours.enable_tiling()
    with pytest.raises(InputError, match="height, width: tiles need multiples of 8"):
        ours.encode(x[:, :, :100])
    ours.tile_overlap_factor = 0.0
    with pytest.raises(InputError, match="tile sizes: "):
        ours.decode(z)


def test_same_bits_in_any_batch(pair):
    _, ours = pair()
    z = latents(ours.config)
    assert torch.equal(ours.decode(z).sample[1:], ours.decode(z[1:]).sample)


BAD = {
    "widths-differ": ({"encoder_block_out_channels": (8, 8, 8, 16)}, "encoder_block_out_channels: 16 differs"),
    "lengths-differ": ({"num_decoder_blocks": (1, 1)}, "num_decoder_blocks: 2 given for 4"),
    "upsampling": ({"upsample_fn": "linear"}, "upsample_fn: 'linear'"),
    "unknown": ({"layers": 3}, "unknown option layers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_config(case):
    options, message = BAD[case]
    with pytest.raises(InputError, match=message):
        AutoencoderTiny.from_config(BASE | options)


def test_bad_calls_and_folders(pair, tmp_path, randomise):
    _, ours = pair()
    with pytest.raises(InputError, match=r"x: expected \(N, 4, H, W\)"):
        ours.decode(torch.zeros(1, 3, 4, 4))
    with pytest.raises(InputError, match="x: it requires grad"):
        ours.encode(torch.zeros(1, 3, 8, 8, requires_grad=True))
    with pytest.raises(InputError, match="describes a AutoencoderTiny, but AutoencoderKL is wanted"):
        AutoencoderKL.from_pretrained(tmp_path / "vae")
    path = tmp_path / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"latent_channels": 8}))
    with pytest.raises(InputError, match="latent_channels is 8, but 4 in the weights"):
        AutoencoderTiny.from_pretrained(tmp_path / "vae")


@pytest.fixture
def tiny_folder(text_folder, tmp_path, randomise):
    """A Stable Diffusion folder whose VAE is an AutoencoderTiny, and diffusers' pipeline of it."""
    folder = shutil.copytree(text_folder("sd1"), tmp_path / "sd")
    shutil.rmtree(folder / "vae")
    pipe = text_pipeline("sd1")
    pipe.vae = randomise(diffusers.AutoencoderTiny(**BASE | TWO_LEVELS))
    pipe.save_pretrained(folder)
    return folder, pipe


def test_a_pipeline_with_a_tiny_vae(tiny_folder):
    folder, theirs = tiny_folder
    ours = Pipeline.from_pretrained(folder, device="cpu")
    assert type(ours.vae) is AutoencoderTiny and ours.scale == 2
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    options = {"num_inference_steps": 2, "latents": z, "output_type": "pt"}
    expected = theirs("a cat", **options).images
    torch.testing.assert_close(ours("a cat", **options).images, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("sd1", marks=pytest.mark.slow), "sdxl"])
def test_previews_of_a_tiny_vae(text_folder, kind, randomise):
    """Previews have the full size, and are x0 as the preview's VAE decodes it. The pictures keep their bits."""
    pipe = Pipeline.from_pretrained(text_folder(kind), device="cpu")
    options = {
        "seed": 1,
        "height": 128,
        "width": 160,
        "guidance_scale": 1,
        "num_inference_steps": 2,
        "output_type": "pt",
    }
    *_, last = pipe.stream("a cat", **options)
    pipe.preview_vae = tiny = randomise(AutoencoderTiny.from_config(BASE | TWO_LEVELS))
    assert tiny in pipe.models and pipe.with_scheduler(pipe.scheduler).preview_vae is tiny
    steps = list(pipe.stream("a cat", **options))
    assert torch.equal(steps[-1].images, last.images)
    (image,) = steps[0].preview()
    expected = tiny.decode(steps[0].x0.permute(0, 3, 1, 2)).sample[0].permute(1, 2, 0)
    levels = ((expected / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    assert image.size == (160, 128)
    assert image.tobytes() == levels.numpy().tobytes()
    pipe.preview_vae = None
    assert next(iter(pipe.stream("a cat", **options))).preview()[0].size == last.preview()[0].size == (80, 64)


def test_a_preview_vae_of_other_latents_is_refused(text_folder, tmp_path, tiny_pixels):
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    with pytest.raises(InputError, match="preview_vae: it decodes 16 channels, but this pipeline has latents of 4"):
        pipe.preview_vae = AutoencoderTiny.from_config(BASE | {"latent_channels": 16})
    with pytest.raises(InputError, match="preview_vae: "):
        pipe.preview_vae = "taesd"
    with pytest.raises(InputError, match="this pipeline draws pixels, without a VAE"):
        tiny_pixels.preview_vae = AutoencoderTiny.from_config(BASE)


@pytest.fixture
def tiny_pixels():
    return fastdiff.Pipeline.from_pretrained("emoji64", device="cpu")
