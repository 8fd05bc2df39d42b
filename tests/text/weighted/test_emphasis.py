"""parse_emphasis: A1111's weights of words, its own examples, and hostile prompts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdiff import InputError
from fastdiff.requests.syntax import Tag, check_no_loras, split_loras
from fastdiff.text.weighted.emphasis import MOST_OPEN, check_prompt, parse_emphasis

WORDS = st.text(st.sampled_from("ab ,é"), min_size=1)


def parsed(text):
    return [["BREAK", -1] if part.breaks else [part.text, part.weight] for part in parse_emphasis(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # the docstring of A1111's parse_prompt_attention
        ("normal text", [["normal text", 1.0]]),
        ("an (important) word", [["an ", 1.0], ["important", 1.1], [" word", 1.0]]),
        ("(unbalanced", [["unbalanced", 1.1]]),
        (r"\(literal\]", [["(literal]", 1.0]]),
        ("(unnecessary)(parens)", [["unnecessaryparens", 1.1]]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                *(["a ", 1.0], ["house", 1.5730000000000004], [" ", 1.1], ["on", 1.0], [" a ", 1.1], ["hill", 0.55]),
                *([", sun, ", 1.1], ["sky", 1.4641000000000006], [".", 1.1]),
            ],
        ),
    ],
)
def test_the_examples_of_a1111(text, expected):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [["", 1.0]]),
        ("[a]", [["a", 1 / 1.1]]),
        ("[[a", [["a", 1 / 1.1 / 1.1]]),
        ("(a : -0.5 )", [["a ", -0.5]]),
        ("a: b:2)", [["a: b:2)", 1.0]]),
        (r"a\b \\ \[c\]", [[r"ab \ [c]", 1.0]]),
        ("a BREAK b", [["a", 1.0], ["BREAK", -1], ["b", 1.0]]),
        ("(a\nBREAK b:2)", [["a", 2.0], ["BREAK", -1], ["b", 2.0]]),
        ("BREAKS", [["BREAKS", 1.0]]),
        ("(a [b:2) c]", [["a ", 2.0], ["b", 2 * (1 / 1.1)], [" c", 1 / 1.1]]),
    ],
)
def test_brackets_escapes_and_breaks(text, expected):
    assert parsed(text) == expected


@given(st.lists(st.tuples(WORDS, st.integers(-300, 300).map(lambda n: n / 100))))
def test_what_is_written_with_weights_comes_back(parts):
    found = parse_emphasis("".join(f"({text}:{weight})" for text, weight in parts))
    assert "".join(part.text for part in found) == "".join(text for text, _ in parts)
    assert [part.weight for part in found for _ in part.text] == [weight for text, weight in parts for _ in text]


@given(st.text(st.sampled_from("a ()[]\\:,é0.")))
def test_escaped_text_is_plain_text(text):
    escaped = "".join(f"\\{letter}" if letter in "()[]\\" else letter for letter in text)
    assert parsed(escaped) == [[text, 1.0]]


@given(st.text(st.sampled_from("a()[]\\:.0BREAK ")))
def test_any_text_is_parts_or_one_line(text):
    try:
        parts = parse_emphasis(text)
    except InputError as error:
        assert "\n" not in str(error)
    else:
        pairs = itertools.pairwise(parts)
        assert parts and all(one.weight != other.weight or one.breaks or other.breaks for one, other in pairs)


@pytest.mark.parametrize("text", ["(" * 10**5, "[" * 10**5, "(" * 10**5 + "a" + ")" * 10**5])
def test_hostile_nesting_is_one_line(text):
    with pytest.raises(InputError, match=f"prompt: more than {MOST_OPEN} brackets inside one another"):
        parse_emphasis(text)
    with pytest.raises(InputError, match="characters; a weighted prompt has at most 10000"):
        check_prompt(text)


def test_brackets_that_nothing_opened_are_text():
    assert parsed(")]" * 10**5) == [[")]" * 10**5, 1.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(a:1.2.3)", r"prompt: the weight '1.2.3' is not a number; write \(word:1.2\)"),
        ("(a:1001)", "prompt: the weight of 'a' is beyond 1000"),
        ("(a:-1001)", "prompt: the weight of 'a' is beyond 1000"),
        (f"(a:{'9' * 5000})", "prompt: the weight of 'a' is beyond 1000"),
    ],
)
def test_weights_that_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_emphasis(text)


def test_and_is_refused_by_name():
    check_prompt("sand and LAND")
    for text in ("a AND b", "AND", "a AND_PERP b AND c"):
        with pytest.raises(InputError, match="negative prompt: AND combines several prompts"):
            check_prompt(text, "negative prompt")


def test_tags_of_loras():
    assert split_loras("a <lora:ink:0.8>cat<lora:x>") == ("a cat", (Tag("ink", 0.8), Tag("x", 1.0)))
    assert split_loras("a <b> <lora:> cat") == ("a <b> <lora:> cat", ())
    check_no_loras("a <b>")
    with pytest.raises(InputError, match="prompt: <lora:ink> names a LoRA"):
        check_no_loras("<lora:ink:0.8>")
    for weight in ("heavy", "nan", "1e400", ""):
        with pytest.raises(InputError, match=r"prompt: <lora:ink>: its weight .* is not a number"):
            split_loras(f"<lora:ink:{weight}>")
