"""AutoencoderKL on a GPU: compared with the float32 reference on the CPU, in any batch, with and without graphs."""

import pytest
import torch

from benchmarks.models.stable_diffusion import SD15_VAE
from fastdiff import AutoencoderKL, DDIMScheduler, DiTTransformer2DModel, LabelPipeline
from fastdiff.kernels.plans.choices import references_only
from fastdiff.models import coding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]

SMALL = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
    "sample_size": 64,
}
MODELS = {
    "small": SMALL,
    "attention": SMALL
    | {
        "down_block_types": ("AttnDownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "AttnUpDecoderBlock2D"),
        "norm_num_groups": 32,
    },
    "odd": SMALL | {"block_out_channels": (24, 40), "latent_channels": 5, "in_channels": 1, "act_fn": "gelu"},
    "wide": SMALL | {"block_out_channels": (128, 512), "norm_num_groups": 32},  # SD's head of 512 channels
}
HALVES = ("decode", "encode")


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def make(randomise):
    def make(name, force_upcast):
        vae = randomise(AutoencoderKL.from_config(MODELS[name] | {"force_upcast": force_upcast}))
        for layer in vae.modules():  # with large weights, attention would pick single keys
            if isinstance(layer, torch.nn.Linear):
                layer.weight *= min(1, 10 * layer.in_features**-0.5)
        return vae

    return make


@pytest.fixture
def vae(name, make):
    return make(name, force_upcast=False)


def given(vae, half, n, side=12, seed=0):
    config = vae.config
    channels, side = (config.latent_channels, side) if half == "decode" else (config.in_channels, config.scale * side)
    return torch.randn(n, channels, side, side + 4, generator=torch.Generator().manual_seed(seed))


def run(vae, half, x):
    return vae.decode(x).sample if half == "decode" else vae.encode(x).latent_dist.parameters


@pytest.mark.parametrize("half", HALVES)
def test_float32_is_the_reference(vae, half):
    x = given(vae, half, 2)
    expected = run(vae, half, x)
    vae.cuda()
    for _ in range(3):  # eager, captured, replayed
        error = (run(vae, half, x.cuda()).cpu() - expected).abs().max()
        assert error <= 1e-4
        assert error <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_errs_at_most_twice_as_much_as_torch(vae, half, dtype):
    x = given(vae, half, 2)
    expected = run(vae, half, x)
    vae.to("cuda", dtype)
    vae.use_graphs = False
    ours = run(vae, half, x.cuda()).cpu()
    with references_only():
        torchs = run(vae, half, x.cuda()).cpu()
    error, allowed = (ours - expected).norm(), (torchs - expected).norm()
    assert error <= 2 * allowed, f"{error / expected.norm():.2e} against torch's {allowed / expected.norm():.2e}"


@pytest.mark.parametrize("tiling", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_same_bits_in_any_batch(vae, half, dtype, tiling, monkeypatch):
    """Whether pictures are computed together or in turn, the bits are the same."""
    vae.to("cuda", dtype)
    vae.use_tiling = tiling
    x = given(vae, half, 16, side=40).to("cuda", dtype)
    alone = run(vae, half, x[5:6])
    for most in (coding.PIXELS_AT_ONCE, 80 * 88 * 3):
        monkeypatch.setattr(coding, "PIXELS_AT_ONCE", most)
        for places in (slice(5, 6), slice(4, 7), slice(5, 13), slice(0, 16)):
            assert torch.equal(run(vae, half, x[places])[5 - places.start], alone[0])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["small"])
def test_graphs_change_no_bit_and_no_earlier_output(vae, half, dtype):
    vae.to("cuda", dtype)
    first, second = (given(vae, half, 2, seed=seed).to("cuda", dtype) for seed in (0, 1))
    vae.use_graphs = False
    expected = [run(vae, half, x) for x in (first, second)]
    vae.use_graphs = True
    outputs = [run(vae, half, x) for x in (first, second, first, second)]
    assert len(vae._graphs) == 1
    for output, wanted in zip(outputs, expected * 2, strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("force_upcast", [True, False], ids=["by rule", "after a NaN"])
@pytest.mark.parametrize("name", ["small", "wide"])
def test_float16_that_overflows_is_computed_in_float32(name, make, caplog, force_upcast):
    vae = make(name, force_upcast)
    conv = vae.decoder.up_blocks[0].upsamplers[0].conv
    for parameter in conv.parameters():
        parameter.mul_(1e5)
    x = given(vae, "decode", 3)
    expected = vae.half().float().decode(x).sample
    vae.to("cuda", torch.float16)
    for _ in range(3):  # eager, captured, replayed
        found = vae.decode(x.cuda()).sample.cpu()
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert len(caplog.messages) == (0 if force_upcast else 1)
    vae.decoder.conv_out.bias.add_(1)  # a graph follows the change
    assert (vae.decode(x.cuda()).sample - found.cuda()).mean() > 0.99


def test_tiles_of_a_large_picture_take_less_memory():
    vae = AutoencoderKL.from_config(SD15_VAE | {"sample_size": 256}).to("cuda", torch.bfloat16)
    vae.use_graphs = False
    z = given(vae, "decode", 1, side=128).cuda()
    peaks = []
    for vae.use_tiling in (False, True):
        torch.cuda.reset_peak_memory_stats()
        assert vae.decode(z).sample.isfinite().all()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0] / 3


def test_a_pipeline_of_latents_in_any_company(randomise):
    options = {"sample_size": 16, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
    denoiser = randomise(DiTTransformer2DModel.from_config(options | {"in_channels": 4, "out_channels": 4}))
    vae = randomise(AutoencoderKL.from_config(SMALL))
    pipe = LabelPipeline(denoiser, DDIMScheduler(), vae=vae).to("cuda", torch.bfloat16)
    options = {"num_inference_steps": 5, "class_labels": 3, "output_type": "pt"}
    alone = pipe(seed=11, **options).images
    assert alone.isfinite().all() and alone.std() > 0
    assert torch.equal(pipe(seed=[1, 11, 2], **options).images[1], alone[0])
