"""UNet2DModel and Pipeline on a GPU: against the CPU's float32 references, in any batch, with graphs and without."""

import threading

import pytest
import torch

from fastdiff import DDPMScheduler, Pipeline, UNet2DModel
from fastdiff.kernels._dispatch import references_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]

DDPM = {  # a small relative of ddpm-cifar10-32: one head, asymmetric padding
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
LDM = DDPM | {  # group widths 7 and 14, channels that are no multiple of 64
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
MODELS = {"ddpm": DDPM, "ldm": LDM} | {
    name: {"block_out_channels": (32, 64), "down_block_types": down, "up_block_types": up, "sample_size": 16} | options
    for name, (down, up, options) in RARE.items()
}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def model(name, randomise):
    return randomise(UNet2DModel.from_config(MODELS[name])).requires_grad_(False)


def inputs(model, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    side = model.config.sample_size
    sample = torch.randn(n, model.config.in_channels, side, side, generator=generator)
    labels = torch.arange(n) % model.config.num_class_embeds if model.config.num_class_embeds else None
    return sample, torch.randint(0, 1000, (n,), generator=generator), labels


def to_gpu(sample, timesteps, labels, dtype=torch.float32):
    return sample.to("cuda", dtype), timesteps.cuda(), None if labels is None else labels.cuda()


def test_float32_is_the_reference(model):
    given = inputs(model, 2)
    expected = model(*given).sample
    model.cuda()
    for _ in range(3):  # eager, captured, replayed
        error = (model(*to_gpu(*given)).sample.cpu() - expected).abs().max()
        assert error <= 1e-4
        assert error <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_precision_errs_at_most_twice_as_much_as_torch(model, dtype):
    given = inputs(model, 2)
    expected = model(*given).sample
    model.to("cuda", dtype)
    model.use_graphs = False
    ours = model(*to_gpu(*given, dtype)).sample.float().cpu()
    with references_only():
        torchs = model(*to_gpu(*given, dtype)).sample.float().cpu()
    error, allowed = (ours - expected).norm(), (torchs - expected).norm()
    assert error <= 2 * allowed, f"{error / expected.norm():.2e} against torch's {allowed / expected.norm():.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bits_in_any_batch(model, dtype):
    sample, timesteps, labels = to_gpu(*inputs(model, 64), dtype)
    model.to("cuda", dtype)

    def run(places):
        return model(sample[places], timesteps[places], None if labels is None else labels[places]).sample

    alone = run(slice(5, 6))
    for places in (slice(4, 7), slice(5, 13), slice(0, 64)):
        assert torch.equal(run(places)[5 - places.start], alone[0])


def test_graphs_change_no_bit_and_no_earlier_output(model):
    model.to("cuda", torch.bfloat16)
    first, second = (to_gpu(*inputs(model, 2, seed), torch.bfloat16) for seed in (0, 1))
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
        given = [to_gpu(*inputs(model, 2, seed), torch.bfloat16) for seed in range(4)]
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
            expected = model(*to_gpu(*given)).sample
        model.cpu().cuda()
        torch.testing.assert_close(model(*to_gpu(*given)).sample, expected, rtol=0, atol=0)

    def test_pipeline_with_and_without_graphs(self, name, model):
        pipe = Pipeline(model.to("cuda", torch.bfloat16), DDPMScheduler())
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
