"""`fastdiff warm`: what it compiles is what a launch asks for."""

import json
import os
import struct
from dataclasses import replace

import pytest
import torch

from fastdiff.kernels.device.language import triton
from fastdiff.kernels.host.compiling import only_compiling
from fastdiff.kernels.host.launching import launch
from fastdiff.kernels.to_fp8 import BLOCK, to_fp8
from fastdiff.warming import card
from fastdiff.warming.card import CARDS, Card, pretended
from fastdiff.warming.ghosts import GPU, Ghost
from tests.checkpoints.single_files import ldm
from tests.kernels.host.compiling.stand_ins import broken, forget_kernels
from tests.parity.z_image import tiny
from tests.support.text_pipelines import text_pipeline
from tests.support.tiny import UNET, save_unet


@pytest.fixture(scope="module")
def unet(tmp_path_factory):
    return save_unet(tmp_path_factory.mktemp("unet"), **UNET)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    text_pipeline("sdxl").save_pretrained(folder)
    return folder


@pytest.fixture
def captions(randomise, tmp_path):
    folder = tmp_path / "captions"
    tiny.pipeline(randomise).save_pretrained(folder)
    return folder


def made_real(value):
    """Return a launch's argument with real memory on the CPU instead of ghosts."""
    if isinstance(value, Ghost):
        size = 1 + value.storage_offset() + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        return torch.empty(size, dtype=value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, tuple):
        return tuple(map(made_real, value))
    return replace(value, base=made_real(value.base)) if hasattr(value, "base") else value


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("unet", "sm_90"),
        pytest.param("unet", "sm_80", marks=pytest.mark.slow),
        ("text", "sm_90"),
        pytest.param("text", "sm_80", marks=pytest.mark.slow),
    ],
)
def test_triton_sees_no_difference_between_a_ghost_and_memory(request, launched, model, name):
    found = launched(request.getfixturevalue(model), name)
    seen = 0
    triton.runtime.driver.set_active(card._driver(CARDS[name]))
    try:
        binders = {kernel: kernel.create_binder() for kernel, _, _ in found}
        for kernel, args, kwargs in found:
            options = {key: value for key, value in kwargs.items() if key not in ("grid", "warmup")} | {"debug": False}
            *_, binder = binders[kernel]
            ghostly, really = binder(*args, **options), binder(*map(made_real, args), **options)
            assert ghostly[1:] == really[1:], kernel.__name__
            seen += any(isinstance(arg, Ghost) for arg in args)
    finally:
        triton.runtime.driver._active = None
    assert seen > 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_a_launch_reads_what_was_compiled(monkeypatch, tmp_path):
    hits = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    forget_kernels(monkeypatch)
    with pretended(CARDS["sm_90"]), only_compiling() as compiler:
        to_fp8.kernel(torch.empty(2, 16, BLOCK // 64, 64, device=GPU, dtype=torch.bfloat16))
    assert len(compiler.jobs) == 2 and not compiler.failures()
    forget_kernels(monkeypatch)
    hits.clear()
    monkeypatch.setattr(triton.runtime.driver, "_active", card._driver(CARDS["sm_90"]))
    with only_compiling():  # a launch, less the GPU
        to_fp8.kernel(torch.empty(2, 16, BLOCK // 64, 64, dtype=torch.bfloat16))
    assert hits == [True, True]


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretended(CARDS["sm_90"]), only_compiling() as compiler:
        launch(broken, (1,), torch.empty(16, device=GPU), num_warps=1)
    (error,) = compiler.failures()
    assert "this kernel is broken" in str(error)


@pytest.mark.slow
def test_the_card_and_the_precision_decide_what_is_launched(launched, text):
    def facts(*args, **request):
        """Return whether kernels start early (sm_90 can), and the number formats that they read."""
        found = launched(text, *args, **request)
        formats = {arg.dtype for _, args, _ in found for arg in args if isinstance(arg, Ghost)}
        return {kwargs["launch_pdl"] for _, _, kwargs in found}, formats

    assert facts("sm_80", dtype="float16") == ({False}, {torch.float16, torch.float32, torch.int32, torch.int64})
    early, formats = facts("sm_90", precision="int8")
    assert early == {True} and {torch.int8, torch.bfloat16} <= formats


def test_the_size_reaches_the_kernels(launched, unet):
    def shapes(**size):
        return {arg.shape[1:3] for _, args, _ in launched(unet, **size) for arg in args if isinstance(arg, Ghost)}

    assert (24, 16) in shapes(height=24, width=16) - shapes()


@pytest.mark.parametrize("precision", ["full", pytest.param("fp8", marks=pytest.mark.slow)])
def test_captions_are_encoded_and_drawn_with_ghosts(launched, captions, precision):
    """The lengths of captions and the size of the latents are real: the host reads them."""
    found = launched(captions, height=16, width=24, batch=2, guidance_scale=2.0, precision=precision)
    shapes = {arg.shape for _, args, _ in found for arg in args if isinstance(arg, Ghost)}
    assert {shape[1] for shape in shapes if len(shape) == 3} >= {32, 64}  # a caption, and a picture before it
    assert {"attention_kernel", "rotary_kernel"} <= {kernel.__name__ for kernel, _, _ in found}


def test_a_planner_is_drawn_with_ghosts_and_has_no_size(launched, save_planner, here):
    _, folder = save_planner("DDPM")
    names = {kernel.__name__ for kernel, _, _ in launched(folder, horizon=16)}
    assert len(names) > 3 and any("conv" in name for name in names), names
    code, _, err = here("-m", folder, "--card", "sm_90", "--size", "8x8")
    assert code == 2 and "draws trajectories; leave it out" in err


def test_a_single_file_launches_what_its_folder_launches(launched, text, tmp_path):
    """Only the header of the file is read."""
    file = tmp_path / "model.safetensors"
    with open(ldm.save(ldm.whole("sdxl", text_pipeline("sdxl")), tmp_path / "whole.safetensors"), "rb") as whole:
        (length,) = struct.unpack("<Q", whole.read(8))
        file.write_bytes(struct.pack("<Q", length) + whole.read(length))
    os.truncate(file, (tmp_path / "whole.safetensors").stat().st_size)
    names = [
        [(kernel.__name__, kwargs["grid"]) for kernel, _, kwargs in launched(model, **options)]
        for model, options in ((text, {}), (file, {"config": str(text)}))
    ]
    assert names[0] == names[1]


@pytest.fixture
def here(monkeypatch, capfd, tmp_path):
    """Runs `fastdiff warm ARGS` without compiling; returns the exit code, stdout and stderr."""
    from fastdiff import cli

    def run(*args):
        monkeypatch.chdir(tmp_path)
        return cli.main(["warm", *map(str, args)]), *capfd.readouterr()

    return run


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--card", "sm_70"], "--card: 'sm_70' is unknown; use sm_80, "),
        (["--card", "sm_90", "--size", "512"], "'512' is not a size such as 1024x1024"),
        (["--card", "sm_90", "--size", "8x8,"], "'' is not a size"),
        (["--card", "sm_90", "--size", "9x8"], "width"),
        (["--card", "sm_90", "--batch", "1,0"], "0 is not a whole number of at least 1"),
        (["--card", "sm_80", "--precision", "fp8"], "precision: sm_80 is sm_80 and has no fp8"),
        (["--card", "sm_90", "--model", "no/such/folder"], "no/such/folder"),
    ],
    ids=str,
)
def test_bad_flags_are_one_line(here, unet, args, said):
    code, out, err = here(*([] if "--model" in args else ["-m", unet]), *args)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_card_must_be_named(here, unet):
    code, _, err = here("-m", unet)
    assert code == 2 and "this machine has no GPU; name the card to compile for: sm_80" in err


def test_a_row_for_each_size_and_batch(here, unet, monkeypatch):
    monkeypatch.setattr(triton.JITFunction, "run", lambda *args, **kwargs: None)
    code, out, err = here("-m", unet, "--card", "sm_90", "--size", "8x8,16x8", "--batch", "1", "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["size"], row["batch"]) for row in rows] == [("8x8", 1), ("16x8", 1)]
    assert all(row["failed"] == [] and row["compiled"] == 0 for row in rows)


def test_the_cards_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Card.here() is None and {each.capability for each in CARDS.values()} >= {(8, 0), (8, 9), (9, 0)}
