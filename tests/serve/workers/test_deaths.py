"""Workers that die again, lose their device, or never load."""

import logging
from concurrent.futures import CancelledError

import pytest

from fastdiff.errors import InputError
from tests.serve.conftest import error_of, pictures_of
from tests.serve.test_metrics import metrics_of
from tests.serve.workers.conftest import kill, pids, served_by_workers, workers_of
from tests.serve.workers.faults import DEATH
from tests.support.waiting import TIMEOUT, wait_for

pytestmark = pytest.mark.slow  # each starts processes


def test_a_request_of_two_dead_workers_fails(both_ready, faults, pool):
    served = both_ready
    faults.hold()
    answer = pool.submit(served.generate)
    (first,) = faults.held()
    kill(first)
    wait_for(lambda: first not in pids(served))
    (second,) = faults.held()
    kill(second)
    answer = answer.result(TIMEOUT)
    assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
    assert error_of(answer)["code"] == "workers_died"
    assert error_of(answer)["message"].startswith("2 worker processes ended while they had this request; ask for")
    faults.release()
    assert served.generate().status_code == 200  # it waits for a successor


def test_a_worker_that_loses_its_device_is_replaced(both_ready, faults, caplog):
    served, before = both_ready, pids(both_ready)
    restarts = metrics_of(served)["fastdiff_worker_restarts_total",]
    expected = pictures_of(served.generate())
    faults.fail("device", before[0])  # the first of two idle workers gets the request
    assert pictures_of(served.generate()) == expected
    faults.fail(None)
    wait_for(lambda: before[0] not in pids(served) and all(each.is_loaded for each in workers_of(served)))
    assert before[1] in pids(served) and not served.studio.lost.done()
    assert metrics_of(served)["fastdiff_worker_restarts_total",] == restarts + 1
    assert "worker 0 died: cuda:0: it failed." in caplog.text


def test_a_successor_that_cannot_load_ends_the_server(sd1, one_thread, faults):
    with served_by_workers(sd1, 1) as served:
        served.studio.loaded.result(TIMEOUT)
        faults.fail(DEATH)
        kill(*pids(served))
        error = served.studio.lost.result(TIMEOUT)
        faults.fail(None)
    assert isinstance(error, OSError) and str(error) == "worker 0 died while it loaded the models: exit code 3"


def test_a_model_that_cannot_be_loaded_ends_the_server(sd1, one_thread, faults):
    faults.fail("input")
    with served_by_workers(sd1, 2) as served, pytest.raises(InputError, match="strength: 7 is too much"):
        served.studio.loaded.result(TIMEOUT)
    faults.fail(None)


def test_a_closing_server_answers_those_that_wait(sd1, one_thread, faults, pool, caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    with served_by_workers(sd1, 1, requests=1) as served:
        served.studio.loaded.result(TIMEOUT)
        faults.hold()
        waiting = [pool.submit(served.generate) for _ in range(3)]
        wait_for(lambda: served.studio.admission.here == 3 and faults.held())
        assert len(workers_of(served)[0].tasks) == 1, "the others wait for any worker"
        assert served.server.close()
        answers = [each.result(TIMEOUT) for each in waiting]
        assert {(each.status_code, error_of(each)["code"]) for each in answers} == {(503, "stopping")}
    faults.release()


def test_a_server_that_closes_early_leaves_no_worker(sd1, one_thread, faults):
    with served_by_workers(sd1, 1) as served:
        wait_for(lambda: workers_of(served))
    with pytest.raises(Exception, match="the server stops"):
        served.studio.loaded.result(TIMEOUT)
    assert not isinstance(served.studio.loaded.exception(), CancelledError)
