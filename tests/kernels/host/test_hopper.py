"""Kernels made for sm_90 alone: taken where they are confirmed, and a report says why not where they are not."""

from dataclasses import dataclass

import pytest
import torch

from fastdiff.kernels.host import dispatch
from fastdiff.kernels.host.dispatch import Call, Operation
from fastdiff.kernels.host.hopper import gluon
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


def test_gluon_is_for_sm_90_alone():
    assert gluon.obstacle(CPU) == "Gluon: the device is no sm_90"
