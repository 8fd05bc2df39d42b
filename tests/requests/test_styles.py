"""Files of styles: what they add to a prompt, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdiff.errors import InputError
from fastdiff.kinds import MAX_PROMPT
from fastdiff.requests.styles import MAX_BYTES, Style, Styles

A1111 = """name, prompt, negative_prompt, category
# my own,,,
watercolor,"watercolor of {prompt}, paper",photo,art
,,,
night,"dark,
{prompt}",
"""


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the styles in a text, or in bytes."""

    def read(content: str | bytes) -> Styles:
        path = tmp_path / "styles.csv"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return Styles.read(path)

    return read


def merged_by_a1111(style: str, prompt: str) -> str:
    """Return what `merge_prompts` of A1111's modules/styles.py returns."""
    if "{prompt}" in style:
        return style.replace("{prompt}", prompt)
    parts = filter(None, (prompt.strip(), style.strip()))
    return ", ".join(parts)


@given(*[st.lists(st.sampled_from(["a", " ", "{", "}", ",", "{prompt}"]), max_size=8).map("".join)] * 4)
def test_a_style_changes_both_prompts_as_in_a1111(prompt, negative, style, style_of_negative):
    expected = merged_by_a1111(style, prompt), merged_by_a1111(style_of_negative, negative)
    assert Styles([Style("x", style, style_of_negative)]).apply(["x"], prompt, negative) == expected


def test_styles_are_applied_one_after_the_other(read):
    styles = read(A1111)
    assert styles.names == ["watercolor", "night"]
    assert styles.apply(["watercolor", "night"], "a fox", "dog") == ("dark,\nwatercolor of a fox, paper", "dog, photo")
    assert styles.apply([], " a fox ", "dog ") == (" a fox ", "dog ")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order-mark"])
def test_old_files_have_text_instead_of_prompt(read, mark):
    assert read(mark + b"name,text\r\nx,of {prompt}\r\n").apply(["x"], "fox") == ("of fox", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no column name; its first line must be name,prompt,negative_prompt"),
        ("name,negative_prompt\nx,a", "it has no column prompt"),
        ("name;prompt\nx;a", "it has no column name"),
        ("name,prompt\nx,a\nx,b", "style 'x' is there twice"),
        ("name,prompt\nx,a,b", "line 2: it has more values than the first line; put texts with commas"),
        ("name,prompt\n,a", "line 2: the style has no name"),
        ('name,prompt\n"x\ny",a', r"line 3: name: 'x\\ny' is not a string of one line"),
        ("name,prompt\nx," + "a" * (MAX_PROMPT + 1), "line 2: prompt: .* is not a string of up to"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_line(read, content, message):
    with pytest.raises(InputError, match=f"^styles .*styles.csv: {message}"):
        read(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfea\0", "is not UTF-8 text; save it as UTF-8, as CSV"),
        (b'name,prompt\nx,"a', r"is not a valid CSV file \(unexpected end of data\)"),
        (b"#" * (MAX_BYTES + 1), "is larger than 4 MB; give fewer styles"),
    ],
)
def test_a_file_of_another_kind_is_refused(read, content, message):
    with pytest.raises(InputError, match=f"^styles .*styles.csv {message}"):
        read(content)


def test_a_name_that_is_not_there_has_a_hint(read):
    styles = read("name,prompt\nwatercolor,a\nnight,b")
    with pytest.raises(InputError, match=r"^style 'watercolour' is not in .*; did you mean watercolor\?$"):
        styles.apply(["watercolour"], "fox")
    with pytest.raises(InputError, match=r"^style 'zzz' is not in .*; choose from watercolor, night$"):
        styles.apply(["zzz"], "fox")
    with pytest.raises(InputError, match=r"^style: 'night' is not a list of up to 100 names"):
        styles.apply("night", "fox")


def test_a_prompt_does_not_grow_without_end():
    styles = Styles([Style("twice", "{prompt} {prompt}")])
    with pytest.raises(InputError, match=r"^style 'twice' makes the prompt longer than 10000 characters"):
        styles.apply(["twice"] * 60, "x" * 100)
