"""TextToImagePipeline: a picture does not depend on its batch; the order of the pictures, and previews."""

import pytest
import torch

import fastdiff
from fastdiff import InputError, Pipeline, TextToImagePipeline

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
ALL = pytest.mark.parametrize("kind", ["sd1", pytest.param("sd2", marks=pytest.mark.slow), "sdxl"])
STEPS = {"num_inference_steps": 3, "output_type": "pt"}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # from diffusers
]


@pytest.fixture(scope="module")
def load(text_folder):
    def load(kind, device="cpu", dtype="float32", **options):
        return Pipeline.from_pretrained(text_folder(kind), device=device, dtype=dtype, **options)

    return load


COMPANY = {
    "sd1": ("sd1", None, {}),
    "sd1-rescaled": ("sd1", None, {"guidance_rescale": 0.7}),
    "sd1-noise-of-steps": ("sd1", "euler-a", {}),
    "sd2": ("sd2", None, {}),
    "sdxl": ("sdxl", None, {}),
    "sd1-guided-in-part": ("sd1", None, {"guidance_start": 0.5}),
    "sdxl-unguided": ("sdxl", "ddpm", {"guidance_scale": 1}),
}


@ON
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in ("sd1", "sd2", "sdxl") else []) for case in COMPANY]
)
def test_same_bits_in_any_company(load, case, device, dtype):
    """The bits are the same alone and in batches, at any place, beside other prompts and negative prompts."""
    kind, scheduler, given = COMPANY[case]
    pipe, options = load(kind, device, dtype, scheduler=scheduler), STEPS | {"num_inference_steps": 2} | given
    alone = pipe("a cat", negative_prompt="dog", seed=7, **options).images[0]
    assert alone.isfinite().all() and alone.std() > 0
    for place, seeds in enumerate([[7, 1, 2], [1, 7, 2, 3, 4], [1, 2, 7]]):
        batch = pipe("a cat", negative_prompt="dog", seed=seeds, **options).images
        assert torch.equal(batch[place], alone)
        assert not torch.equal(batch[place - 1], alone)
    prompts, negatives = ["riding", "a cat", "a cat", "a cat"], ["dog", "dog", "", "dog"]
    mixed = pipe(prompts, negative_prompt=negatives, seed=[7, 7, 7, 8], batch_size=4, **options).images
    unguided = case == "sdxl-unguided"  # then the negative prompt has no effect
    assert [torch.equal(picture, alone) for picture in mixed] == [False, True, unguided, False]


@pytest.mark.parametrize(("guidance_scale", "pictures"), [(5.0, 2), (1.0, 1)], ids=["guided", "unguided"])
def test_on_the_cpu_a_picture_is_one_call_of_the_model(load, monkeypatch, guidance_scale, pictures):
    """The call has both halves of a guided picture, so that all threads work on one picture at a time."""
    pipe, calls = load("sd1"), []
    pipe.denoiser.use_graphs = False  # to count every call
    predict = pipe.denoiser.predict

    def counted(x, conditioning):
        calls.append(len(x))
        return predict(x, conditioning)

    monkeypatch.setattr(pipe.denoiser, "predict", counted)
    pipe("a cat", seed=[7, 8], guidance_scale=guidance_scale, **STEPS)
    assert set(calls) == {pictures} and len(calls) >= 2 * STEPS["num_inference_steps"]


@ON
@ALL
def test_same_bits_again(load, kind, device, dtype):
    """Three calls: on a GPU the first runs without graphs, the second captures graphs, and the third replays them."""
    pipe = load(kind, device, dtype)
    first, *others = (pipe("a cat", seed=[7, 8], **STEPS).images for _ in range(3))
    pipe("another", negative_prompt="dog", guidance_scale=2.0, **STEPS)
    others.append(pipe("a cat", seed=[7, 8], **STEPS).images)
    assert all(torch.equal(first, other) for other in others)


@ON
@ALL
def test_a_callback_is_followed(load, kind, device, dtype):
    """A callback replaces tensors, edits them in place and ends guidance, with CUDA graphs too."""
    pipe, names = load(kind, device, dtype), ["latents", "prompt_embeds"]
    embeds = torch.randn(2, 24, pipe.denoiser.config.text_width, generator=torch.Generator().manual_seed(1))

    def replace(pipe, step, timestep, tensors):
        return {"prompt_embeds": embeds} if step == 1 else {}

    def edit(pipe, step, timestep, tensors):
        if step == 1:
            tensors["prompt_embeds"].copy_(embeds)
        return {}

    def end(pipe, step, timestep, tensors):
        if step == 1:
            pipe._guidance_scale = 0.0
        return {}

    def halve(pipe, step, timestep, tensors):
        return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]} if step == 1 else {}

    def draw(callback):
        options = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}
        return [pipe("a cat", **options, **STEPS).images for _ in range(1 if device == "cpu" else 3)]

    plain, replaced, edited, ended, halved = map(draw, (lambda *args: args[-1], replace, edit, end, halve))
    assert torch.equal(plain[0], pipe("a cat", **STEPS).images)
    for pictures in (plain, replaced, edited, ended, halved):
        assert all(torch.equal(picture, pictures[0]) for picture in pictures)
    assert torch.equal(edited[0], replaced[0]) and torch.equal(ended[0], halved[0])
    assert not torch.equal(replaced[0], plain[0]) and not torch.equal(ended[0], plain[0])


def test_pictures_are_prompts_times_seeds_in_that_order(text_pipes):
    _, pipe = text_pipes("sd1")
    pictures = pipe(["a cat", "riding"], num_images_per_prompt=2, seed=3, **STEPS).images
    for i, (prompt, seed) in enumerate([("a cat", 3), ("a cat", 4), ("riding", 3), ("riding", 4)]):
        assert torch.equal(pictures[i], pipe(prompt, seed=seed, **STEPS).images[0])


def test_generators_and_latents_of_prompts_times_pictures(text_pipes):
    """The order is that of diffusers' pipelines: the pictures of the first prompt, then those of the second."""
    theirs, ours = text_pipes("sd2")

    def draw(pipe, **options):
        options = {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2, **STEPS} | options
        return pipe(generator=[torch.Generator().manual_seed(seed) for seed in range(4)], **options).images

    torch.testing.assert_close(draw(ours), draw(theirs), rtol=0, atol=1e-3)
    latents = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draw(ours, latents=latents), draw(theirs, latents=latents), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("kind", "steps", "guidance"), [("sd1", 51, 7.5), ("sd2", 50, 7.5), ("sdxl", 50, 5.0)])
def test_defaults_are_those_of_diffusers(kind, steps, guidance, text_pipes):
    """PNDM calls the model one more time than there are steps."""
    scales = []

    def note(pipe, *others):
        scales.append(pipe.guidance_scale)
        return {}

    step = next(text_pipes(kind)[1].stream("a cat", callback_on_step_end=note))
    assert (step.num_steps, scales, step.x_t.shape) == (steps, [guidance], (1, 8, 8, 4))


def test_output_types(text_pipes):
    _, pipe = text_pipes("sd1")
    pil, array, tensor, latents = (
        pipe("a cat", num_inference_steps=2, output_type=kind).images for kind in ("pil", "np", "pt", "latent")
    )
    assert pil[0].size == (16, 16) and array.shape == (1, 16, 16, 3) and tensor.shape == (1, 3, 16, 16)
    assert latents.shape == (1, 4, 8, 8) and latents.dtype == torch.float32
    assert torch.equal(pipe.decode(latents.permute(0, 2, 3, 1), "pt"), tensor)
    with pytest.raises(InputError, match=r"^x: expected \(N, H, W, 4\)"):
        pipe.decode(latents, "latent")
    (images,) = pipe("a cat", num_inference_steps=2, return_dict=False)
    assert images[0].tobytes() == pil[0].tobytes()


@ALL
def test_a_preview_of_every_step_changes_no_bit(kind, text_pipes):
    _, pipe = text_pipes(kind)
    expected = pipe("a cat", seed=[1, 2], **STEPS).images
    previews = []
    for step in pipe.stream("a cat", seed=[1, 2], **STEPS):
        previews.append(step.preview())
    assert torch.equal(step.images, expected)
    assert [len(preview) for preview in previews] == [2] * step.num_steps
    assert {picture.size for preview in previews for picture in preview} == {(16, 16)}
    assert len({preview[0].tobytes() for preview in previews}) > 1


def test_the_preview_of_large_latents_is_small(text_pipes):
    """Latents of 64 x 80 are averaged to 32 x 40, a quarter of the work. Flat latents keep their values."""
    _, pipe = text_pipes("sdxl")
    options = {"height": 128, "width": 160, "num_inference_steps": 1, "guidance_scale": 1, "output_type": "pt"}
    (step,) = pipe.stream("a cat", **options)
    assert step.images.shape == (1, 3, 128, 160)
    assert step.preview()[0].size == (80, 64)
    flat = torch.full((1, 130, 162, 4), 0.3)
    assert step.small is not None
    torch.testing.assert_close(step.small(flat), flat[:, :32, :40])


def test_the_class_and_its_parts_are_public(load):
    pipe = load("sdxl")
    assert fastdiff.TextToImagePipeline is TextToImagePipeline and isinstance(pipe, TextToImagePipeline)
    assert [type(model).__name__ for model in pipe.models] == [
        "UNet2DConditionModel",
        "AutoencoderKL",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
    ]
    assert {model.dtype for model in pipe.to(torch.float64).models} == {torch.float64}


def test_the_end_of_a_long_prompt_is_cut_with_a_warning(text_pipes, caplog):
    _, pipe = text_pipes("sd1")
    pipe("the cat " * 20 + "in SPACE", negative_prompt="a dog " * 20, **STEPS)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("fastdiff")]
    assert [line.partition(": longer than the 24 tokens")[0] for line in lines] == ["prompt", "negative prompt"]
    assert "in SPACE" in lines[0] and "a dog" in lines[1]


def test_each_text_is_encoded_once(text_pipes, monkeypatch):
    """Each text is encoded once, however many pictures it has."""
    _, pipe = text_pipes("sdxl")
    encoded, encode = [], type(pipe.encoders).encode

    def note(self, texts, *others):
        encoded.append(texts)
        return encode(self, texts, *others)

    monkeypatch.setattr(type(pipe.encoders), "encode", note)
    pipe(["a", "b", "a"], negative_prompt="c", num_images_per_prompt=3, **STEPS)
    assert encoded == [("a", "a"), ("b", "b"), ("c", "c")]
