"""ControlNets in a call: equal bits in any batch, the work of each step, the number of pictures, and errors."""

import numpy as np
import pytest
import torch

from fastdiff import InputError, Pipeline, report
from fastdiff.diffusion import loop
from fastdiff.models.controlnet import ControlNetModel
from fastdiff.models.live import model_like
from tests.parity.image_starts.pictures import as_array, as_tensor, mask, picture
from tests.support.text_pipelines import tiny_controlnet, tiny_unet

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("cuda", "float32", marks=GPU),
        pytest.param("cuda", "bfloat16", marks=GPU),
        pytest.param("cuda", "float16", marks=GPU),
    ],
    ids=["cpu", "cuda-fp32", "cuda-bf16", "cuda-fp16"],
)
STEPS = {"num_inference_steps": 4, "output_type": "latent"}
PICTURES = {"num_inference_steps": 2, "output_type": "pt"}
CONTROL = picture(5)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]


@pytest.fixture
def plain(text_pipes):
    return text_pipes("sd1")[1]


@pytest.fixture
def pipe(plain):
    return plain.with_parts(controlnet=tiny_controlnet("sd1"))


@pytest.fixture
def two(plain):
    return plain.with_parts(controlnet=[tiny_controlnet("sd1", seed) for seed in (4, 5)])


@ON
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("sd1", {}, marks=pytest.mark.slow),
        ("sd1", {"guess_mode": True, "control_guidance_end": 0.6, "controlnet_conditioning_scale": 0.7}),
        ("sdxl", {"strength": 0.6}),
        pytest.param("sd1", {"pooled": True}, marks=pytest.mark.slow),
        pytest.param("sdxl", {"guidance_scale": 1.0}, marks=pytest.mark.slow),
    ],
    ids=["sd1", "sd1-guess-end", "sdxl-image", "sd1-pooled", "sdxl-unguided"],
)
def test_same_bits_in_any_company(text_folder, kind, options, device, dtype):
    """The bits are the same alone and in batches, at any place, beside other control pictures."""
    options = STEPS | options
    nets = [tiny_controlnet(kind, 4 + i, global_pool_conditions=options.get("pooled", False)) for i in range(2)]
    options.pop("pooled", None)
    pipe = Pipeline.from_pretrained(text_folder(kind), device=device, dtype=dtype)
    pipe = pipe.with_parts(controlnet=[model_like(net, "controlnet").to(pipe.dtype) for net in nets])

    def draw(seeds):
        pictures = [[picture(seed) for seed in seeds], [picture(50 + seed) for seed in seeds]]
        start = {"image": [picture(9 + seed) for seed in seeds]} if "strength" in options else {}
        control = (
            [each[0] for each in pictures] if len(seeds) == 1 else [list(each) for each in zip(*pictures, strict=True)]
        )
        return pipe("a cat", control_image=control, seed=seeds, **start, **options).images

    (alone,) = draw([7])
    assert alone.isfinite().all() and alone.std() > 0
    for place, seeds in enumerate([[7, 1, 2], [1, 7, 2, 3, 4], [1, 2, 7]]):
        batch = draw(seeds)
        assert torch.equal(batch[place], alone)
        assert not torch.equal(batch[place - 1], alone)


def test_prompts_of_other_lengths_have_their_own_control_pictures(pipe):
    long = "riding " * 30
    prompts, pictures = ["a cat", long, "a cat"], [picture(i) for i in range(3)]
    both = pipe(prompts, image=pictures, seed=3, prompt_syntax="weighted", **STEPS).images
    for i, (prompt, control) in enumerate(zip(prompts, pictures, strict=True)):
        assert torch.equal(pipe(prompt, image=control, seed=3, prompt_syntax="weighted", **STEPS).images[0], both[i])
    assert not torch.equal(both[0], both[2])


@pytest.fixture
def counted(monkeypatch):
    """Count the calls of a ControlNet's methods in a run without programs, which would hide them."""
    calls = []
    for name in ("embed_condition", "project_text", "add_to"):
        method = getattr(ControlNetModel, name)
        monkeypatch.setattr(
            ControlNetModel, name, lambda *args, n=name, m=method, **kwargs: calls.append(n) or m(*args, **kwargs)
        )
    return calls


def test_a_step_without_a_controlnet_costs_nothing(two, counted):
    """A ControlNet runs at its own steps alone, and embeds each picture once, before the first step."""
    two.denoiser.use_graphs = False
    steps = two.stream(
        "a cat",
        image=[CONTROL, picture(6)],
        control_guidance_start=[0.0, 0.5],
        control_guidance_end=[0.25, 0.75],
        num_images_per_prompt=2,
        num_inference_steps=8,
    )
    assert counted == ["embed_condition"] * 2
    found = []
    for _ in steps:
        found.append(counted.count("add_to"))
        counted[:] = [name for name in counted if name != "add_to"]
    two.denoiser.use_graphs = True
    assert len(found) == 9  # PNDM calls once more
    assert found == [2, 2, 0, 0, 0, 2, 0, 0, 0]  # for each of two pictures
    assert counted.count("embed_condition") == 2


def test_a_run_of_no_steps_is_the_pipeline_without_it(plain, pipe, counted):
    expected = plain("a cat", height=16, width=20, **STEPS).images
    off = {"controlnet_conditioning_scale": 0.0}, {"control_guidance_start": 0.3, "control_guidance_end": 0.31}
    for options in off:
        assert torch.equal(pipe("a cat", image=CONTROL, **options, **STEPS).images, expected)
        assert "add_to" not in counted
    assert not torch.equal(pipe("a cat", image=CONTROL, **STEPS).images, expected)
    assert torch.equal(plain("a cat", height=16, width=20, **STEPS).images, expected)


def test_guess_mode_leaves_the_unconditional_half(pipe):
    """At scale 1 + s the guided prediction is the conditional one and s times its difference from the other half."""
    options = {"image": CONTROL, "guess_mode": True, **STEPS}
    guessed = [pipe("a cat", guidance_scale=scale, **options).images for scale in (1.0, 3.0)]
    assert not torch.equal(*guessed)
    part = pipe("a cat", guidance_scale=3.0, guidance_stop=0.5, **options).images
    assert not torch.equal(part, guessed[1])


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"guess_mode": True}, marks=pytest.mark.slow), {"guess_mode": True, "pooled": True}],
    ids=str,
)
def test_a_batch_at_once_as_on_a_gpu(options, plain, monkeypatch):
    """A GPU computes all pictures and both halves of a step at once; on a CPU that gives other bits."""
    pooled = options.get("pooled", False)
    pipe = plain.with_parts(controlnet=[tiny_controlnet("sd1", i, global_pool_conditions=pooled) for i in (4, 5)])
    pictures = [[picture(i), picture(9 + i)] for i in range(3)]
    given = {"image": pictures, "guess_mode": options.get("guess_mode", False), "control_guidance_end": [1.0, 0.5]}
    expected = pipe(["a cat", "riding", "a cat"], **given, **STEPS | {"output_type": "pt"}).images
    monkeypatch.setattr(loop.Loop, "step_alone", loop.Loop.step_as_graph)
    found = pipe(["a cat", "riding", "a cat"], **given, **STEPS | {"output_type": "pt"}).images
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_pictures_are_drawn_one_each_unless_more_are_asked_for(pipe):
    several = [picture(i) for i in range(3)]
    drawn = pipe("a cat", image=several, **STEPS).images
    assert len(drawn) == 3
    assert torch.equal(pipe("a cat", image=several[2], seed=2, **STEPS).images[0], drawn[2])
    prompts = pipe(["a cat", "riding"], image=several[:2], num_images_per_prompt=2, **STEPS).images
    assert torch.equal(pipe("riding", image=several[1], seed=1, **STEPS).images[0], prompts[3])
    four = pipe(["a cat", "riding"], image=[*several, CONTROL], seed=[1, 2], **STEPS).images
    assert torch.equal(pipe("riding", image=several[2], seed=1, **STEPS).images[0], four[2])


def test_the_size_of_the_pictures(pipe):
    assert pipe("a cat", image=picture(width=23, height=17), **PICTURES).images.shape[2:] == (16, 22)
    assert pipe("a cat", image=CONTROL, height=12, width=28, **PICTURES).images.shape[2:] == (12, 28)
    latents = torch.randn(1, 4, 6, 10)
    assert pipe("a cat", image=CONTROL, latents=latents, **PICTURES).images.shape[2:] == (12, 20)
    started = pipe("a cat", image=picture(width=28), control_image=CONTROL, **PICTURES).images
    assert started.shape[2:] == (16, 28)
    masked = {"mask_image": mask(width=28), "control_image": CONTROL}
    assert pipe("a cat", image=picture(width=28), **masked, **PICTURES).images.shape[2:] == (16, 28)


def test_kinds_of_control_pictures(pipe):
    expected = pipe("a cat", image=CONTROL, **STEPS).images
    kinds = as_array(CONTROL), as_array(CONTROL)[None], as_tensor(CONTROL), np.asarray(CONTROL), [CONTROL]
    for each in kinds:
        assert torch.equal(pipe("a cat", image=each, **STEPS).images, expected)
    assert torch.equal(pipe("a cat", control_image=CONTROL, **STEPS).images, expected)
    grey = CONTROL.convert("L")
    levels = np.asarray(grey)[..., None]
    assert torch.equal(pipe("a cat", image=grey, **STEPS).images, pipe("a cat", image=levels, **STEPS).images)


def test_an_enlarged_picture_has_the_same_control(pipe, counted):
    pipe.denoiser.use_graphs = False
    given = {"image": CONTROL, "controlnet_conditioning_scale": 0.7, "upscale": 2.0, **PICTURES}
    drawn = pipe("a cat", **given).images
    pipe.denoiser.use_graphs = True
    assert drawn.shape[2:] == (32, 40)
    assert counted.count("embed_condition") == 2
    weaker = pipe("a cat", **given | {"controlnet_conditioning_scale": 0.2}).images
    assert not torch.equal(drawn, weaker)


def test_a_report_of_a_step(pipe):
    names = [row.operation for row in report(pipe, image=CONTROL).rows]
    assert "conv2d" in names


NAN = np.full((16, 20, 3), np.nan, np.float32)
ERRORS = {
    "none": ({}, "control_image: this pipeline has a ControlNet"),
    "no-control": ({"image": CONTROL, "strength": 0.5}, "control_image: this pipeline has a ControlNet"),
    "nan": ({"image": NAN}, "control_image: it has NaN"),
    "channels": ({"image": torch.rand(1, 4, 16, 20)}, "control_image: it has 4 channels, and the ControlNet reads 3"),
    "no-picture": ({"image": "a.png"}, "control_image: 'a.png' holds no pictures"),
    "nested": ({"image": [[CONTROL]]}, "control_image: a list of lists is for several ControlNets"),
    "tiny": ({"image": picture(width=1, height=1)}, "control_image: 1 x 1 is too small"),
    "count": ({"image": [CONTROL] * 3, "batch_size": 2}, "control_image: 3 given for 1 prompts and 2 pictures"),
    "scale": ({"image": CONTROL, "controlnet_conditioning_scale": "x"}, "controlnet_conditioning_scale: 'x'"),
    "infinite": (
        {"image": CONTROL, "controlnet_conditioning_scale": float("nan")},
        "controlnet_conditioning_scale: nan",
    ),
    "scales": (
        {"image": CONTROL, "controlnet_conditioning_scale": [1.0, 2.0]},
        "controlnet_conditioning_scale: 2 given",
    ),
    "guess": ({"image": CONTROL, "guess_mode": "yes"}, "guess_mode: 'yes'"),
    "start": ({"image": CONTROL, "control_guidance_start": -0.1}, "control_guidance_start: -0.1"),
    "end": ({"image": CONTROL, "control_guidance_end": 1.1}, "control_guidance_end: 1.1"),
    "order": (
        {"image": CONTROL, "control_guidance_start": 0.5, "control_guidance_end": 0.5},
        "control_guidance_end: 0.5",
    ),
    "starts": ({"image": CONTROL, "control_guidance_start": [0.1, 0.2]}, "control_guidance_start: 2 given for 1"),
    "mode": ({"image": CONTROL, "control_mode": 1}, "control_mode: it is of a ControlNetUnionModel"),
    "crop": (
        {
            **{"image": picture(), "mask_image": mask(), "control_image": picture(width=30)},
            **{"padding_mask_crop": 2, "output_type": "pil"},
        },
        "control_image: padding_mask_crop crops it as image",
    ),
}
ERRORS_OF_TWO = {
    "one": ({"image": CONTROL}, "control_image: this pipeline has 2 ControlNets; give a list"),
    "three": ({"image": [CONTROL] * 3}, "control_image: 3 given for 2 ControlNets"),
    "lists": ({"image": [[CONTROL, CONTROL], [CONTROL]]}, "control_image: 1 given for 2 ControlNets"),
    "nothing": ({"image": []}, "control_image: 0 given for 2 ControlNets"),
}


def assert_refused(pipe, options, message):
    with pytest.raises(InputError, match=message) as error:
        pipe("a cat", **STEPS | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ERRORS)
def test_a_wrong_argument_is_one_line_that_names_it(case, pipe):
    assert_refused(pipe, *ERRORS[case])


@pytest.mark.parametrize("case", ERRORS_OF_TWO)
def test_a_wrong_argument_for_two_controlnets(case, two):
    assert_refused(two, *ERRORS_OF_TWO[case])


@pytest.mark.parametrize(
    "options",
    [
        {"control_image": CONTROL},
        {"controlnet_conditioning_scale": 0.5},
        {"guess_mode": True},
        {"control_guidance_end": 0.5},
    ],
    ids=lambda each: next(iter(each)),
)
def test_a_pipeline_without_a_controlnet_takes_no_control(options, plain):
    (name,) = options
    assert_refused(plain, options, f"{name}: this pipeline has no ControlNet")
    usual = {"controlnet_conditioning_scale": None, "guess_mode": False, "control_guidance_start": 0.0}
    assert torch.equal(plain("a cat", **usual, **STEPS).images, plain("a cat", **STEPS).images)


def test_bits_are_the_same_after_an_error(pipe):
    before = pipe("a cat", image=CONTROL, **STEPS).images
    with pytest.raises(InputError):
        pipe("a cat", image=NAN, **STEPS)
    assert torch.equal(pipe("a cat", image=CONTROL, **STEPS).images, before)


UNFIT = {
    "text": ("sd1", {"cross_attention_dim": 48}, "cross_attention_dim is 48, and the U-Net needs 32"),
    "kind": ("sdxl", {"cross_attention_dim": 32}, "addition_embed_type is text_time, and the U-Net needs None"),
    "widths": ("sd1", {"block_out_channels": (16, 64)}, "block_out_channels, layers_per_block differ"),
    "layers": ("sd1", {"layers_per_block": 2}, "block_out_channels, layers_per_block differ"),
    "latents": ("sd1", {"in_channels": 5}, "in_channels is 5, and the U-Net needs 4"),
    "pixels": ("sd1", {"conditioning_embedding_out_channels": (4, 4, 4)}, "it shrinks control pictures by 4"),
    "labels": ("sd1", {"num_class_embeds": 3}, "it takes class labels"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_controlnet_of_another_model_is_refused(case, plain):
    kind, options, message = UNFIT[case]
    with pytest.raises(InputError, match=f"controlnet: .*{message}") as error:
        plain.with_parts(controlnet=tiny_controlnet(kind, **options))
    assert "\n" not in str(error.value)


def test_other_things_are_no_controlnet(plain):
    for wrong in (tiny_unet("sd1"), 5, "folder", [None]):
        with pytest.raises(InputError, match="controlnet: "):
            plain.with_parts(controlnet=wrong)
    with pytest.raises(InputError, match=r"controlnet: it is torch.float16 on cpu, but the U-Net is torch.float32"):
        net = model_like(tiny_controlnet("sd1"), "controlnet").half()
        plain.with_parts(controlnet=net)("a cat", image=CONTROL, **STEPS)
