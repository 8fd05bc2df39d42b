"""Every kernel compiles for every card, without a card, and fits its shared memory at the tiles of its wrapper.

A case is a call of an operation on meta tensors (`tests/support/compile_cases.py`). Its launches are compiled instead
of run: every case for sm_90; for sm_80, sm_89 and sm_120 the largest tile of each kernel with each kind of numbers; for
sm_86, which has sm_80's instructions and sm_89's shared memory, the largest tiles of products in 16 bits and int8.
"""

import os
import re

import pytest
import torch

import fastdiff
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.json_files import read_json
from fastdiff.kernels.plans import choices
from fastdiff.kernels.plans.tuning import using
from fastdiff.models.blocks.conditioning import Conditioning, Prompt
from tests.support.compile_cases import CASES, FP8_CASES, meta
from tests.support.compiled import assert_compiles, kinds_of

pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no compiler", allow_module_level=True)

ALL = CASES | {f"{name}-fp8": call for name, call in FP8_CASES.items()}
# Every generic kernel, in at most a second each.
QUICK = {
    "conv2d-N2-C36-H7-odd-int8",
    "conv2d-N1-C1024-H8-spread-chunks-int8",
    "group_norm-N64-C128-H32-many-pictures",
    "group_norm-N1-C36-H7-gelu-fp16",
    "attention-L100-h3-d8",
    "attention-L256-keys4-h8-d40-residual",
    "linear-N1-C1-smallest",
    "layer_norm-N1-C1-smallest",
    "denoise-N8-H256",
    "merge_lora",
    "rotary-N1-L4160-h60-d128",
    "scale-input-N8-H64-guided",
    "to_fp8-tokens-fp8",
    "to_fp8-pictures-fp8",
}
# The largest tile of each kernel, with each kind of numbers, on cards without descriptors. All but sm_80 have the least
# shared memory.
LARGEST = (
    "conv2d-N1-L128-C32-bf16",
    "conv2d-N1-L256-C64-fp32",
    "conv2d-N8-C256-H32-up-int8",
    "conv2d-N2-C64-H64-fp32-int8",
    "conv2d-N1-C1024-H8-spread-chunks-int8",
    "group_norm-N8-C128-H256-own-moments",
    "group_norm-N1-C36-H7-gelu-fp16",
    "group_norm-N2-C224-H64-mish-fp32",
    "attention-L256-h1-d512",
    "attention-L256-h1-d256-fp32",
    "linear-N2-C1152-rms-norm-fp32",
    "linear-N2-C1152-fp32-int8",
    "geglu-N2-C1280",
    "geglu-N2-C1280-int8",
    "layer_norm-N1-C3840-normed-twice",
    "layer_norm-N1-C3000-fp32",
    "rotary-N1-L4160-h60-d128",
    "rotary-N1-L9-h16-d512-fp32",
    "denoise-N8-H256",
    "denoise-N2-H7-learned",
    "scale-input-N8-H64-guided",
    "scale-input-N1-H7-fp32",
    "merge_lora",
    "merge_lora-fp32",
)
LARGEST_FP8 = (
    "to_fp8-tokens",
    "to_fp8-pictures",
    "layer_norm-N2-C1152",
    "linear-N2-C1152-fp32",
    "geglu-N2-C1280",
    "conv2d-N2-C1280-H32",
    "conv2d-N2-C64-H64-fp32",
)
PARTS = 3  # the launches of a bundled model are divided among this many tests, of some seconds each
LARGEST_PRODUCTS = (
    "conv2d-N1024-L256-C64-bf16",
    "conv2d-N8-C256-H32-up-int8",
    "attention-L256-h1-d512",
    "geglu-N2-C1280",
)
WITH_FP8 = ("conv2d-N1024-L256-C64-bf16", *LARGEST, *(f"{name}-fp8" for name in LARGEST_FP8))
OTHER_CARDS = {80: LARGEST, 86: LARGEST_PRODUCTS, 89: WITH_FP8, 120: WITH_FP8}
# The bytes that a thread of a case may spill on these cards; others may spill 64. Triton 3.9 spills up to 576.
SPILLS = {
    "conv2d-N2-C64-H64-fp32-int8": 640,
    "linear-N2-C1152-fp32-int8": 640,
    "merge_lora": 320,
    "merge_lora-fp32": 320,
}
LEAST_WARPS = 8  # of a multiprocessor: two programs of 4 warps, or one of 8
# On cards of 99 KB a program of 4 warps is alone: queries, and a block of keys and one of values, take 68 and 81 KB.
ALONE = {"attention-L256-h1-d512", "attention-L256-h1-d256"}
# Launches that failed or were alone on these cards, or spilled, before their stages and warps followed from the card.
MENDED = [(120, "attention-L256-h1-d256", 256)]
MENDED_SLOW = [
    (86, "attention-L4192-h30-d128-lengths", 0),
    (86, "conv2d-N8-C3-H256-first", 0),
    (86, "conv2d-N1024-L4-C256-bf16", 256),
]


def marked(names, quick):
    return [pytest.param(name, id=name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("case", marked(ALL, QUICK))
def test_compiles_within_shared_memory(case, launches):
    assert_compiles(launches(ALL[case], 90), 90)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "case"),
    [pytest.param(card, name, id=f"{name}-sm_{card}") for card, names in OTHER_CARDS.items() for name in names],
)
def test_the_largest_tile_compiles_within_shared_memory(case, capability, launches):
    warps = 4 if case in ALONE else LEAST_WARPS
    assert_compiles(launches(ALL[case], capability), capability, spills=SPILLS.get(case, 64), warps=warps)


@pytest.mark.parametrize(
    ("capability", "case", "spills"),
    [
        *(pytest.param(*row, id=f"{row[1]}-sm_{row[0]}") for row in MENDED),
        *(pytest.param(*row, id=f"{row[1]}-sm_{row[0]}", marks=pytest.mark.slow) for row in MENDED_SLOW),
    ],
)
def test_other_tiles_fit_these_cards(case, capability, spills, launches):
    warps = 4 if case in ALONE else LEAST_WARPS
    assert_compiles(launches(ALL[case], capability), capability, spills=spills, warps=warps)


@pytest.mark.parametrize("capability", OTHER_CARDS, ids=lambda capability: f"sm_{capability}")
def test_the_largest_tiles_are_among_those_compiled(capability, launches):
    """For any kernel and kind of numbers that is compiled for a card, no case that runs there has a larger tile."""
    sizes = {name: kinds_of(launches(call, capability)) for name, call in (CASES if capability < 89 else ALL).items()}
    largest: dict = {}
    for name in OTHER_CARDS[capability]:
        largest |= {kind: max(size, largest.get(kind, 0)) for kind, size in sizes[name].items()}
    beyond = [
        f"{name}: {' of '.join(kind)}, a tile of {size}"
        for name, found in sizes.items()
        for kind, size in found.items()
        if size > largest.get(kind, 0) and (kind in largest or capability != 86)
    ]
    assert not beyond


def test_every_kernel_of_all_cards_is_compiled_in_each_run(launches):
    def kernels(names):
        return {kernel for name in names for kernel, _ in kinds_of(launches(ALL[name], 90))}

    assert kernels(QUICK) >= kernels(ALL)


class Chosen:
    """A table that chooses the candidate with the most stages, for given pixels, channels and channels per step."""

    def __init__(self, *sizes: int):
        self.sizes = sizes

    def choose(self, operation, shape, usual, candidates):
        return max(candidate for candidate in candidates() if candidate[:3] == self.sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(64, 64, 128), (16, 64, 256), (64, 16, 128)], ids=lambda sizes: "x".join(map(str, sizes))
)
def test_small_tiles_are_multiplied_by_the_instructions_of_large_ones(sizes, launches):
    """Other instructions may round differently, so a picture would differ between a table's tile and the usual one."""
    with using(Chosen(*sizes)):
        found = launches(CASES["conv2d-N1-C256-H4-norm"], 90)
    (compiled,) = assert_compiles(found, 90)
    ptx = compiled.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{min(sizes[:2])}k16" in ptx and "mma.sync" not in ptx


@pytest.mark.parametrize("case", ["rotary-N1-L4160-h60-d128", "rotary-N1-L128-h40-d128-halves"])
def test_heads_are_read_and_written_in_vectors(case, launches):
    """An access moves 16 bytes, and nothing goes through shared memory."""
    (compiled,) = assert_compiles(launches(ALL[case], 90), 90)
    ptx = compiled.asm["ptx"]
    loads, stores = (len(re.findall(rf"{way}\.global\.v4\.b32", ptx)) for way in ("ld", "st"))
    assert stores == 4 and loads >= stores + 2  # of x, and of the tables
    assert "st.global.b" not in ptx and compiled.metadata.shared == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize("name", ["emoji64", "emoji64-dit"])
def test_bundled_models_compile(name, batch_size, part, launches, monkeypatch):
    """All kernels that one prediction launches on an H200."""
    folder = hub.resolve(name)
    kind = fastdiff.UNet2DModel if (folder / "unet").is_dir() else fastdiff.DiTTransformer2DModel
    model = (
        kind.from_config(read_json(folder / kind.part.name / "config.json")).to(torch.bfloat16).to_empty(device="meta")
    )
    zeros = torch.zeros(batch_size, dtype=torch.int64, device="meta")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    x = meta(batch_size, model.config.sample_size, model.config.sample_size, 3)
    found = launches(lambda: model.predict(x, model.conditioning(zeros, zeros)), 90)
    assert_compiles(found, 90, part=(part, PARTS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_the_bundled_text_model_compiles(batch_size, part, launches, monkeypatch):
    """All kernels that one prediction for prompts of 32 tokens launches on an H200."""
    config = read_json(hub.resolve("emoji-sd") / "unet" / "config.json")
    model = fastdiff.UNet2DConditionModel.from_config(config).to(torch.bfloat16).to_empty(device="meta")
    monkeypatch.setattr(choices, "unavailable", lambda device: None)
    timesteps = torch.zeros(batch_size, dtype=torch.int64, device="meta")
    text = meta(batch_size, 32, model.config.cross_attention_dim)
    x = meta(batch_size, model.config.sample_size, model.config.sample_size, model.config.in_channels)

    def predict():
        embedded = model.embed(timesteps, None, Prompt(text))
        conditioning = Conditioning(embedded, timesteps, (model.project_text(text),))
        return model.predict(x, conditioning)

    assert_compiles(launches(predict, 90), 90, part=(part, PARTS))
