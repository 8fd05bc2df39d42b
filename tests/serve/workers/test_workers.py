"""Worker processes draw what one process draws. Errors and cancellations pass the pipe. The tests share two workers."""

import json

import pytest

from tests.serve.conftest import SMALL, error_of, pictures_of, raw, request_of, served_by, wait_until_empty
from tests.serve.test_generations import FIELDS, FLAGS, sampled
from tests.serve.test_metrics import metrics_of
from tests.serve.workers.conftest import events_of, kill, pids, tasks_of, workers_of
from tests.support.waiting import TIMEOUT, wait_for


def test_files_are_the_commands_byte_for_byte(served, sd1, tmp_path, monkeypatch, pool):
    monkeypatch.chdir(sd1.parent)
    expected = sampled(tmp_path, sd1, "--num-images", "2", *FLAGS)
    answers = [each.result(TIMEOUT) for each in [pool.submit(served.generate, n=2, **FIELDS) for _ in range(4)]]
    assert [pictures_of(answer) for answer in answers] == [expected] * 4
    assert answers[0].json()["data"][1]["settings"]["model"] == sd1.name


def test_uploads_and_streams_pass_the_pipe(served, sd1, png):
    fields = {"strength": 0.9, "num_inference_steps": 4, "stream": "true", "partial_images": 2}
    with served_by(sd1) as alone:
        answers = [each.edit({"image": ("../a cat.png", png())}, **fields) for each in (served, alone)]
    first, second = (events_of(answer.text) for answer in answers)
    assert [each["type"].rpartition(".")[2] for each in first] == ["partial_image"] * 2 + ["completed"]
    for event in (*first, *second):
        del event["created_at"]
    assert first == second and first[-1]["settings"]["init_image"] == "a cat.png"


def test_requests_go_to_the_worker_with_the_least_work(served, faults, pool):
    before = metrics_of(served)
    faults.hold()
    large = pool.submit(served.generate, size="32x32")
    assert len(faults.held(1)) == 1
    small = [pool.submit(served.generate) for _ in range(2)]
    assert sorted(faults.held(2)) == sorted(pids(served))
    wait_for(lambda: metrics_of(served)["fastdiff_running",] + metrics_of(served)["fastdiff_queue_length",] == 3)
    assert sorted(len(worker.tasks) for worker in workers_of(served)) == [1, 2], "the large one is alone"
    faults.release()
    assert [each.result(TIMEOUT).status_code for each in (large, *small)] == [200] * 3
    wait_until_empty(served)
    after = metrics_of(served)
    drawn = after["fastdiff_step_pictures_total",] - before["fastdiff_step_pictures_total",]
    assert drawn == 9, "the default sampler takes three for two steps"
    assert after["fastdiff_workers",] == 2 and after["fastdiff_memory_bytes", "process"] > 3 * 2**26
    assert after["fastdiff_queue_length",] == after["fastdiff_running",] == 0


def test_a_lost_client_ends_its_request_before_the_next_step(served, faults):
    before = served.studio.drawer.counts().steps
    faults.hold()
    with raw(served) as connection:
        connection.sendall(request_of(json.dumps({"prompt": "a cat", **SMALL, "num_inference_steps": 90}).encode()))
        faults.held()
    wait_until_empty(served)
    assert served.studio.drawer.counts().steps == before  # and the cancellation came before this question
    faults.release()
    assert served.generate(num_inference_steps=1).status_code == 200
    wait_for(lambda: not tasks_of(served))
    assert served.studio.drawer.counts().steps - before <= 3, "the held step, and one request"


LONG = {"num_inference_steps": 8, "stream": True, "partial_images": 2, "n": 2}
ERRORS = {
    "input": (400, "invalid_value", "strength: 7 is too much; use 1"),
    "memory": (503, "out_of_memory", "out of memory; ask for fewer pictures or a smaller size"),
    "nan": (500, "not_finite", "the picture has NaN"),
    "mistake": (500, "internal_error", "the request failed; the server's log has the reason"),
    "not-picklable": (500, "internal_error", "the request failed; the server's log has the reason"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_one_process(served, faults, caplog, name):
    status, code, message = ERRORS[name]
    faults.fail(name)
    answer = served.generate()
    faults.fail(None)
    assert (answer.status_code, error_of(answer)["code"], error_of(answer)["message"]) == (status, code, message)
    assert ("in faulty" in caplog.text) == (code == "internal_error"), "the worker's traceback is in the server's log"
    assert served.generate().status_code == 200


def test_a_killed_workers_requests_are_drawn_again(both_ready, faults, pool, caplog):
    served = both_ready
    expected = without_times(served.generate(**LONG).text)
    plain = pictures_of(served.generate(seed=3))
    steps = metrics_of(served)["fastdiff_steps_total",]
    faults.hold(after=6)
    stream = pool.submit(served.generate, **LONG)
    (pid,) = faults.held(1)
    others = [pool.submit(served.generate, seed=3) for _ in range(4)]
    wait_for(lambda: served.studio.admission.here == 5)
    kill(pid)
    wait_for(lambda: pid not in pids(served))
    faults.release()
    assert without_times(stream.result(TIMEOUT).text) == expected, "no partial picture comes twice"
    assert [pictures_of(each.result(TIMEOUT)) for each in others] == [plain] * 4
    wait_until_empty(served)
    found = metrics_of(served)
    assert found["fastdiff_worker_restarts_total",] == 1 and found["fastdiff_steps_total",] >= steps
    assert "died: signal 9. Another one starts" in caplog.text


def without_times(text: str) -> list[dict]:
    """Return the events of a stream without the time of each."""
    return [{name: value for name, value in event.items() if name != "created_at"} for event in events_of(text)]
