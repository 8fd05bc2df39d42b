"""Requests that wait, leave, fail or come when the server stops: none is stuck, and the others are drawn."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdiff.diffusion.shared_steps import Company
from fastdiff.engine import Engine
from fastdiff.errors import DeviceLostError, NonFiniteError
from fastdiff.execution.memory import OutOfMemoryError
from fastdiff.runs.drawing import Run
from fastdiff.serve import admission as admission_module
from fastdiff.serve.admission import Admission
from fastdiff.serve.orders.limits import Limits
from tests.serve.conftest import SMALL, error_of, raw, request_of, served_by, wait_until_empty
from tests.support.waiting import TIMEOUT, wait_for


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_a_full_queue_says_when_to_come_again(sd1, one_thread, gate, pool):
    with served_by(sd1, requests=1, queue=1) as served:
        first = [pool.submit(served.generate) for _ in range(2)]
        wait_for(lambda: served.studio.admission.here == 2)
        refused = served.generate()
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert (error_of(refused)["code"], error_of(refused)["type"]) == ("queue_full", "rate_limit_error")
        gate.open.set()
        assert [each.result(TIMEOUT).status_code for each in first] == [200, 200]
        wait_until_empty(served)
        assert served.generate().status_code == 200


def test_retry_after_is_the_measured_time_between_requests(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(admission_module.time, "monotonic", lambda: now[0])
    admission = Admission(Limits())
    assert admission.retry_after() == 1
    for _ in range(50):
        with admission.place(None):
            now[0] += 7
    assert admission.retry_after() == 7
    assert (admission.here, admission._streams) == (0, {})


def test_a_key_has_a_number_of_streams(sd1, one_thread, gate):
    with served_by(sd1, streams=1) as served:
        body = {"prompt": "a cat", "stream": True, **SMALL}
        with served.http.stream("POST", "/v1/images/generations", json=body) as stream:
            assert error_of(served.generate(stream=True))["code"] == "too_many_streams"
            gate.open.set()
            assert stream.read()
        wait_until_empty(served)
        assert served.generate(stream=True).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_place_back(served, gate, stream):
    body = json.dumps({"prompt": "a cat", "stream": stream, **SMALL}).encode()
    with raw(served) as connection:
        connection.sendall(request_of(body))
        assert gate.waits.wait(TIMEOUT)
        assert served.studio.admission.here == 1
    wait_until_empty(served)  # while its step is held
    gate.open.set()
    assert served.generate().status_code == 200


def test_a_request_ends_in_time(sd1, one_thread, gate):
    with served_by(sd1, seconds=0.01) as served:
        answer = served.generate()
        assert answer.status_code == 504 and error_of(answer)["code"] == "timeout"
        wait_until_empty(served)
        gate.open.set()


ERRORS = {
    "memory": (OutOfMemoryError("cpu: out of memory"), 503, "out_of_memory"),
    "nan": (NonFiniteError("the picture has NaN"), 500, "not_finite"),
    "device": (DeviceLostError("cuda:0: it failed"), 503, "device_lost"),
    "mistake": (KeyError("/secret/path"), 500, "internal_error"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error, status, code", ERRORS.values(), ids=ERRORS)
def test_a_failing_request_has_one_line_and_the_server_lives(served, monkeypatch, caplog, error, status, code, stream):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Company, "take", fail)
        answer = served.generate(stream=stream)
    if stream:
        kind, data = answer.text.strip().split("\n")
        found = json.loads(data.removeprefix("data: "))
        assert (kind, found["type"], found["error"]["code"]) == ("event: error", "error", code)
    else:
        assert answer.status_code == status and error_of(answer)["code"] == code
        assert (answer.headers.get("x-should-retry") == "false") == (code != "device_lost")
    assert "secret" not in answer.text
    assert ("secret" in caplog.text) == (code == "internal_error")
    assert served.generate().status_code == 200
    assert served.studio.admission.here == 0


def test_a_lost_device_is_told_to_the_process(sd1, one_thread, monkeypatch):
    def fail(*_):
        raise DeviceLostError("cuda:0: it failed")

    with served_by(sd1) as served:
        served.studio.loaded.result(TIMEOUT)
        monkeypatch.setattr(Company, "take", fail)
        assert served.generate().status_code == 503
        assert isinstance(served.studio.lost.result(TIMEOUT), DeviceLostError)


def test_a_draining_server_finishes_what_runs(sd1, one_thread, gate, pool):
    with served_by(sd1) as served:
        running = pool.submit(served.generate)
        wait_for(lambda: served.studio.admission.here == 1)
        assert served.server.drain(0) == 1
        assert error_of(served.generate())["code"] == "stopping"
        assert served.http.get("/ready").json() == {"status": "stopping"}
        gate.open.set()
        assert served.server.drain(TIMEOUT) == 0
        assert running.result(TIMEOUT).status_code == 200


def test_a_closing_server_answers_those_that_wait(sd1, one_thread, gate, pool, caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    with served_by(sd1, requests=1) as served:
        waiting = [pool.submit(served.generate) for _ in range(3)]
        wait_for(lambda: served.studio.admission.here == 3)
        wait_for(gate.waits.is_set)
        pool.submit(served.server.close)
        answers = [each.result(TIMEOUT) for each in waiting]
        assert {(each.status_code, error_of(each)["code"]) for each in answers} == {(503, "stopping")}
        gate.open.set()


def test_a_request_that_would_take_too_long(sd1, one_thread, monkeypatch):
    with served_by(sd1, minutes=1e-9) as served:
        error = error_of(served.generate(num_inference_steps=50))
        assert "this would take about" in error["message"] and "limit" in error["message"]


def test_a_server_that_loads_is_not_ready(sd1, one_thread, gate, pool):
    with served_by(sd1) as served:
        assert served.http.get("/ready").json() == {"status": "loading"}
        early = pool.submit(served.generate)
        gate.open.set()
        assert early.result(TIMEOUT).status_code == 200
        assert served.http.get("/ready").json() == {"status": "ready"}


def test_sizes_are_warmed(sd1, one_thread, monkeypatch):
    warmed = []
    monkeypatch.setattr(Engine, "warm", lambda engine, pipe, sizes, **options: warmed.append((sizes, options)))
    with served_by(sd1, warm=[(24, 16)]) as served:
        served.studio.loaded.result(TIMEOUT)
        assert warmed == [([(16, 24)], {"max_batch": 1})]
        assert served.http.get("/ready").status_code == 200


def test_batches_have_the_servers_size(served):
    from fastdiff.serve.orders.translation import order_of
    from fastdiff.serve.wire.fields import Generation

    run: Run = order_of(Generation(prompt="a", n=3), served.studio.offers, Limits()).run
    assert (run.batch_size, len(run.cells)) == (1, 3)  # on a CPU
