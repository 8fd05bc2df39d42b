"""The metrics count what happened."""

from concurrent.futures import ThreadPoolExecutor

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.conftest import served_by, wait_until_empty
from tests.support.waiting import wait_for


def metrics_of(served) -> dict[tuple[str, ...], float]:
    """Return the samples by their names and the values of their labels."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_metrics(sd1, one_thread, gate):
    with served_by(sd1, requests=1, queue=1) as served, ThreadPoolExecutor(2) as pool:
        gate.open.set()
        assert served.generate(n=3).status_code == 200
        served.generate(n=0)
        wait_until_empty(served)
        gate.open.clear()
        waiting = [pool.submit(served.generate) for _ in range(2)]
        wait_for(lambda: metrics_of(served)["fastdiff_running",] == 1)
        wait_for(lambda: metrics_of(served)["fastdiff_queue_length",])
        assert metrics_of(served)["fastdiff_queue_length",] == metrics_of(served)["fastdiff_running",] == 1
        first, second = metrics_of(served), metrics_of(served)
        assert 0 < first["fastdiff_queue_age_seconds",] < second["fastdiff_queue_age_seconds",]
        assert served.generate().status_code == 429
        gate.open.set()
        assert [each.result().status_code for each in waiting] == [200, 200]
        wait_until_empty(served)
        found = metrics_of(served)
    assert found["fastdiff_pictures_total", sd1.name] == 5
    assert (
        found["fastdiff_errors_total", "invalid_value", "400"]
        == found["fastdiff_errors_total", "queue_full", "429"]
        == 1
    )
    assert found["fastdiff_request_seconds_count",] == 3
    assert found["fastdiff_steps_total",] == found["fastdiff_step_pictures_total",] >= 15
    assert found["fastdiff_step_rows_total",] >= found["fastdiff_step_pictures_total",]
    assert found["fastdiff_step_seconds_total",] > 0
    assert found["fastdiff_queue_length",] == found["fastdiff_queue_age_seconds",] == found["fastdiff_running",] == 0
    assert found["fastdiff_memory_bytes", "process"] > 2**20
