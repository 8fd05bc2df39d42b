"""Engine for a server: warm graphs, numbers for its metrics, and an end that waits only so long."""

import threading
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from fastdiff import InputError
from fastdiff.engine.warming import short_requests
from tests.engine.requests import WAIT, Held, close, drawing
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")


def test_warming_draws_every_size_guided_and_not(pipe):
    with drawing() as engine:
        engine.warm(pipe, [(16, 16), (16, 24)], max_batch=3, negative_prompt="a cat")
        stats = engine.stats()
    assert (stats.steps, stats.pictures) == (2 * 2 * 3 * 2, 2 * 2 * (1 + 2 + 4) * 2)


def test_models_keep_the_graphs_of_all_warm_sizes():
    """A pipeline without labels is not guided."""
    model = SimpleNamespace(most_graphs=8, config=SimpleNamespace(label_table=None))
    pipe = SimpleNamespace(models=[model], denoiser=model, reads_text=False)
    asked = list(short_requests(pipe, [(8, 8), (8, 16)], 16, {"eta": 0.5}))
    assert model.most_graphs == 10
    assert [each["batch_size"] for each in asked] == [1, 2, 4, 8, 16] * 2
    assert {each["guidance_scale"] for each in asked} == {1.0} and all(each["eta"] == 0.5 for each in asked)


@pytest.mark.parametrize("sizes", [[], [(16,)], 512, [(0, 16)]])
def test_wrong_sizes_are_named(pipe, sizes):
    with drawing() as engine, pytest.raises(InputError, match="sizes"):
        engine.warm(pipe, sizes)


def test_the_numbers_of_an_engine(pipe):
    with drawing(max_requests=1) as engine:
        held = Held(engine, pipe, num_inference_steps=2, batch_size=3)
        futures = [engine.submit(pipe, prompt="a cat", num_inference_steps=2) for _ in range(2)]
        now = engine.stats()
        assert (now.queued, now.active, now.steps) == (2, 1, 1)
        wait_for(lambda: engine.stats().oldest_seconds > now.oldest_seconds >= 0)
        held.gate.set()
        wait(futures)
    end = engine.stats()
    assert (end.queued, end.oldest_seconds, end.active, end.decodes) == (0, 0.0, 0, 3)
    assert (end.steps, end.pictures, end.rows) == (6, 10, 12)
    assert end.step_seconds > 0


def test_a_request_that_is_cancelled_leaves_the_queue_at_once(pipe):
    with drawing(max_requests=1) as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        futures = [engine.submit(pipe, prompt="a cat", num_inference_steps=1) for _ in range(2)]
        futures[0].cancel()
        assert engine.stats().queued == 1
        assert wait(futures[:1], WAIT).done
        held.gate.set()
    assert futures[1].result()


def test_an_engine_that_closes_waits_so_long_and_cancels_the_rest(pipe):
    with drawing(max_requests=1) as engine:
        held = Held(engine, pipe, num_inference_steps=3)
        queued = engine.submit(pipe, prompt="a cat", num_inference_steps=3)
        queued.add_done_callback(lambda _: held.gate.set())  # cancelled by `close`
        close(engine, drain=0.01)
    assert queued.cancelled() and held.future.cancelled()


def test_an_engine_that_closes_ends_what_it_can_in_time(pipe):
    with drawing() as engine:
        futures = [engine.submit(pipe, prompt="a cat", num_inference_steps=3) for _ in range(2)]
        close(engine, drain=WAIT)
    assert all(future.result(0) for future in futures)


@pytest.mark.parametrize("drain", [-1, "soon", float("nan")])
def test_a_wrong_time_is_named(drain):
    with drawing() as engine, pytest.raises(InputError, match="drain"):
        engine.close(drain=drain)


def test_a_request_without_a_thread_fails_alone(pipe, monkeypatch):
    usual = threading.Thread.start

    def start(thread):
        if thread.name == "fastdiff-request":
            raise RuntimeError("can't start new thread")
        usual(thread)

    with drawing() as engine:
        held = Held(engine, pipe, num_inference_steps=1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            future = engine.submit(pipe, prompt="a cat")
            held.gate.set()
            with pytest.raises(RuntimeError, match="can't start"):
                future.result(WAIT)
        assert engine.submit(pipe, prompt="a cat", num_inference_steps=1).result(WAIT)
