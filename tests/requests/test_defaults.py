"""The defaults of the command, the page and the library, written out side by side, so that changes show here."""

import inspect
from dataclasses import replace

import diffusers
import pytest

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.cli import sample
from fastdiff.cli.arguments import Parser
from fastdiff.pipelines import Pipeline
from fastdiff.pipelines.drawing import DrawingOptions
from fastdiff.requests.completion import complete
from fastdiff.requests.defaults import COMMAND, LIBRARY, PAGE, PAGE_ON_CPU, SamplingOptions
from fastdiff.requests.request import Request

TINY = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
}
CALLERS = {"command": COMMAND, "page": PAGE, "page on a CPU": PAGE_ON_CPU}


def _save_dit(folder) -> None:
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=4, num_layers=1, num_attention_heads=2, attention_head_dim=8, num_embeds_ada_norm=9, out_channels=8
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip
    diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler()).save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The bundled models, and folders saved by diffusers, which have no fastdiff.json."""
    root = tmp_path_factory.mktemp("models")
    unet = diffusers.UNet2DModel(**TINY)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(root / "ddpm")
    diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler(num_train_timesteps=30)).save_pretrained(root / "ddim")
    _save_dit(root / "dit")
    return hub.bundled_models() | {folder.name: folder for folder in root.iterdir()}


SPREAD = ("fluent-3d smileys", "fluent-flat food", "noto objects", "twemoji flags")
FIRST = ("fluent-3d smileys",)
DDPM, GUIDED = {"scheduler": "ddpm"}, {"guidance_scale": 7.5, "num_inference_steps": 9}
FOUR = (0, 1, 2, 3)
TABLE = [
    # model, asked; caller, scheduler, steps, eta, clipped output, guidance; labels, seeds
    ("emoji64", {}, "command", "ddim", 50, 0.0, True, 4.0, SPREAD, (0,)),
    ("emoji64", {}, "page", "ddim", 50, 0.0, True, 4.0, FIRST, (0,)),
    ("emoji64", {}, "page on a CPU", "ddim", 50, 0.0, True, 4.0, FIRST, (0,)),
    ("emoji64", {}, "library", "ddim", 50, 0.0, True, 4.0, None, (0,)),
    ("emoji64", DDPM, "command", "ddpm", 50, None, None, 4.0, SPREAD, (0,)),
    ("emoji64", DDPM, "page", "ddpm", 50, None, None, 4.0, FIRST, (0,)),
    ("emoji64", DDPM, "page on a CPU", "ddpm", 50, None, None, 4.0, FIRST, (0,)),
    ("emoji64", DDPM, "library", "ddpm", 50, None, None, 4.0, None, (0,)),
    ("emoji64", GUIDED, "command", "ddim", 9, 0.0, True, 7.5, SPREAD, (0,)),
    ("emoji64", GUIDED, "page on a CPU", "ddim", 9, 0.0, True, 7.5, FIRST, (0,)),
    ("emoji64", GUIDED, "library", "ddim", 9, 0.0, True, 7.5, None, (0,)),
    ("emoji64-dit", {}, "command", "ddim", 50, 0.0, True, 5.0, SPREAD, (0,)),
    ("emoji64-dit", {}, "page", "ddim", 50, 0.0, True, 5.0, FIRST, (0,)),
    ("emoji64-dit", {}, "page on a CPU", "ddim", 50, 0.0, True, 5.0, FIRST, (0,)),
    ("emoji64-dit", {}, "library", "ddim", 50, 0.0, True, 5.0, None, (0,)),
    ("ddpm", {}, "command", "ddpm", 50, None, None, 1.0, (), FOUR),
    ("ddpm", {}, "page", "ddpm", 50, None, None, 1.0, (), (0,)),
    ("ddpm", {}, "page on a CPU", "ddpm", 50, None, None, 1.0, (), (0,)),
    ("ddpm", {}, "library", "ddpm", 1000, None, None, 1.0, None, (0,)),
    ("ddim", {}, "command", "ddim", 30, 0.0, False, 1.0, (), FOUR),  # trained with 30 steps
    ("ddim", {}, "page", "ddim", 30, 0.0, False, 1.0, (), (0,)),
    ("ddim", {}, "page on a CPU", "ddim", 30, 0.0, False, 1.0, (), (0,)),
    ("ddim", {}, "library", "ddim", 30, 0.0, False, 1.0, None, (0,)),
    ("ddim", {"eta": 0.5}, "command", "ddim", 30, 0.5, False, 1.0, (), FOUR),
    ("ddim", {"eta": 0.5}, "library", "ddim", 30, 0.5, False, 1.0, None, (0,)),
    ("dit", {}, "command", "ddim", 50, 0.0, False, 4.0, (0, 2, 5, 8), (0,)),  # labels 0 to 8, and 9 is the null label
    ("dit", {}, "page", "ddim", 50, 0.0, False, 4.0, (0,), (0,)),
    ("dit", {}, "page on a CPU", "ddim", 50, 0.0, False, 4.0, (0,), (0,)),
    ("dit", {}, "library", "ddim", 50, 0.0, False, 4.0, None, (0,)),
    ("dit", DDPM, "command", "ddpm", 50, None, None, 4.0, (0, 2, 5, 8), (0,)),
    ("dit", DDPM, "library", "ddpm", 1000, None, None, 4.0, None, (0,)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join([row[0], *map(str, row[1].values()), row[2]]))
def test_the_defaults_of(folders, row):
    model, asked, caller, *expected = row
    card = ModelCard.read(model, folders[model])
    completed = by_library(card, asked) if caller == "library" else by_request(card, asked, caller)
    assert completed == tuple(expected)


def by_request(card: ModelCard, asked: dict, caller: str) -> tuple:
    request, _ = complete(Request(**asked), card, CALLERS[caller])
    return (*(getattr(request, name) for name in vars(SamplingOptions())), request.label, request.seed)


def by_library(card: ModelCard, asked: dict) -> tuple:
    pipe = Pipeline.from_card(card, Load.of(device="cpu", scheduler=asked.get("scheduler")))
    open_options = DrawingOptions()
    names = vars(SamplingOptions()).keys() & vars(open_options).keys()
    options = pipe._complete(replace(open_options, **{name: asked.get(name) for name in names}))
    given = {name: each.default for name, each in inspect.signature(pipe.stream).parameters.items()}
    seeds = tuple(range(open_options.seed, open_options.seed + given["num_images"]))
    return (*vars(options).values(), given["class_labels"], seeds)


def test_pictures_at_a_time():
    found = {caller: defaults.batch_size for caller, defaults in (CALLERS | {"library": LIBRARY}).items()}
    assert found == {"command": 8, "page": 16, "page on a CPU": 1, "library": None}


def test_a_command_without_flags_leaves_every_choice_open():
    parser = Parser()
    sample.add_arguments(parser)
    assert Request.from_flags(vars(parser.parse_args([]))) == Request()
