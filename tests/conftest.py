"""Fixtures for several folders of tests."""

import atexit
import functools
import gc
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

EMOJI64 = Path(__file__).parents[1] / "fastdiff" / "bundled" / "emoji64"

# Examples may be slow on a busy machine, and the checkout may be read-only.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.load_profile("tests")

# Shells ignore SIGINT in background jobs, nohup ignores SIGHUP, and child processes inherit ignored signals. A signal
# with a handler is reset to its default in a child. The handlers do nothing, so nohup still protects the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _signal in {"SIGHUP", "SIGTERM"} & {number.name for number in signal.Signals}:
    if signal.getsignal(getattr(signal, _signal)) == signal.SIG_IGN:
        signal.signal(getattr(signal, _signal), lambda *_: None)

# The checkout may be read-only, so write elsewhere. xdist's workers inherit the folder.
if "HYPOTHESIS_STORAGE_DIRECTORY" not in os.environ:
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp(prefix="hypothesis-")
    atexit.register(shutil.rmtree, os.environ["HYPOTHESIS_STORAGE_DIRECTORY"], ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """Without a GPU, leave out the tests that need one, unless they are only listed. Skipping each takes longer."""
    if not torch.cuda.is_available() and not config.option.collectonly:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while modules are imported and tests are made of their parameters."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Exclude the objects of imported modules from garbage collection, where they cost half a second each time.

    Libraries import more modules during the tests, so collections stay expensive. Make them rarer.
    """
    gc.freeze()
    gc.set_threshold(30_000, 20, 50)


def pytest_unconfigure():
    gc.unfreeze()  # Triton would report frozen objects as leaks at the end


@pytest.fixture
def randomise():
    """Give every parameter a random value that cannot hide an error: none is zero, and no norm weight is 1."""

    def fill(model: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            for module in model.modules():
                if isinstance(module, nn.GroupNorm):
                    module.weight.add_(1)
        return model.eval()

    return fill


@pytest.fixture
def exact_matmuls():
    """Compute torch's float32 convolutions and products in float32, never in TF32."""
    backends = torch.backends.cudnn, torch.backends.cuda.matmul  # monkeypatch cannot restore the second
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


@pytest.fixture
def roots_of_ieee(monkeypatch):
    """Round square roots on the CPU according to IEEE 754. MKL rounds some differently, depending on the CPU."""
    power = torch.Tensor.__pow__

    def root(x):
        return torch.as_tensor(np.sqrt(x.numpy()))

    monkeypatch.setattr(torch.Tensor, "sqrt", root)
    monkeypatch.setattr(torch.Tensor, "__pow__", lambda x, exponent: root(x) if exponent == 0.5 else power(x, exponent))


TINY_POLICY = {
    "sample_size": 65536,  # diffusers' default
    "in_channels": 14,
    "block_out_channels": (8, 16, 32),
    "time_embedding_type": "positional",
    "use_timestep_embedding": True,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "mid_block_type": "MidResTemporalBlock1D",
    "out_block_type": "OutConv1DBlock",
    "act_fn": "mish",
}
TINY_VALUES = TINY_POLICY | {
    "mid_block_type": "ValueFunctionMidBlock1D",
    "out_block_type": "ValueFunction",
    "block_out_channels": (8, 16, 32),
    "downsample_each_block": True,
    "up_block_types": (),
}


def _tiny_unet1d(options, randomise):
    import diffusers

    levels = len(options["block_out_channels"])
    blocks = {
        "out_channels": options["in_channels"],
        "down_block_types": ("DownResnetBlock1D",) * levels,
        "up_block_types": ("UpResnetBlock1D",) * (levels - 1),
    }
    return randomise(diffusers.UNet1DModel(**blocks | options))


@pytest.fixture
def save_planner(tmp_path, randomise):
    """Save a tiny planner as diffusers' DDPM or DDIM pipeline; return the pipeline and its folder."""
    import diffusers

    def save(kind: str, unet: dict | None = None, **scheduler):
        model = _tiny_unet1d(TINY_POLICY | (unet or {}), randomise)
        with torch.no_grad():
            model.out_block.final_conv1d_2.weight.mul_(0.1)  # large outputs would amplify rounding errors at every step
        scheduler = getattr(diffusers, f"{kind}Scheduler")(**scheduler)
        pipe = getattr(diffusers, f"{kind}Pipeline")(unet=model, scheduler=scheduler)
        pipe.save_pretrained(tmp_path / "planner")
        return pipe, tmp_path / "planner"

    return save


class _World:
    """The parts of an env that ValueGuidedRLPipeline needs; diffusers does not save them."""

    observation_space, action_space = torch.empty(11), torch.empty(3)

    def get_dataset(self) -> dict:
        return {}


@pytest.fixture
def save_value_guided(tmp_path, randomise):
    """Save a tiny ValueGuidedRLPipeline of diffusers with a stub env; return the pipeline and its folder."""
    from diffusers import DDPMScheduler
    from diffusers.experimental import ValueGuidedRLPipeline

    def save(unet: dict | None = None, values: dict | None = None):
        policy = _tiny_unet1d(TINY_POLICY | (unet or {}), randomise)
        value_function = _tiny_unet1d(TINY_VALUES | (values or {}), randomise)
        pipe = ValueGuidedRLPipeline(value_function, policy, DDPMScheduler(), _World())
        pipe.save_pretrained(tmp_path / "value-guided")
        return pipe, tmp_path / "value-guided"

    return save


@pytest.fixture
def save_tokenizer():
    """Save a CLIP tokenizer with a small vocabulary in one of the layouts of model folders; return the folder."""
    from tests.support.text_pipelines import save_tokenizer

    return save_tokenizer


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Return the folder of a tiny text pipeline of a kind in tests/support/text_pipelines.py, saved once."""
    from tests.support.text_pipelines import text_pipeline

    @functools.cache
    def folder(kind: str):
        path = tmp_path_factory.mktemp(kind)
        text_pipeline(kind).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def inpainting_folder(tmp_path_factory):
    """Return the folder of a tiny text pipeline whose U-Net reads the mask."""
    from tests.support.text_pipelines import text_pipeline, tiny_unet

    path = tmp_path_factory.mktemp("inpainting")
    text_pipeline("sd1", unet=tiny_unet("sd1", in_channels=9)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text_pipes(text_folder):
    """Return diffusers' tiny text pipeline of a kind and ours with the same weights. Tests must not change them."""
    from fastdiff import Pipeline
    from tests.support.text_pipelines import text_pipeline

    @functools.cache
    def pipes(kind: str):
        return text_pipeline(kind), Pipeline.from_pretrained(text_folder(kind), device="cpu")

    return pipes


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: for tiny operations, several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small_bundled(tmp_path_factory) -> Path:
    """The bundled models, with small networks of random weights for emoji64 and emoji64-dit."""
    from tests.support.tiny import save_small_bundled

    return save_small_bundled(tmp_path_factory.mktemp("bundled"))


@contextmanager
def _bundled(folder: Path, opening_model: str) -> Iterator[None]:
    from fastdiff.checkpoints import hub
    from fastdiff.requests import defaults

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "BUNDLED", folder)
        patch.setattr(defaults, "MODEL", opening_model)
        yield


@pytest.fixture(scope="module")
def as_bundled(small_bundled) -> Iterator[Callable]:
    """Open the page with the small emoji64, which has labels. `with as_bundled()` restores the bundled models."""
    from fastdiff.checkpoints import hub
    from fastdiff.requests import defaults

    real = hub.BUNDLED, defaults.MODEL
    with _bundled(small_bundled, "emoji64"):
        yield partial(_bundled, *real)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory, text_folder, small_bundled) -> Path:
    """A folder of models, all with random weights.

    cats: the small emoji64 without label names. plain/tiny: an unconditional model. text/sd1 and text/sdxl: models that
    read text.
    """
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(small_bundled / "emoji64", root / "cats", ignore=shutil.ignore_patterns("fastdiff.json"))
    _save_tiny(root / "plain" / "tiny")
    for kind in ("sd1", "sdxl"):
        shutil.copytree(text_folder(kind), root / "text" / kind)
    return root


def _save_tiny(folder: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
        add_attention=False,
    )
    DDPMPipeline(unet, DDPMScheduler(num_train_timesteps=100)).save_pretrained(folder)


@pytest.fixture
def card_folder(tmp_path):
    """Write the JSON files of a model, like emoji64's except for the given values, and return its folder."""

    def write(name: str = "model", info: dict | None = None, **unet) -> Path:
        folder = tmp_path / name
        shutil.copytree(EMOJI64, folder, ignore=shutil.ignore_patterns("*.safetensors", "fastdiff.json"))
        config = json.loads((folder / "unet" / "config.json").read_text())
        (folder / "unet" / "config.json").write_text(json.dumps(config | unet))
        if info is not None:
            (folder / "fastdiff.json").write_text(json.dumps(info))
        return folder

    return write
