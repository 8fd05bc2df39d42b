"""The stages and warps of launches on cards without descriptors, whose shared memory is smaller than an H200's.

`test_compile.py` checks with the compiler what these tests compute from the sizes of tiles.
"""

import os

import pytest
import torch

from fastdiff.kernels.host import launching
from fastdiff.kernels.host.launching import stages_for_two
from tests.support.compile_cases import CASES, FP8_CASES, attend
from tests.support.compiled import SHARED_MEMORY

pytest.importorskip("triton", reason="no Triton here")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter cannot skip launches", allow_module_level=True)

WITHOUT_DESCRIPTORS = [80, 86, 89, 120]
LENGTHS, FLAT, GEGLU = "attention-L4192-h30-d128-lengths", "conv2d-N8-C3-H256-first", "geglu-N2-C1280"
WIDE_GROUPS = "conv2d-N1024-L4-C256-bf16"


def sm(capability):
    return f"sm_{capability}"


def options_of(found, name):
    """Return the constants and options of the launches of a kernel."""
    launched = [kwargs for kernel, _, kwargs in found if kernel.fn.__name__ == name]
    assert launched
    return launched


@pytest.mark.parametrize(("capability", "stages"), [(80, 3), (86, 2), (89, 2), (90, 3), (100, 3), (120, 2)])
def test_stages_leave_shared_memory_for_a_second_program(capability, stages, monkeypatch):
    # of 52 KB for three stages, an A100 has room for two programs, and smaller cards have room for one
    monkeypatch.setattr(launching, "INTERPRETER_CAPABILITY", divmod(capability, 10))
    assert stages_for_two(3, 16 * 1024, 20 * 1024, torch.device("cpu")) == stages


def test_a_loop_has_two_stages_at_least_and_no_more_than_it_asks_for(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETER_CAPABILITY", (8, 6))
    cpu = torch.device("cpu")
    assert stages_for_two(3, 64 * 1024, 20 * 1024, cpu) == stages_for_two(4, 1, 90 * 1024, cpu) == 2
    assert stages_for_two(1, 64 * 1024, 20 * 1024, cpu) == stages_for_two(1, 1, 1, cpu) == 1
    assert stages_for_two(5, 1024, 0, cpu) == 5
    # two programs of 49 KB fill 100 KB
    assert stages_for_two(3, 1024, 47 * 1024, cpu) == 3 and stages_for_two(3, 1024, 47 * 1024 + 1, cpu) == 2


@pytest.mark.parametrize("capability", WITHOUT_DESCRIPTORS, ids=sm)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_fits_shared_memory_at_every_width(dtype, capability, launches):
    for width in (8, 40, 64, 72, 80, 96, 120, 128, 132, 160, 192, 256, *((320, 512) if dtype.itemsize == 2 else ())):
        found = launches(attend(1, 256, 1, width, dtype=dtype), capability)
        for chosen in options_of(found, "attention_kernel"):
            columns, queries, keys = chosen["D1"] + chosen["D2"], chosen["BM"], chosen["BN"]
            held = queries * (columns + keys) + 2 * max(1, chosen["num_stages"] - 1) * keys * columns
            assert held * dtype.itemsize <= SHARED_MEMORY[capability], width


@pytest.mark.parametrize(
    ("call", "kernel", "stages"),
    [
        (CASES[LENGTHS], "attention_kernel", {80: 3, 86: 2, 89: 2, 90: 3, 120: 2}),
        (CASES[GEGLU], "linear_kernel", {80: 3, 86: 3, 89: 3, 90: 3, 120: 3}),
        (FP8_CASES[GEGLU], "linear_kernel", {89: 2, 90: 3, 120: 2}),
        (CASES["conv2d-N1-L128-C32-bf16"], "conv_by_pointers", {80: 4, 86: 3, 89: 3, 120: 3}),
    ],
    ids=["attention", "geglu", "geglu-fp8", "row"],
)
def test_operations_choose_their_stages_by_the_card(call, kernel, stages, launches):
    for capability, expected in stages.items():
        found = launches(call, capability)
        assert {chosen["num_stages"] for chosen in options_of(found, kernel)} == {expected}, capability


def test_cards_without_descriptors_give_more_warps_to_tiles_that_would_spill(launches):
    for capability, warps in {80: 8, 86: 8, 89: 8, 90: 4, 120: 8}.items():
        (chosen,) = options_of(launches(CASES[FLAT], capability), "conv_by_pointers")
        assert chosen["num_warps"] == warps, capability
    for case, warps in {WIDE_GROUPS: 8, "conv2d-N1-L4-C256-bf16": 4, "conv2d-N1024-L32-C14-bf16": 4}.items():
        (chosen,) = options_of(launches(CASES[case], 86), "conv_by_pointers")
        assert chosen["num_warps"] == warps, case
