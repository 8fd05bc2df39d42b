"""A misspelt word is answered with the closest ones."""

import pytest

from fastdiff.arguments import did_you_mean


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("eular", "did you mean euler?"),
        ("Euler", "did you mean euler?"),
        ("LM", "did you mean lms?"),
        ("euler-", "did you mean euler-a or euler-karras?"),
        ("flow", ""),
        ("", ""),
        ("--", ""),
        ("x" * 100_000, ""),
    ],
)
def test_the_closest_words_are_named(asked, hint):
    assert did_you_mean(asked, iter(["euler", "euler-a", "lms", "euler-karras", "--steps"])) == hint
