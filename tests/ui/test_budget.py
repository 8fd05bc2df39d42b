"""The time limit of a request: estimated from measured steps, and enforced during the run."""

from types import SimpleNamespace

import pytest

from fastdiff.errors import InputError
from fastdiff.hosting.budget import Budget


def run_of(pictures: int, steps: int, side: int = 64, precision: str = "full"):
    return SimpleNamespace(
        card=SimpleNamespace(source="a"),
        cells=range(pictures),
        request=SimpleNamespace(num_inference_steps=steps, precision=precision, control=(), ip_adapter=()),
        size=(side, side),
    )


def progresses(run, seconds: float, others: float = 0.0):
    """Yield the progress of a run whose steps take `seconds`, after a first step that takes ten times as long.

    others: seconds that it waits at each step for runs that it shares steps with.
    """
    steps = run.request.num_inference_steps
    for place in run.cells:
        for index in range(steps):
            done = place * steps + index + 1
            yield SimpleNamespace(
                run=run, places=range(place, place + 1), seconds=(done + 9) * seconds + done * others,
                fraction=done / (steps * len(run.cells)), waited=done * others,
            )  # fmt: skip


def test_a_run_within_the_budget_is_drawn_and_measured():
    budget = Budget(1)
    assert len(list(budget.watch(progresses(run_of(2, 10), 1)))) == 20
    budget.check(run_of(2, 30))
    with pytest.raises(InputError, match=r"this would take about 2 minutes, and the limit is 60 seconds per request"):
        budget.check(run_of(2, 61))


def test_larger_pictures_take_at_least_as_long_and_of_smaller_ones_nothing_is_known():
    budget = Budget(1)
    list(budget.watch(progresses(run_of(2, 10), 1)))
    budget.check(run_of(2, 61, side=32))
    budget.check(run_of(2, 61, precision="int8"))  # nor for other weights
    with pytest.raises(InputError, match="2 minutes"):
        budget.check(run_of(2, 61, side=128))


def test_a_run_that_shows_to_be_too_long_ends_after_two_steps():
    drawn = []
    with pytest.raises(InputError, match="this would take about 7 minutes"):
        for progress in Budget(1).watch(progresses(run_of(4, 100), 1)):
            drawn.append(progress)
    assert len(drawn) == 2


def test_waiting_for_other_runs_does_not_count():
    budget = Budget(1)
    assert len(list(budget.watch(progresses(run_of(2, 10), 1, others=100)))) == 20
    budget.check(run_of(2, 30))
    with pytest.raises(InputError, match="2 minutes"):
        budget.check(run_of(2, 61))


def test_without_a_limit_nothing_is_refused():
    budget = Budget()
    list(budget.watch(progresses(run_of(4, 100), 1000)))
    budget.check(run_of(50, 1000))


def test_the_page_and_the_api_refuse_with_the_estimate(visit, shared, monkeypatch):
    page = visit()
    event = page.event("generate", "click")
    assert "Drew" in page.draw(Steps=3)
    monkeypatch.setattr(shared.budget, "minutes", 1e-4)
    refused = page.call(event, page.inputs(event, Steps=500))
    assert "this would take about" in str(refused["output"])
    data = ["emoji64", None, 0, 32, 500, *[None] * 9]
    call = page.http.post("/gradio_api/call/generate", json={"data": data}).json()
    result = page.http.get(f"/gradio_api/call/generate/{call['event_id']}").text
    assert "and the limit is 0 seconds per request; choose fewer pictures or steps" in result
