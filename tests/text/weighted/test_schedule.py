"""parse_schedule: prompts that change with the step. A1111's own examples, and hostile prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdiff import InputError
from fastdiff.text.weighted.emphasis import MOST_OPEN
from fastdiff.text.weighted.schedule import parse_schedule


def told(text, steps=10):
    """Returns the texts as A1111 lists them: [the last step, counted from 1, with a text, the text]."""
    prompt, found = parse_schedule(text), []
    for step in range(steps):
        now = prompt.at(step, steps)
        if found and found[-1][1] == now:
            found.pop()
        found.append([step + 1, now])
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # the docstring of A1111's get_learned_conditioning_prompt_schedules
        ("test", [[10, "test"]]),
        ("a [b:3]", [[3, "a "], [10, "a b"]]),
        ("a [b: 3]", [[3, "a "], [10, "a b"]]),
        ("a [[[b]]:2]", [[2, "a "], [10, "a [[b]]"]]),
        ("[(a:2):3]", [[3, ""], [10, "(a:2)"]]),
        ("a [b : c : 1] d", [[1, "a b  d"], [10, "a  c  d"]]),
        ("a[b:[c:d:2]:1]e", [[1, "abe"], [2, "ace"], [10, "ade"]]),
        ("a [unbalanced", [[10, "a [unbalanced"]]),
        ("a [b:.5] c", [[5, "a  c"], [10, "a b c"]]),
        ("a [{b|d{:.5] c", [[5, "a  c"], [10, "a {b|d{ c"]]),
        ("((a][:b:c [d:3]", [[3, "((a][:b:c "], [10, "((a][:b:c d"]]),
        ("[a|(b:1.1)]", [[step, ("a", "(b:1.1)")[(step - 1) % 2]] for step in range(1, 11)]),
        ("[fe|]male", [[step, ("female", "male")[(step - 1) % 2]] for step in range(1, 11)]),
        ("[fe|||]male", [[1, "female"], [4, "male"], [5, "female"], [8, "male"], [9, "female"], [10, "male"]]),
    ],
)
def test_the_examples_of_a1111(text, expected):
    assert told(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a::0.5]", [[5, "a"], [10, ""]]),
        ("[a::3]", [[3, "a"], [10, ""]]),
        ("[a:b:0]", [[10, "b"]]),
        ("[a:b:-3]", [[10, "b"]]),
        ("[a:b:1]", [[1, "a"], [10, "b"]]),
        ("[a:b:1.0]", [[10, "a"]]),
        ("[a:b:99]", [[10, "a"]]),
        (f"[a:b:{'9' * 5000}]", [[10, "a"]]),
        (f"[a:b:-{'9' * 5000}]", [[10, "b"]]),
        ("[a:b:c:3]", [[10, "[a:b:c:3]"]]),
        ("[a:b:c]", [[10, "[a:b:c]"]]),
        (r"\[a:b:3\]", [[10, r"\[a:b:3\]"]]),
        ("[a] (b:1.2)", [[10, "[a] (b:1.2)"]]),
        ("[[a:b]:3]", [[3, ""], [10, "[a:b]"]]),
        ("[(a|b):c:3]", [[3, "(a|b)"], [10, "c"]]),
    ],
)
def test_when_a_prompt_changes(text, expected):
    assert told(text) == expected


def test_the_share_of_the_run_is_rounded_down():
    assert told("[a:b:0.5]", 5) == [[2, "a"], [5, "b"]]
    assert parse_schedule("[a:b:0.5]").changes and not parse_schedule("[a] (b:0.5)").changes


@given(st.text(st.sampled_from("a()[]\\:|.5 ")), st.integers(1, 12))
def test_any_text_has_a_text_at_each_step(text, steps):
    prompt = parse_schedule(text)
    texts = {prompt.at(step, steps) for step in range(steps)}
    assert prompt.changes or texts == {text}


@given(st.lists(st.text(st.sampled_from("ab ")), min_size=2), st.integers(0, 50))
def test_choices_take_turns(choices, step):
    assert parse_schedule(f"[{'|'.join(choices)}]").at(step, 50) == choices[step % len(choices)]


@pytest.mark.parametrize("text", ["[" * 10**5, "([" * 10**5, "[" * 10**5 + "a:1]" * 10**5])
def test_hostile_nesting_is_one_line(text):
    with pytest.raises(InputError, match=f"prompt: more than {MOST_OPEN} brackets inside one another"):
        parse_schedule(text)
