"""Kernels made for sm_90 alone: taken where they are confirmed, and a report says why not where they are not."""

import re
from dataclasses import dataclass

import pytest
import torch

from fastdiff.kernels.host import dispatch
from fastdiff.kernels.host.dispatch import Call, Operation
from fastdiff.kernels.host.hopper import attention, conv2d, gluon, linear
from fastdiff.kernels.host.recording import because, record

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Way(Call[str]):
    """Returns the way it ran."""

    plan: str | None = "measured"
    obstacle_of_hopper: str | None = None
    library_is_faster: str | None = None
    than_all: bool = False

    @property
    def device(self):
        return CPU

    def check(self):
        pass

    def reference(self):
        return "reference"

    def library_reason(self):
        return self.library_is_faster

    def library_is_fastest(self):
        return self.than_all

    def library(self):
        return "library"

    def kernel(self):
        because("8 tokens a tile")
        return "kernel"

    def hopper_plan(self):
        return self.plan

    def hopper_obstacle(self):
        return self.obstacle_of_hopper

    def hopper(self):
        because("made for sm_90")
        return "hopper"


way = Operation("way", Way)


@pytest.fixture
def on_sm_90(monkeypatch):
    monkeypatch.setattr(dispatch, "_unavailable", lambda device: None)
    monkeypatch.setattr(dispatch, "is_sm_90", lambda device: True)
    monkeypatch.setattr(gluon, "CONFIRMED", frozenset({"measured"}))


@pytest.mark.parametrize(
    ("options", "taken", "why"),
    [
        pytest.param({}, "hopper", "made for sm_90", id="confirmed"),
        pytest.param({"library_is_faster": "slow"}, "hopper", "made for sm_90", id="before-the-library"),
        pytest.param({"library_is_faster": "slow", "than_all": True}, "library", "slow", id="behind-the-library"),
        pytest.param({"plan": "another"}, "kernel", "8 tokens a tile", id="not-confirmed"),
        pytest.param({"plan": None}, "kernel", "8 tokens a tile", id="no-plan"),
        pytest.param(
            {"obstacle_of_hopper": "triton 4.0"},
            "kernel",
            "8 tokens a tile; not as measured: triton 4.0",
            id="obstacle",
        ),
        pytest.param(
            {"obstacle_of_hopper": "triton 4.0", "library_is_faster": "slow"},
            "library",
            "slow; not as measured: triton 4.0",
            id="obstacle-and-library",
        ),
    ],
)
def test_the_way_and_why(on_sm_90, options, taken, why):
    with record(CPU) as recorded:
        assert way(**options) == taken
    assert recorded.calls[0].why == why


def test_other_cards_take_none_of_them_and_say_nothing_of_it(on_sm_90, monkeypatch):
    monkeypatch.setattr(dispatch, "is_sm_90", lambda device: False)
    with record(CPU) as recorded:
        assert way() == "kernel"
    assert recorded.calls[0].why == "8 tokens a tile"


@pytest.mark.parametrize(
    ("version", "said"),
    [("3.6.0", None), ("3.60.0", "not known to work in triton 3.60.0"), ("4.0.0", "not known to work in triton 4.0.0")],
)
def test_gluon_runs_in_versions_of_triton_that_are_known(monkeypatch, version, said):
    triton = pytest.importorskip("triton", reason="no Triton here")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(gluon, "is_sm_90", lambda device: True)
    assert gluon.obstacle(CPU) == (said and f"Gluon: {said}")


def test_a_plan_can_be_disabled_for_one_version_of_triton(on_sm_90, monkeypatch):
    triton = pytest.importorskip("triton", reason="no Triton here")
    monkeypatch.setattr(gluon, "VERSIONS", ((3, 6), (3, 7)))
    monkeypatch.setattr(gluon, "DISABLED", {(3, 7): frozenset({"measured"})})
    taken = []
    for version in ("3.6.0", "3.7.1", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        taken.append(way())
    assert taken == ["hopper", "kernel", "hopper"]  # what says no in an unknown version is the obstacle of each kernel


def test_what_is_disabled_is_confirmed_elsewhere():
    assert gluon.DISABLED.keys() <= set(gluon.VERSIONS)
    assert all(plans <= gluon.CONFIRMED for plans in gluon.DISABLED.values())


def test_what_is_confirmed_has_a_plan():
    plans = {plan.name for plan in attention.PLANS}
    assert len(plans) == len(attention.PLANS)
    plans |= {f"{plan.name}, {how}" for plan in attention.PLANS for how in ("causal", "masked")}
    pixels, channels = ("|".join(map(str, numbers)) for numbers in (conv2d.PIXELS, (*conv2d.DEPTHS, "more")))
    convolutions = rf"conv2d-(same|up|down)-({pixels})-({channels})(-shortcut)?(, fp8|, int8)?"
    others = rf"{convolutions}|(linear|swiglu|geglu) \d+ to \d+(, residual)?(, fp8|, int8)?"
    assert all(name in plans or re.fullmatch(others, name) for name in gluon.CONFIRMED)


@pytest.mark.parametrize("width", range(8, 257, 8))
def test_a_block_of_keys_follows_from_width_and_keys(width):
    """Also where a plan has tiles for few queries."""
    for keys in (1, 64, 77, 80, 81, 256, 257, 1023, 1024, 8192, 8193, 10**6):
        plan = attention.plan_of(width, keys)
        if plan is not None and plan.few is not None:
            assert plan.few.keys == plan.tiles.keys
        if plan is not None and isinstance(plan.tiles, attention.Tiles):
            assert sum(plan.tiles.parts) >= width


def test_a_plan_begins_and_ends_with_the_keys_that_were_measured():
    for width, by_keys in {
        24: {64: None, 1024: None},
        32: {64: "to 64 keys", 65: "to 80 keys", 81: "to 256 keys, heads of 32", 256: "to 256 keys, heads of 32",
             257: None, 1023: None, 1024: "to 8192 keys, heads of 48"},
        64: {80: "to 80 keys", 81: None, 1023: None, 1024: "to 8192 keys, heads of 64",
             8192: "to 8192 keys, heads of 64", 8193: "to more keys, heads of 64"},
        256: {256: "to 256 keys, heads of 256", 257: None},
    }.items():  # fmt: skip
        for keys, name in by_keys.items():
            plan = attention.plan_of(width, keys)
            assert (plan and plan.name) == (name and f"attention {name}"), (width, keys)


@pytest.mark.parametrize("pairs", [1, 3, 8, 20, 512])
def test_tiles_cover_all_queries_and_end_no_later_than_full_ones(pairs):
    for blocks in (1, 2, 3, 4, 7, 18, 64, 129):
        full, small = attention._split(blocks, pairs, 132)
        assert 3 * full + 2 * small >= blocks
        assert attention._end(full * pairs, small * pairs, 132) <= attention._end(-(-blocks // 3) * pairs, 0, 132)


@pytest.mark.parametrize(
    ("tokens", "out_channels", "parts", "turns"),
    [
        pytest.param(512, 4608, (128, 16), False, id="fc1"),
        pytest.param(512, 3456, (128, 0), False, id="qkv"),
        pytest.param(2048, 1280, (128, 32), False, id="one-wave"),
        pytest.param(8192, 4608, (128, 64), True, id="many"),
    ],
)
def test_tiles_of_a_product_share_out_the_card(tokens, out_channels, parts, turns):
    tiles = linear.cut(tokens, out_channels, 132)
    assert (tiles.parts, tiles.turns) == (parts, turns)
    assert tiles.turns or 66 < tiles.number <= 132


@pytest.mark.parametrize(
    ("tokens", "out_channels", "dual", "parts", "turns"),
    [
        pytest.param(2048, 1280, False, (128, 32), False, id="one-wave"),
        pytest.param(2048, 3840, False, (128, 128), False, id="two-waves"),
        pytest.param(8192, 1920, False, (128, 0), True, id="many"),
        pytest.param(512, 3456, True, (128, 128), False, id="two-products"),
        pytest.param(2048, 5120, True, (128, 0), True, id="many-of-two-products"),
    ],
)
def test_tiles_in_fp8_are_of_both_warpgroups_but_where_there_are_many(tokens, out_channels, dual, parts, turns):
    tiles = linear.cut(tokens, out_channels, 132, dual=dual, fp8=True)
    assert (tiles.parts, tiles.turns) == (parts, turns)
    assert not turns or tiles.number >= 2 * 132


@pytest.mark.parametrize(
    ("tokens", "out_channels", "dual"), [(1, 4608, False), (512, 1152, False), (256, 1536, False), (128, 5120, True)]
)
def test_few_tokens_are_for_the_kernel_of_all_cards(tokens, out_channels, dual):
    assert linear.cut(tokens, out_channels, 132, dual=dual) is None


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("dual", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("tokens", [500, 4096, 10**5])
@pytest.mark.parametrize("out_channels", [3000, 10240])
def test_tiles_cover_a_product_and_its_steps_fit(tokens, out_channels, dual, fp8):
    tiles = linear.cut(tokens, out_channels, 132, dual=dual, fp8=fp8)
    width = sum(tiles.parts) // (1 + dual)
    assert (tiles.down - 1) * 128 < tokens <= tiles.down * 128
    assert (tiles.across - 1) * width < out_channels <= tiles.across * width
    assert 3 <= tiles.stages <= linear.STAGES


def test_gluon_is_for_sm_90_alone():
    assert gluon.obstacle(CPU) == "Gluon: the device is no sm_90"


def test_products_are_of_rows_aligned_to_16_bytes():
    aligned, unaligned = "Gluon: the device is no sm_90", "rows are not side by side or aligned to 16 bytes"
    for channels, out_channels, reason in ((16, 24, aligned), (12, 24, unaligned), (16, 12, unaligned)):
        x, weight = torch.zeros(1, 2, channels).half(), torch.zeros(out_channels, channels).half()
        assert linear.obstacle(x, weight, out_channels) == reason, (channels, out_channels)
