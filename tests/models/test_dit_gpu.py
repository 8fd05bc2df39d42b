"""DiTTransformer2DModel and its pipeline on a GPU: against the CPU's float32 references, in any batch, with graphs."""

import pytest
import torch

from fastdiff import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel, Pipeline, denoising
from fastdiff.kernels._dispatch import references_only

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

XL = {  # two blocks of DiT-XL/2
    "sample_size": 32,
    "num_layers": 2,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "out_channels": 8,
}
MODELS = {
    "xl": XL,
    "pixels": XL
    | {"in_channels": 3, "out_channels": 3, "patch_size": 4, "num_attention_heads": 6, "attention_head_dim": 64},
    "narrow": XL | {"num_attention_heads": 2, "attention_head_dim": 8, "activation_fn": "gelu"},
    "odd": XL
    | {"sample_size": 14, "num_attention_heads": 3, "attention_head_dim": 12, "norm_elementwise_affine": True},
}
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture(params=MODELS)
def model(request, randomise):
    return randomise(DiTTransformer2DModel.from_config(MODELS[request.param])).requires_grad_(False)


@pytest.fixture
def draw(randomise):
    """Pictures of a small guided model in bfloat16, as (N, C, H, W)."""
    denoiser = randomise(DiTTransformer2DModel.from_config(MODELS["pixels"] | {"out_channels": 6})).to(
        "cuda", torch.bfloat16
    )

    def draw(scheduler=None, **options):
        pipe = Pipeline(denoiser, scheduler or DDIMScheduler())
        options = {"num_inference_steps": 20, "guidance_scale": 2.0, "output_type": "pt"} | options
        return pipe(**options).images

    draw.denoiser = denoiser
    return draw


def inputs(model, n):
    generator = torch.Generator().manual_seed(n)
    sample = torch.randn(n, model.config.in_channels, *model.config.trained_size, generator=generator)
    return sample, torch.randint(0, 1000, (n,), generator=generator), torch.arange(n) % 7


def on_gpu(given, dtype=torch.float32):
    sample, *condition = given
    return sample.to("cuda", dtype), *(tensor.cuda() for tensor in condition)


def test_float32_is_the_reference(model):
    given = inputs(model, 2)
    expected = model(*given).sample
    model.cuda()
    for _ in range(3):  # eager, captured, replayed
        error = (model(*on_gpu(given)).sample.cpu() - expected).abs().max()
        assert error <= 1e-4
        assert error <= 2e-5 * expected.abs().max()


@HALVES
def test_half_precision_errs_at_most_twice_as_much_as_torch(model, dtype):
    given = inputs(model, 2)
    expected = model(*given).sample
    model.to("cuda", dtype)
    model.use_graphs = False
    ours = model(*on_gpu(given, dtype)).sample.float().cpu()
    with references_only():
        torchs = model(*on_gpu(given, dtype)).sample.float().cpu()
    error, allowed = (ours - expected).norm(), (torchs - expected).norm()
    assert error <= 2 * allowed, f"{error / expected.norm():.2e} against torch's {allowed / expected.norm():.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bits_in_any_batch(model, dtype):
    given = on_gpu(inputs(model, 64), dtype)
    model.to("cuda", dtype)

    def run(places):
        return model(*(tensor[places] for tensor in given)).sample

    alone = run(slice(5, 6))
    for places in (slice(4, 7), slice(5, 13), slice(0, 64)):
        assert torch.equal(run(places)[5 - places.start], alone[0])


def test_graphs_change_no_bit_and_no_earlier_output(model):
    model.to("cuda", torch.bfloat16)
    first, second = (
        on_gpu([tensor[half] for tensor in inputs(model, 4)], torch.bfloat16) for half in (slice(2), slice(2, 4))
    )
    model.use_graphs = False
    expected = [model(*given).sample for given in (first, second)]
    model.use_graphs = True
    outputs = [model(*given).sample for given in (first, second, first, second)]
    for output, wanted in zip(outputs, expected * 2, strict=True):
        assert torch.equal(output, wanted)


def test_the_launches_of_a_block(randomise):
    """Seven, as kernels/README.md says; whatever else a prediction launches does not grow with its blocks."""
    counts = []
    for layers in (2, 5):
        model = randomise(DiTTransformer2DModel.from_config(XL | {"num_layers": layers})).to("cuda", torch.bfloat16)
        x, conditioning = (
            torch.randn(2, 32, 32, 4, device="cuda").bfloat16(),
            model.conditioning(*on_gpu(inputs(model, 2))[1:]),
        )
        model.predict(x, conditioning)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model.predict(x, conditioning)
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
    assert counts[1] - counts[0] <= 3 * 7


@pytest.mark.parametrize(
    "scheduler", [DDIMScheduler(), DDPMScheduler(variance_type="learned_range")], ids=["ddim", "learned-variance"]
)
def test_pictures_in_any_company_with_graphs_and_without(draw, scheduler):
    alone = draw(scheduler, seed=11, class_labels=7)
    assert alone.isfinite().all()
    for place, labels in enumerate([[7, 3, 4], [2, 7, None], [9, 9, 7]]):
        seeds = [1, 2, 3]
        seeds[place] = 11
        assert torch.equal(draw(scheduler, seed=seeds, class_labels=labels, batch_size=3)[place], alone[0])
    draw.denoiser.use_graphs = False
    assert torch.equal(draw(scheduler, seed=11, class_labels=7), alone)


def test_a_table_in_chunks_changes_no_bit(draw, monkeypatch):
    expected = draw(class_labels=[7, 3])
    monkeypatch.setattr(denoising, "TABLE_BYTES", 5 * 3 * 2 * draw.denoiser.conditioning_width)
    assert torch.equal(draw(class_labels=[7, 3]), expected)
