"""One-line messages for errors of other libraries."""

from fastdiff.errors import LONGEST, in_one_line


def test_the_message_of_another_library_is_one_line_of_a_bounded_length():
    assert in_one_line(OSError("no\n  such   file")) == "OSError: no such file"
    assert in_one_line(OSError("x" * 1000)) == f"OSError: {'x' * 1000}"[:LONGEST]
