"""Engine: steps that nobody looks at follow each other without the request's thread."""

import threading
import time

import pytest
import torch

import fastdiff
from fastdiff.diffusion import shared_steps
from fastdiff.diffusion.loop import Loop
from fastdiff.diffusion.step import Step
from fastdiff.engine import outside_turn
from fastdiff.engine.request import Request
from fastdiff.execution.replaying.trees import map_tensors
from fastdiff.samplers.shared.from_config import scheduler_from_config
from tests.engine.requests import PROMPTS, WAIT, Held, Steps, assert_same, drawing

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def wakes(monkeypatch) -> list:
    """The requests that got their turn back."""
    woken, usual = [], Request.go_on
    monkeypatch.setattr(Request, "go_on", lambda request, *result: (woken.append(request), usual(request, *result)))
    return woken


@pytest.mark.parametrize("scheduler", ["ddim", "dpm++2m"])
def test_a_request_is_woken_when_all_its_steps_are_taken(pipe, scheduler, wakes):
    pipe = pipe.with_scheduler(scheduler_from_config(pipe.scheduler.config, scheduler))
    options = {"prompt": "a cat", "num_inference_steps": 6, "seed": 3, "height": 16, "width": 16}
    expected = pipe(**options)
    with drawing() as engine:
        assert_same(engine.submit(pipe, **options).result(), expected)
        unwatched = len(wakes)
        seen = []
        assert_same(engine.submit(pipe, on_step=lambda step: seen.append(step.index), **options).result(), expected)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert len(wakes) - unwatched == unwatched + 5


def test_a_guidance_interval_ends_where_it_ends(pipe, wakes):
    options = {"prompt": "a cat", "num_inference_steps": 6, "seed": 3, "height": 16, "width": 16, "guidance_stop": 0.5}
    expected = pipe(**options)
    with drawing() as engine:
        assert_same(engine.submit(pipe, **options).result(), expected)
    assert 3 < len(wakes) < 8  # the guided steps at once, then the rest at once, then the VAE


@pytest.mark.parametrize("scheduler", ["ddim", "dpm++2m", "euler-a"])
def test_moments_of_many_steps_are_those_of_each(scheduler, text_folder, monkeypatch):
    """Requests of different lengths join and leave, and their batches look ahead by one step or several."""
    pipe = fastdiff.Pipeline.from_pretrained(text_folder("sd1"), device="cpu", scheduler=scheduler)
    Steps(monkeypatch, as_graph=True)
    monkeypatch.setattr(Loop, "step_alone", Loop.step_as_graph)
    drawn = {}
    for ahead in (1, 3):
        monkeypatch.setattr(shared_steps, "AHEAD", ahead)
        with drawing() as engine:
            futures = [
                engine.submit(pipe, prompt=prompt, seed=i, num_inference_steps=3 + 2 * i, output_type="latent")
                for i, prompt in enumerate(PROMPTS)
            ]
        drawn[ahead] = [future.result().images for future in futures]
    for one, other in zip(drawn[1], drawn[3], strict=True):
        assert torch.equal(one, other)


def test_a_graph_gets_contiguous_tensors(pipe, monkeypatch):
    """Kernels read the inputs of a graph that is not captured yet."""
    Steps(monkeypatch, as_graph=True)
    monkeypatch.setattr(Loop, "step_alone", Loop.step_as_graph)
    given, usual = [], Step.__call__

    def recorded(step, *inputs):
        map_tensors(given.append, inputs)
        return usual(step, *inputs)

    monkeypatch.setattr(Step, "__call__", recorded)
    pipe.denoiser.use_graphs = False
    with drawing() as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.submit(pipe, prompt=prompt, seed=i, num_inference_steps=3)
    pipe.denoiser.use_graphs = True
    assert given and all(each.is_contiguous() for each in given)


class Block:
    """Records the steps that follow each other at once, and calls a function in the second step of all."""

    def __init__(self, monkeypatch, act):
        self.count, self.lengths = 0, []
        take, usual = shared_steps._Batch.take, shared_steps._Batch._take

        def counted(batch, *args, **how):
            self.count += 1
            if self.count == 2:
                act()
            usual(batch, *args, **how)

        def block(batch, *args):
            made = take(batch, *args)
            self.lengths.append(made[0].steps)
            return made

        monkeypatch.setattr(shared_steps._Batch, "_take", counted)
        monkeypatch.setattr(shared_steps._Batch, "take", block)
        Steps(monkeypatch, as_graph=True)


OPTIONS = {"prompt": "a cat", "num_inference_steps": 6, "height": 16, "width": 16, "output_type": "latent"}


def test_steps_follow_at_once_while_nobody_comes(pipe, monkeypatch):
    block = Block(monkeypatch, lambda: None)
    with drawing() as engine:
        engine.submit(pipe, **OPTIONS).result()
    assert block.lengths == [6]


@pytest.mark.parametrize(("room", "lengths"), [(2, [2, 4]), (1, [6, 6])])
def test_who_comes_joins_at_the_next_step_if_there_is_room(pipe, monkeypatch, room, lengths):
    futures = []
    block = Block(monkeypatch, lambda: futures.append(engine.submit(pipe, **OPTIONS)))
    with drawing(max_requests=room) as engine:
        engine.submit(pipe, **OPTIONS).result()
        futures[0].result()
    assert block.lengths[:2] == lengths


def test_a_cancelled_request_ends_its_block(pipe, monkeypatch):
    block = Block(monkeypatch, lambda: future.cancel())
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1, output_type="latent")
        future = engine.submit(pipe, **OPTIONS)
        held.gate.set()
    assert future.cancelled() and block.count == 2


def test_a_request_that_returns_has_its_turn_before_the_next_step(pipe, monkeypatch):
    outside, gate = threading.Event(), threading.Event()

    def leave() -> None:
        with outside_turn():
            outside.set()
            assert gate.wait(WAIT)

    def come_back() -> None:
        gate.set()
        while not any(each.returns for each in engine._active):
            time.sleep(0.001)

    block = Block(monkeypatch, come_back)
    with drawing() as engine:
        engine.call(pipe, leave)
        assert outside.wait(WAIT)
        engine.submit(pipe, **OPTIONS).result()
    assert block.lengths == [2, 4]


def test_requests_of_other_sizes_take_turns(pipe, monkeypatch):
    block = Block(monkeypatch, lambda: None)
    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1, output_type="latent")
        for height in (16, 32):
            engine.submit(pipe, **OPTIONS | {"height": height, "num_inference_steps": 3})
        held.gate.set()
    assert block.lengths[-6:] == [1, 1, 1, 1, 1, 1]
