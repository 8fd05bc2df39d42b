"""Stable Diffusion 1.5, 2.1 and XL at full size with random weights, on a GPU, against diffusers and transformers.

The tests cover float32, 16 bits, any batch, a few steps of sampling, and weights that overflow float16.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
import transformers
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch import Tensor, nn

import fastdiff
from benchmarks.models import stable_diffusion as sd
from fastdiff.checkpoints.weight_files import own_keys
from fastdiff.checkpoints.weights import load_weights
from fastdiff.pipelines.text_to_image import TextToImagePipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),
]

DEVICE = "cuda"
STEPS, GUIDANCE = 4, 5.0
Given = dict[str, Tensor]


class Part(NamedTuple):
    """A model of a published folder: its class and config, its call, and the shapes of its arguments per picture."""

    class_name: str  # in fastdiff, and in diffusers or transformers
    config: dict[str, Any]
    run: Callable[..., list[Tensor]]
    shapes: dict[str, tuple[int, ...]]


def run_unet(model, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **added: Tensor) -> list[Tensor]:
    return [model(sample, timestep, encoder_hidden_states, added_cond_kwargs=added or None).sample]


def run_vae(model, z: Tensor, x: Tensor) -> list[Tensor]:
    return [model.decode(z).sample, model.encode(x).latent_dist.parameters]


def run_text(model, input_ids: Tensor) -> list[Tensor]:
    """Return what pipelines read: the last and the penultimate layer's states, and the pooled state."""
    output = model(input_ids, output_hidden_states=True)
    return [*output[:2], output.hidden_states[-2]]


def unet(config: dict[str, Any]) -> Part:
    side, width = config["sample_size"], config["cross_attention_dim"]
    shapes = {"sample": (4, side, side), "timestep": (), "encoder_hidden_states": (77, width)}
    if "addition_embed_type" in config:
        shapes |= {"text_embeds": (1280,), "time_ids": (6,)}
    return Part("UNet2DConditionModel", config, run_unet, shapes)


def vae(config: dict[str, Any]) -> Part:
    side = config["sample_size"]
    return Part("AutoencoderKL", config, run_vae, {"z": (4, side // 8, side // 8), "x": (3, side, side)})


PARTS = {
    "sd15-unet": unet(sd.SD15),
    "sd21-unet": unet(sd.SD21),
    "sdxl-unet": unet(sd.SDXL),
    "sd15-vae": vae(sd.SD15_VAE),
    "sdxl-vae": vae(sd.SDXL_VAE),
    "sdxl-vae-not-upcast": vae(sd.SDXL_VAE | {"force_upcast": False}),
    "sd15-text": Part("CLIPTextModel", sd.SD15_TEXT, run_text, {"input_ids": (77,)}),
    "sd21-text": Part("CLIPTextModel", sd.SD21_TEXT, run_text, {"input_ids": (77,)}),
    "sdxl-text-2": Part("CLIPTextModelWithProjection", sd.SDXL_TEXT_2, run_text, {"input_ids": (77,)}),
}
SCHEDULERS = {
    "sd15-unet": ("PNDMScheduler", sd.SD15_SCHEDULER),
    "sd21-unet": ("DDIMScheduler", sd.SD21_SCHEDULER),
    "sdxl-unet": ("EulerDiscreteScheduler", sd.SDXL_SCHEDULER),
}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"], scope="module")


@pytest.fixture(scope="module", params=PARTS)
def part(request) -> Part:
    return PARTS[request.param]


@pytest.fixture(scope="module")
def theirs(part) -> nn.Module:
    return random_model(part)


@pytest.fixture(scope="module")
def ours(part, theirs, dtype) -> Any:
    """Our model with their weights in 16 bits."""
    return ours_of(part, theirs, dtype)


def random_model(part: Part) -> Any:
    """Return their model in float32 with random weights. No norm weight is 1 and no parameter is zero."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if part.class_name.startswith("CLIP"):
            model = getattr(transformers, part.class_name)(transformers.CLIPTextConfig(**part.config))
        else:
            model = getattr(diffusers, part.class_name)(**part.config)
    model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            module.weight.normal_(1, 0.1)
            module.bias.normal_(0, 0.1)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0, 0.02)
    return model


def ours_of(part: Part, theirs: nn.Module, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        ours = getattr(fastdiff, part.class_name).from_config(part.config)
    state = own_keys(dict(theirs.state_dict()), ours.config)
    load_weights(ours, state, source="model", dtype=dtype, device=DEVICE)
    return ours


def inputs(part: Part, n: int, dtype: torch.dtype = torch.float32) -> Given:
    """Return the arguments of a call for n pictures or prompts. A picture's arguments do not depend on n."""
    rows = [picture(part, torch.Generator().manual_seed(i)) for i in range(n)]
    stacked = {name: torch.stack([row[name] for row in rows]).to(DEVICE) for name in part.shapes}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in stacked.items()}


def picture(part: Part, generator: torch.Generator) -> Given:
    """Return the arguments for one picture or prompt."""
    row = {name: torch.randn(shape, generator=generator) for name, shape in part.shapes.items()}
    if "timestep" in row:
        row["timestep"] = torch.randint(1000, (), generator=generator)
    if "time_ids" in row:
        row["time_ids"] = torch.tensor([1024.0, 1024, 0, 64, 1024, 1024])
    if "input_ids" in row:
        end = 49407  # the last token of the vocabulary
        row["input_ids"] = torch.randint(end - 1, (77,), generator=generator)
        row["input_ids"][torch.randint(2, 77, (), generator=generator) :] = end
    return row


@torch.no_grad()
def run(part: Part, model: Any, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return part.run(model, **inputs(part, n, dtype))


@torch.no_grad()
def sample(model: Any, library: Any, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a picture's latents after a few guided steps with the published folder's scheduler."""
    kind, config = SCHEDULERS[name]
    scheduler = getattr(library, kind)(**config)
    given = inputs(PARTS[name], 2, dtype)  # unconditional, conditional
    del given["timestep"]
    scheduler.set_timesteps(STEPS)
    x = given.pop("sample")[:1] * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        both = scheduler.scale_model_input(x, t).expand(2, -1, -1, -1)
        (output,) = run_unet(model, both, t, **given)
        x = scheduler.step(output[:1] + GUIDANCE * (output[1:] - output[:1]), t, x).prev_sample
    return x


def assert_errs_at_most_twice(found: Tensor, theirs: Tensor, expected: Tensor) -> None:
    error, allowed = (found.float() - expected).norm(), (theirs.float() - expected).norm()
    assert allowed.isfinite()
    assert error <= 2 * allowed, f"{error / expected.norm():.2e}; theirs {allowed / expected.norm():.2e}"


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error <= 1e-4, f"{error:.2e}"


def test_float32_is_theirs(part, theirs):
    for found, expected in zip(run(part, ours_of(part, theirs, torch.float32), 2), run(part, theirs, 2), strict=True):
        assert_close(found, expected)


@HALVES
def test_half_precision_errs_at_most_twice_as_much(part, theirs, ours, dtype):
    expected = run(part, theirs, 2)
    rounded = run(part, copy.deepcopy(theirs).to(dtype), 2, dtype)
    for each in zip(run(part, ours, 2, dtype), rounded, expected, strict=True):
        assert_errs_at_most_twice(*each)


@HALVES
def test_same_bits_in_any_batch(part, ours, dtype):
    together = run(part, ours, 8, dtype)
    for n in (1, 3):
        for few, many in zip(run(part, ours, n, dtype), together, strict=True):
            assert torch.equal(few, many[:n])


@HALVES
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_few_steps_err_at_most_twice_as_much(name, dtype):
    theirs = random_model(PARTS[name])
    expected = sample(theirs, diffusers, name)
    found = sample(ours_of(PARTS[name], theirs, dtype), fastdiff, name, dtype)
    assert_errs_at_most_twice(found, sample(theirs.to(dtype), diffusers, name, dtype), expected)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_pictures_have_the_same_bits_in_any_batch(name):
    """Guided, from prompt embeddings to pixels."""
    kind, config = SCHEDULERS[name]
    unet, vae = (
        ours_of(part, random_model(part), torch.bfloat16)
        for part in (PARTS[name], PARTS["sdxl-vae" if name == "sdxl-unet" else "sd15-vae"])
    )
    pipe = TextToImagePipeline(unet, getattr(fastdiff, kind)(**config), vae)
    given = inputs(PARTS[name], 2, torch.bfloat16)
    names = {"encoder_hidden_states": "prompt_embeds", "text_embeds": "pooled_prompt_embeds"}
    options: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "pt"}
    for key, embeds in names.items():
        if key in given:
            options |= {f"negative_{embeds}": given[key][:1], embeds: given[key][1:]}
    alone = pipe(seed=11, **options).images
    assert alone.isfinite().all() and alone.std() > 0
    for seeds in ([1, 11, 2], [11, *range(7)]):
        assert torch.equal(pipe(seed=seeds, **options).images[seeds.index(11)], alone[0])


def overflow_scores(unet: Any) -> None:
    """Raise all self-attention scores by 81,920, beyond float16's range, without changing the output of attention.

    The norm sets one channel to 1, and every head has fixed multiples of it in its query and key. They are exact in 16
    bits. With random scores of this size, each rounding error would select different keys.
    """
    for block in unet.modules():
        if not hasattr(block, "attn1"):
            continue
        block.norm1.weight[0], block.norm1.bias[0] = 0, 1
        head_dim = block.attn1.inner_dim // block.attn1.heads
        for layer, multiple in ((block.attn1.to_q, 1024), (block.attn1.to_k, 80 * head_dim**0.5)):
            layer.weight[::head_dim] = 0
            layer.weight[::head_dim, 0] = multiple


def test_scores_beyond_float16():
    """SD2.1 stays finite, because its config sets upcast_attention. Scores in float16 overflow."""
    part = PARTS["sd21-unet"]
    theirs = random_model(part)
    overflow_scores(theirs)
    expected = run(part, theirs, 2)
    found = run(part, ours_of(part, theirs, torch.float16), 2, torch.float16)
    theirs.half()
    rounded = run(part, theirs, 2, torch.float16)
    assert_errs_at_most_twice(found[0], rounded[0], expected[0])
    theirs.set_attn_processor(AttnProcessor())  # materializes the scores
    for module in theirs.modules():
        if isinstance(module, Attention):
            module.upcast_attention = False
    assert not run(part, theirs, 1, torch.float16)[0].isfinite().all()


@pytest.mark.parametrize("name", ["sdxl-vae", "sdxl-vae-not-upcast"])
def test_activations_beyond_float16(name, caplog):
    """SDXL's VAE computes in float32 because of force_upcast, or after a NaN."""
    part = PARTS[name]
    theirs = random_model(part)
    for layer in (theirs.decoder.up_blocks[0].upsamplers[0].conv, theirs.encoder.down_blocks[0].downsamplers[0].conv):
        for parameter in layer.parameters():
            parameter.mul_(3e5)
    ours = ours_of(part, theirs, torch.float16)
    theirs.half()
    assert not any(output.isfinite().all() for output in run(part, theirs, 1, torch.float16))
    theirs.float()  # the weights stay rounded to float16
    for found, expected in zip(run(part, ours, 1), run(part, theirs, 1), strict=True):
        assert_close(found, expected)
    warnings = [record for record in caplog.records if record.name.startswith("fastdiff")]
    assert len(warnings) == (0 if part.config["force_upcast"] else 1)
