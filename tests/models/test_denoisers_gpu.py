"""The denoisers and Pipeline on a GPU: compared with the CPU's float32, in any batch, with and without graphs."""

import threading

import pytest
import torch

from fastdiff import (
    DDIMScheduler,
    DDPMScheduler,
    DiTTransformer2DModel,
    LabelPipeline,
    Pipeline,
    UNet1DModel,
    UNet2DModel,
    report,
)
from fastdiff.diffusion import conditioning
from fastdiff.kernels.plans.choices import references_only
from tests.support.planners import policy, value_function

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]

DDPM = {  # like a small ddpm-cifar10-32: one head, asymmetric padding
    "sample_size": 32,
    "block_out_channels": (64, 128, 128),
    "layers_per_block": 2,
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
}
LDM = DDPM | {  # group widths 7 and 14, channels that are not multiples of 64
    "sample_size": 16,
    "block_out_channels": (224, 448),
    "attention_head_dim": 32,
    "downsample_padding": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
RARE = {
    "skip": (("AttnSkipDownBlock2D", "SkipDownBlock2D"), ("SkipUpBlock2D", "AttnSkipUpBlock2D"), {}),
    "k": (("KDownBlock2D", "KDownBlock2D"), ("KUpBlock2D", "KUpBlock2D"), {"act_fn": "gelu"}),
    "resnet": (("ResnetDownsampleBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "ResnetUpsampleBlock2D"), {}),
    "scale-shift": (("DownBlock2D",) * 2, ("UpBlock2D",) * 2, {"resnet_time_scale_shift": "scale_shift"}),
    "mish": (("DownBlock2D",) * 2, ("UpBlock2D",) * 2, {"act_fn": "mish", "num_class_embeds": 4}),
}
UNETS = {"ddpm": DDPM, "ldm": LDM} | {
    name: {"block_out_channels": (32, 64), "down_block_types": down, "up_block_types": up, "sample_size": 16} | options
    for name, (down, up, options) in RARE.items()
}
XL = {  # two blocks of DiT-XL/2
    "sample_size": 32,
    "num_layers": 2,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "out_channels": 8,
}
DITS = {
    "dit-xl": XL,
    "dit-pixels": XL
    | {"in_channels": 3, "out_channels": 3, "patch_size": 4, "num_attention_heads": 6, "attention_head_dim": 64},
    "dit-narrow": XL | {"num_attention_heads": 2, "attention_head_dim": 8, "activation_fn": "gelu"},
    "dit-odd": XL
    | {"sample_size": 14, "num_attention_heads": 3, "attention_head_dim": 12, "norm_elementwise_affine": True},
}
PLANNERS = {
    "hopper": policy(32, 64, 128, 256, sample_size=32),
    "walker-128": policy(32, 128, 256, sample_size=128, in_channels=23, out_channels=23),
    "hopper-values": value_function(32, 64, 128, 256, sample_size=32),
}
MODELS = {
    name: (kind, config)
    for kind, configs in ((UNet2DModel, UNETS), (DiTTransformer2DModel, DITS), (UNet1DModel, PLANNERS))
    for name, config in configs.items()
}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def model(name, randomise):
    kind, config = MODELS[name]
    model = randomise(kind.from_config(config)).requires_grad_(False)
    if name in DITS:  # large weights make attention pick single keys, and rounding errors grow a thousandfold
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight *= min(1, 10 * layer.in_features**-0.5)
    return model


@pytest.fixture
def draw(randomise):
    """A function that draws pictures (N, C, H, W) with a small guided model in bfloat16."""
    denoiser = randomise(DiTTransformer2DModel.from_config(DITS["dit-pixels"] | {"out_channels": 6})).to(
        "cuda", torch.bfloat16
    )

    def draw(scheduler=None, **options):
        pipe = LabelPipeline(denoiser, scheduler or DDIMScheduler())
        options = {"num_inference_steps": 20, "guidance_scale": 2.0, "output_type": "pt"} | options
        return pipe(**options).images

    draw.denoiser = denoiser
    return draw


def inputs(model, n, seed=0):
    """Return a sample, timesteps and, if the model takes them, labels."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.trained_size[-len(model.config.AXES) :]
    sample = torch.randn(n, model.config.in_channels, *size, generator=generator)
    labels = (torch.arange(n) % min(7, model.config.num_class_embeds),) if model.config.num_class_embeds else ()
    return sample, torch.randint(0, 1000, (n,), generator=generator), *labels


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
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
    first, second = (on_gpu(inputs(model, 2, seed), torch.bfloat16) for seed in (0, 1))
    model.use_graphs = False
    expected = [model(*given).sample for given in (first, second)]
    model.use_graphs = True
    outputs = [model(*given).sample for given in (first, second, first, second)]
    for output, wanted in zip(outputs, expected * 2, strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("name", ["ddpm"])
class TestGraphs:
    def test_threads_and_streams(self, name, model):
        model.to("cuda", torch.bfloat16)
        given = [on_gpu(inputs(model, 2, seed), torch.bfloat16) for seed in range(4)]
        expected = [model(*each).sample for each in given]
        torch.cuda.synchronize()
        wrong = []

        def work(i):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    output = model(*given[i]).sample
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(output, expected[i]):
                        wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_moving_the_model_drops_its_graphs(self, name, model):
        given = inputs(model, 2)
        model.cuda()
        for _ in range(2):
            expected = model(*on_gpu(given)).sample
        model.cpu().cuda()
        torch.testing.assert_close(model(*on_gpu(given)).sample, expected, rtol=0, atol=0)

    def test_pipeline_with_and_without_graphs(self, name, model):
        pipe = LabelPipeline(model.to("cuda", torch.bfloat16), DDPMScheduler())
        options = {"num_inference_steps": 5, "num_images": 3, "output_type": "pt"}
        first = pipe(**options).images
        again = pipe(**options).images
        pipe.denoiser.use_graphs = False
        assert torch.equal(first, again)
        assert torch.equal(first, pipe(**options).images)


def test_bundled_model_draws_the_cpus_pictures():
    options = {"class_labels": [0, 20, 35], "num_inference_steps": 10, "seed": 3, "output_type": "pt"}
    expected = Pipeline.from_pretrained("emoji64", device="cpu")(**options).images
    pipe = Pipeline.from_pretrained("emoji64", device="cuda", dtype="float32")
    pictures = pipe(**options).images.cpu()
    assert (pictures - expected).abs().max() <= 3e-3
    alone = pipe(**options | {"class_labels": 20}).images.cpu()
    assert torch.equal(alone[0], pictures[1])


def test_the_launches_of_a_block(randomise):
    """A block is seven launches, as docs/kernels.md says. Other launches do not grow with the number of blocks."""
    counts = []
    for layers in (2, 5):
        model = randomise(DiTTransformer2DModel.from_config(XL | {"num_layers": layers})).to("cuda", torch.bfloat16)
        x, conditioning = (
            torch.randn(2, 32, 32, 4, device="cuda").bfloat16(),
            model.conditioning(*on_gpu(inputs(model, 2))[1:]),
        )
        model.predict(x, conditioning)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            model.predict(x, conditioning)
            torch.cuda.synchronize()
        on_device = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(sum("Memset" not in each.name for each in on_device))  # memsets are a library's, not kernels
    assert counts[1] - counts[0] <= 3 * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_launches_once_for_each_convolution(name, model, dtype):
    """Norm, Mish, time and residual take no launch of their own. A value function ends with two linear layers."""
    convolutions = sum(isinstance(layer, torch.nn.Conv1d) for layer in model.modules())
    model.to("cuda", dtype)
    for batch_size in (1, 64):
        found = report(model, batch_size=batch_size)
        assert found.launches <= convolutions + (4 if model.config.is_value_function else 0), str(found)
        assert found.share == 1, str(found)


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
    monkeypatch.setattr(conditioning, "TABLE_BYTES", 5 * 3 * 2 * draw.denoiser.conditioning_width)
    assert torch.equal(draw(class_labels=[7, 3]), expected)
