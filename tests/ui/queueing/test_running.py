"""The status line and the list of runs."""

from fastdiff.ui.queueing.queue import Job, State
from fastdiff.ui.queueing.running import status_of


def test_the_status_lines_of_two_runs_differ_also_with_the_same_words():
    jobs = [Job("owner", "Draw", "a cat", iter(()), state=State.DONE) for _ in range(2)]
    first, second = (status_of(job, lambda job: "Drew 1 picture in 0.0 s") for job in jobs)
    assert first != second and "Drew 1 picture in 0.0 s" in first
