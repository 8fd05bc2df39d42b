"""Launches on a card that is not there, noted instead of compiled."""

import inspect
import os

import pytest
import torch

from fastdiff.requests.request import Request
from fastdiff.runs.drawing import find_model
from fastdiff.warming import drawing
from fastdiff.warming.card import CARDS, pretended


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    pytest.importorskip("triton", reason="no Triton here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has no compiler")


@pytest.fixture
def launched(monkeypatch):
    """`launched(folder, card, batch, **request)` draws with ghosts. It returns the kernels and the arguments."""
    from triton.runtime.jit import JITFunction

    assert {"grid", "warmup"} <= set(inspect.signature(JITFunction.run).parameters)

    def draw(folder, card="sm_90", batch=1, **request):
        found: list[tuple] = []
        monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: found.append((kernel, args, kwargs)))
        asked = Request(model=str(folder), num_inference_steps=4, **request)
        model = find_model(asked)
        with pretended(CARDS[card]):
            pipe = drawing.load(model, asked)
            for run in drawing.runs(asked, model, batch):
                drawing.draw(pipe, run)
        assert not torch.cuda.is_initialized()
        return found

    return draw
