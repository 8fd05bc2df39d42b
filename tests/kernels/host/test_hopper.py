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

    @property
    def device(self):
        return CPU

    def check(self):
        pass

    def reference(self):
        return "reference"

    def library_reason(self):
        return self.library_is_faster

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


def test_what_is_confirmed_has_a_plan():
    plans = {plan.name for plan in attention.PLANS}
    assert len(plans) == len(attention.PLANS)
    plans |= {f"{plan.name}, {how}" for plan in attention.PLANS for how in ("causal", "masked")}
    pixels, channels = ("|".join(map(str, numbers)) for numbers in (conv2d.PIXELS, (*conv2d.DEPTHS, "more")))
    others = rf"linear \d+ to \d+|conv2d-(same|up|down)-({pixels})-({channels})(-shortcut)?"
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


@pytest.mark.parametrize("pairs", [1, 3, 8, 20, 512])
def test_tiles_cover_all_queries_and_end_no_later_than_full_ones(pairs):
    for blocks in (1, 2, 3, 4, 7, 18, 64, 129):
        full, small = attention._split(blocks, pairs, 132)
        assert 3 * full + 2 * small >= blocks
        assert attention._end(full * pairs, small * pairs, 132) <= attention._end(-(-blocks // 3) * pairs, 0, 132)


@pytest.mark.parametrize(
    ("tokens", "out_channels", "parts"),
    [(512, 4608, (128, 16)), (512, 3456, (128, 0)), (512, 1152, (32, 16)), (256, 1536, (32, 0)), (8192, 4608, None)],
)
def test_tiles_of_few_tokens_fill_the_card_in_one_wave(tokens, out_channels, parts):
    tiles = linear.cut(tokens, out_channels, 132)
    assert (tiles and tiles.parts) == parts
    assert tiles is None or 66 < tiles.programs <= 132


def test_channels_that_no_tile_divides_are_not_cut():
    assert linear.cut(64, 41, 132) is None


def test_gluon_is_for_sm_90_alone():
    assert gluon.obstacle(CPU) == "Gluon: the device is no sm_90"
