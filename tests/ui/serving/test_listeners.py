"""Abandoned and cancelled jobs end; jobs with a listener go on."""

import pytest

from fastdiff.ui.serving import listeners

DATA = ["emoji64", None, 0, 8, 3, *[None] * 5, 1, *[None] * 3]  # 8 pictures of 3 steps, one after the other


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(listeners, "PATIENCE", 1.5)


@pytest.mark.slow
def test_a_call_without_a_listener_ends_and_lets_the_next_one_in(visit, slow_steps, one_place):
    page, other = visit(), visit()
    assert page.http.post("/gradio_api/call/generate", json={"data": DATA}).status_code == 200
    assert "Drew 1 picture" in other.draw(Steps=2, Pictures=1)
    assert 2 <= len(slow_steps) < 2 + 12, "at most some of the first, all of the second"


@pytest.mark.slow
def test_a_job_that_is_listened_to_goes_on(visit, slow_steps):
    page = visit()
    event_id = page.http.post("/gradio_api/call/generate", json={"data": DATA}).json()["event_id"]
    assert "event: complete" in page.http.get(f"/gradio_api/call/generate/{event_id}").text
    assert "Drew 1 picture" in page.draw(Steps=12)
    assert len(slow_steps) == 8 * 3 + 12
