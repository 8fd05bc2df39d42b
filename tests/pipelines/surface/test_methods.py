"""The methods and attributes of diffusers' pipelines: parts, moving, offload, tiling, the progress bar, refusals."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

import fastdiff
from fastdiff import InputError, Pipeline
from fastdiff.pipelines import surface
from fastdiff.refused import OF_PIPELINES
from tests.support.text_pipelines import CLIP, tiny_encoder, tiny_unet, tiny_vae

pytestmark = pytest.mark.usefixtures("one_thread")

TILED = "tiling", "slicing"
DRAWN = {"num_inference_steps": 2, "output_type": "pt"}


def draw(pipe, **options):
    return pipe("a cat", seed=3, **DRAWN | options).images


@pytest.fixture
def pipe(text_folder):
    return Pipeline.from_pretrained(text_folder("sd1"), device="cpu")


@pytest.fixture(scope="module")
def unchanged(text_folder):
    """A pipeline for tests that change nothing in it."""
    return Pipeline.from_pretrained(text_folder("sd1"), device="cpu")


@pytest.fixture(scope="module")
def ddpm():
    return Pipeline.from_pretrained("emoji64", device="cpu")


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_parts_have_diffusers_names(kind, text_pipes):
    theirs, ours = text_pipes(kind)
    there = {name for name, part in theirs.components.items() if part is not None}
    assert ours.components.keys() == there
    assert all(getattr(ours, name) is part for name, part in ours.components.items())
    assert all(type(part).__name__ == type(getattr(theirs, name)).__name__ for name, part in ours.components.items())
    assert ours.unet is ours.denoiser and not hasattr(ours, "transformer") and ours.safety_checker is None
    assert ours.vae_scale_factor == theirs.vae_scale_factor and ours.dtype == theirs.dtype


def test_parts_of_other_pipelines(ddpm, save_value_guided):
    assert ddpm.unet is ddpm.denoiser and ddpm.vae is None and not hasattr(ddpm, "text_encoder")
    assert ddpm.components.keys() == {"unet", "scheduler"}
    dit = Pipeline.from_pretrained("emoji64-dit", device="cpu")
    assert dit.transformer is dit.denoiser and not hasattr(dit, "unet")
    planner = Pipeline.from_pretrained(save_value_guided()[1], device="cpu")
    assert planner.components.keys() == {"unet", "value_function", "scheduler"} and not hasattr(planner, "vae")
    planner.value_function = None
    assert planner.components.keys() == {"unet", "scheduler"} and planner.value_function is None


def test_parts_can_be_set(pipe, text_pipes):
    """To a live part of diffusers, or to one of fastdiff. Other parts stay the same objects."""
    unet, before = pipe.unet, draw(pipe)
    other = tiny_vae("sd1")
    with torch.no_grad():
        other.decoder.conv_out.bias.add_(0.2)
    pipe.vae = other
    assert pipe.unet is unet and isinstance(pipe.vae, fastdiff.AutoencoderKL)
    assert not torch.equal(draw(pipe), before)
    pipe.vae = fastdiff.AutoencoderKL.from_config(other.config)
    pipe.vae = text_pipes("sd1")[0].vae
    assert torch.equal(draw(pipe), before)
    pipe.text_encoder = text_pipes("sd1")[0].text_encoder
    pipe.tokenizer = text_pipes("sd1")[0].tokenizer
    assert torch.equal(draw(pipe), before)
    pipe.safety_checker = None


@pytest.mark.parametrize("library", [diffusers, fastdiff])
def test_the_scheduler_can_be_set(library, pipe):
    pipe.scheduler = library.DDIMScheduler.from_config(pipe.scheduler.config)
    assert pipe.scheduler_name == "ddim" and draw(pipe).isfinite().all()


@pytest.mark.parametrize(
    ("name", "part", "line"),
    [
        ("vae", lambda: tiny_vae("sd1", latent_channels=16), "vae: it decodes 16 channels"),
        ("vae", lambda: None, "vae: None has the wrong type"),
        ("unet", lambda: tiny_unet("sd1", in_channels=8), "unet: it has 8 input channels"),
        ("unet", lambda: tiny_vae("sd1"), "unet: .* has the wrong type"),
        ("text_encoder", lambda: tiny_encoder(CLIP | {"hidden_size": 40}), "text_encoder: 40 channels of text"),
        ("tokenizer", lambda: 3, "tokenizer: 3 has the wrong type"),
        ("scheduler", lambda: 3, "scheduler: int is not a scheduler"),
        ("transformer", lambda: tiny_vae("sd1"), "transformer: a TextToImagePipeline has no such part"),
        ("text_encoder_2", lambda: None, "text_encoder_2: a TextToImagePipeline has no such part"),
    ],
)
def test_what_does_not_fit_cannot_be_set(name, part, line, unchanged):
    before = unchanged.components
    with pytest.raises(InputError, match=f"^{line}"):
        setattr(unchanged, name, part())
    assert unchanged.components == before


def test_a_pipeline_is_made_from_another(pipe):
    other = type(pipe).from_pipe(pipe, scheduler=fastdiff.DDIMScheduler())
    assert other is not pipe and other.unet is pipe.unet and other.scheduler_name != pipe.scheduler_name
    again = fastdiff.TextToImagePipeline(**pipe.components)
    assert torch.equal(draw(again), draw(pipe)) and again.config["unet"] == pipe.config["unet"]
    for wrong in (3, Pipeline.from_pretrained("emoji64", device="cpu")):
        with pytest.raises(InputError, match=r"^pipeline: .* is no TextToImagePipeline of fastdiff"):
            type(pipe).from_pipe(wrong)


@pytest.mark.parametrize(
    ("args", "options", "dtype"),
    [
        ((torch.float64,), {}, torch.float64),
        (("cpu", torch.float64), {}, torch.float64),
        ((torch.device("cpu"),), {}, torch.float32),
        ((None, torch.float64), {}, torch.float64),
        ((), {"dtype": torch.float64, "device": "cpu"}, torch.float64),
        ((), {"torch_dtype": torch.float64, "torch_device": "cpu", "silence_dtype_warnings": True}, torch.float64),
        ((), {"dtype": torch.float64, "device": None}, torch.float64),
    ],
)
def test_to_moves_all_models(args, options, dtype, pipe):
    assert pipe.to(*args, **options) is pipe
    assert {model.dtype for model in pipe.models} == {pipe.dtype} == {dtype} and len(pipe.models) == 3


@pytest.mark.parametrize(
    ("args", "options"), [((torch.int8,), {}), (("cpu", "half"), {}), ((torch.float32, "cpu"), {}), ((), {"to": 3})]
)
def test_to_refuses_the_rest(args, options, unchanged):
    with pytest.raises(InputError, match=r"^(to: .* is neither a device nor a dtype|dtype: )"):
        unchanged.to(*args, **options)


def test_offload_needs_a_gpu(pipe):
    if not torch.cuda.is_available():
        for options in ({}, {"gpu_id": 0}, {"device": "cpu"}):
            with pytest.raises(InputError, match=r"^enable_model_cpu_offload: it saves GPU memory, and there is no"):
                pipe.enable_model_cpu_offload(**options)
    with pytest.raises(InputError, match=r"^device: 'nowhere' is unknown"):
        pipe.enable_model_cpu_offload(device="nowhere")


@pytest.mark.parametrize(
    ("options", "gpu"),
    [
        ({}, "cuda"),
        ({"gpu_id": 1}, "cuda:1"),
        ({"device": "cuda:2"}, "cuda:2"),
        ({"device": "cuda", "gpu_id": 3}, "cuda:3"),
    ],
)
def test_offload_chooses_its_gpu(options, gpu, pipe, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("fastdiff.pipelines.parts.rest_on_host", lambda model: None)
    pipe.enable_model_cpu_offload(**options)
    assert pipe.device == torch.device(gpu) and {model.device.type for model in pipe.models} == {"cpu"}
    for wrong, line in [
        ({"gpu_id": -1}, "gpu_id: -1 is not the number of a GPU"),
        ({"gpu_id": "a"}, "gpu_id: 'a' is not the number of a GPU"),
        ({"gpu_id": 1, "device": "cuda:1"}, "gpu_id: device already has a number"),
        ({"gpu_id": 4}, "device: cuda:4 does not exist"),
    ]:
        with pytest.raises(InputError, match=f"^{line}"):
            pipe.enable_model_cpu_offload(**wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_offloaded_pipeline_draws_the_same(text_folder):
    pipe = Pipeline.from_pretrained(text_folder("sdxl"), device="cuda")
    expected = draw(pipe)
    pipe.enable_model_cpu_offload()
    assert torch.equal(draw(pipe), expected) and {model.device.type for model in pipe.models} == {"cpu"}


def test_tiling_and_slicing_reach_the_vae(pipe):
    """Tiling changes large pictures as in diffusers, and slicing changes none."""
    theirs = tiny_vae("sd1")
    options = {"height": 48, "width": 32}
    whole, latents = draw(pipe, **options), draw(pipe, output_type="latent", **options)
    pipe.enable_vae_tiling()
    theirs.enable_tiling()
    tiled = draw(pipe, **options)
    assert pipe.vae.use_tiling and not torch.equal(tiled, whole)
    with torch.no_grad():
        expected = theirs.decode(latents / theirs.config.scaling_factor).sample
    torch.testing.assert_close(tiled, (expected / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-4)
    pipe.disable_vae_tiling()
    pipe.enable_vae_slicing()
    assert pipe.vae.use_slicing and torch.equal(draw(pipe, **options), whole)
    pipe.disable_vae_slicing()
    assert not pipe.vae.use_slicing and not pipe.vae.use_tiling


@pytest.mark.parametrize(
    "method", ["enable_vae_tiling", "disable_vae_tiling", "enable_vae_slicing", "disable_vae_slicing"]
)
def test_without_a_vae_there_is_nothing_to_tile(method, ddpm):
    with pytest.raises(InputError, match=f"^{method}: this pipeline has no VAE; leave it out"):
        getattr(ddpm, method)()


def test_what_is_not_needed_is_accepted(pipe):
    expected = draw(pipe)
    pipe.enable_attention_slicing()
    pipe.enable_attention_slicing("max")
    pipe.set_attention_slice(None)
    pipe.disable_attention_slicing()
    pipe.enable_xformers_memory_efficient_attention(attention_op=None)
    pipe.disable_xformers_memory_efficient_attention()
    pipe.set_use_memory_efficient_attention_xformers(True)
    pipe.fuse_qkv_projections()
    pipe.unfuse_qkv_projections(unet=True, vae=False)
    for method in (pipe.remove_all_hooks, pipe.maybe_free_model_hooks, pipe.reset_device_map, pipe.disable_freeu):
        method()
    assert torch.equal(draw(pipe), expected)


@pytest.mark.parametrize("name", OF_PIPELINES)
def test_refused_methods_are_one_line(name, ddpm):
    assert "enable_model_cpu_offload()" in OF_PIPELINES["enable_sequential_cpu_offload"]
    with pytest.raises(InputError, match=f"^{name}: ") as error:
        getattr(ddpm, name)("a", b=3)
    assert "\n" not in str(error.value)


def test_every_public_name_of_diffusers_is_there(unchanged, ddpm):
    """ConfigMixin's load_config comes with the models' surface."""
    for ours, theirs in ((unchanged, diffusers.StableDiffusionXLPipeline), (ddpm, diffusers.DiTPipeline)):
        public = {name for name in dir(theirs) if not name.startswith("_")} | {"name_or_path"}
        mixin = {name for name in dir(diffusers.configuration_utils.ConfigMixin) if not name.startswith("_")}
        assert sorted(name for name in public - mixin if not hasattr(ours, name)) == []


def test_labels_have_ids(ddpm):
    names = ddpm.info.labels[3], ddpm.info.labels[5]
    assert ddpm.get_label_ids(list(names)) == [3, 5] == [ddpm.labels[name] for name in names]
    assert ddpm.get_label_ids(names[0]) == [3]
    for wrong in (3, [3], ["no such thing"]):
        with pytest.raises(InputError, match=r"^label: "):
            ddpm.get_label_ids(wrong)


class Bar:
    """Counts what tqdm would show."""

    made: list = []  # noqa: RUF012

    def __init__(self, iterable=None, total=None, **options):
        self.total, self.options, self.done = total, options, 0
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None

    def update(self):
        self.done += 1


def test_the_progress_bar_is_shown_once_it_is_configured(pipe, monkeypatch, capsys):
    draw(pipe)
    assert capsys.readouterr().err == ""
    pipe.set_progress_bar_config(desc="drawing", leave=False)
    draw(pipe)
    assert "drawing" in capsys.readouterr().err
    monkeypatch.setattr(surface, "tqdm", Bar)
    draw(pipe)
    bar = Bar.made.pop()
    assert (bar.total, bar.done, bar.options) == (3, 3, {"desc": "drawing", "leave": False})  # PNDM: a call more
    pipe.set_progress_bar_config(disable=True)
    draw(pipe)
    assert Bar.made.pop().options == {"disable": True}
    with pytest.raises(InputError, match=r"^set_progress_bar_config: tqdm has no description; use one of ascii"):
        pipe.set_progress_bar_config(description="x")
    monkeypatch.undo()
    assert [*pipe.progress_bar([1, 2])] == [1, 2] and pipe.progress_bar(total=3).total == 3
    with pytest.raises(InputError, match=r"^progress_bar: it needs a length"):
        pipe.progress_bar()


def test_pictures_are_converted_as_in_diffusers(unchanged):
    theirs, ours = diffusers.image_processor.VaeImageProcessor(vae_scale_factor=2), unchanged.image_processor
    x = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    for flags in (None, [True, False]):
        for kind in ("pt", "np", "latent"):
            found, expected = (each.postprocess(x, kind, flags) for each in (ours, theirs))
            assert np.array_equal(found, expected)
    assert [a.tobytes() for a in ours.postprocess(x)] == [a.tobytes() for a in theirs.postprocess(x)]
    levels = np.random.default_rng(0).integers(0, 256, (2, 7, 5, 3), dtype=np.uint8)
    given = Image.fromarray(levels[0]), [Image.fromarray(each) for each in levels], levels / np.float32(255)
    for each in (*given, torch.rand(3, 6, 4), [torch.rand(3, 6, 4)] * 2):
        for size in ({}, {"height": 9, "width": 4}):
            assert torch.equal(ours.preprocess(each, **size), theirs.preprocess(each, **size))
    assert torch.equal(ours.preprocess(torch.full((1, 3, 2, 2), -0.5)), torch.full((1, 3, 2, 2), -0.5))


@pytest.mark.parametrize(
    ("method", "args", "line"),
    [
        ("postprocess", (3,), "image: 3 is not a tensor"),
        ("postprocess", (torch.zeros(3, 4, 4),), r"image: its shape is \(3, 4, 4\)"),
        ("postprocess", (torch.zeros(1, 3, 4, 4), "jpg"), "output_type: 'jpg' is not one of pil, np, pt, latent"),
        ("postprocess", (torch.zeros(1, 3, 4, 4), "pt", [True, True]), "do_denormalize: 2 given for 1 pictures"),
        ("postprocess", (torch.zeros(1, 3, 4, 4), "pt", 3), "do_denormalize: 3 is not a list"),
        ("preprocess", ("a.png",), "image: 'a.png' holds no pictures"),
        ("preprocess", ([],), r"image: \[\] holds no pictures"),
        ("preprocess", ([torch.zeros(3, 4, 4), torch.zeros(3, 4, 6)],), "image: .* holds no pictures"),
        ("preprocess", (torch.zeros(1, 3, 1, 4),), "image: 1 x 4 is too small; each side must be at least 2"),
        ("preprocess", (torch.zeros(1, 3, 4, 4), "8"), "height: '8' is not a whole number"),
    ],
)
def test_wrong_pictures_are_one_line(method, args, line, unchanged):
    with pytest.raises(InputError, match=f"^{line}"):
        getattr(unchanged.image_processor, method)(*args)


def test_numpy_to_pil(unchanged):
    array = np.random.default_rng(0).random((2, 4, 4, 3))
    for each in (array, array[0], array[..., :1]):
        theirs = diffusers.DiffusionPipeline.numpy_to_pil(each)
        assert [a.tobytes() for a in unchanged.numpy_to_pil(each)] == [a.tobytes() for a in theirs]
    with pytest.raises(InputError, match=r"^images: .* is no array \(N, H, W, C\)"):
        unchanged.numpy_to_pil([3])
