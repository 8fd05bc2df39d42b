"""A bar in a terminal, and lines elsewhere."""

from contextlib import closing

import pytest

from fastdiff.runs import progress


@pytest.fixture
def clock(monkeypatch):
    """Sets the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    return lambda seconds: now.__setitem__(0, 1000.0 + seconds)


def test_a_log_has_a_line_every_ten_seconds(clock, capsys):
    with closing(progress.show(100, "pictures", initial=20)) as bar:
        for seconds in range(1, 31):
            clock(seconds)
            bar.update(1.5)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "fastdiff: 35.0 of 100 pictures, 1.5 pictures/s, 00:43 left",
        "fastdiff: 50.0 of 100 pictures, 1.5 pictures/s, 00:33 left",
        "fastdiff: 65.0 of 100 pictures, 1.5 pictures/s, 00:23 left",
    ]


def test_nothing_is_done_at_first(clock, capsys):
    bar = progress.show(4, "pictures")
    clock(10)
    bar.update(0)
    assert capsys.readouterr().err == "fastdiff: 0.0 of 4 pictures\n"
    clock(20)
    bar.update(4)
    assert capsys.readouterr().err == "", "the caller says the end"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_has_a_bar(monkeypatch, capsys, quiet):
    monkeypatch.setattr(progress, "in_terminal", lambda: True)
    with closing(progress.show(2, "pictures", quiet=quiet)) as bar:
        bar.update(2)
    assert ("2.0/2 pictures [" in capsys.readouterr().err) is not quiet


def test_a_closed_stderr_is_no_terminal(monkeypatch):
    with open("/dev/null", "w") as file:
        monkeypatch.setattr(progress.sys, "stderr", file)
        file.close()
        assert not progress.in_terminal()
