"""The lines of a prompt file."""

import pytest

from fastdiff.requests.prompt_file import read_prompts


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order-mark"])
def test_prompts_are_the_lines_as_they_are(tmp_path, mark):
    path = tmp_path / "prompts.txt"
    path.write_bytes(mark + " a cat\r\n \n\nthe bär ".encode())
    assert read_prompts(str(path)) == (" a cat", "the bär ")
