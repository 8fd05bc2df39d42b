"""Weighted prompts that cannot be read are refused before anything is drawn, at any step and by name."""

import pytest

from fastdiff import InputError
from fastdiff.text.weighted.checking import check_all, check_weighted


@pytest.mark.parametrize("text", ["", "a cat", "(a:1.2) [cat] BREAK b", "[a:b:0.5]", r"\(a\:", "((((", "a < b"])
def test_prompts_that_can_be_read(text):
    check_weighted(text, steps=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a AND b", "negative-prompt: AND combines"),
        ("(a:1.2.3)", "'1.2.3' is not a number"),
        ("<lora:ink:x>", "<lora:ink>: its weight 'x'"),
        ("a <lora:ink:1>", "negative-prompt: <lora:ink> names a LoRA, which only the prompt may; write it there"),
        ("(" * 101, "more than 100 brackets"),
        ("x" * 10**6, "negative-prompt: it has 1000000 characters"),
        ("(" * 4 + "a" + ":9)" * 4, "beyond 1000"),
        ("[:(" * 4 + "a" + ":9)" * 4 + ":2]", "beyond 1000"),
    ],
)
def test_prompts_that_cannot(text, message):
    with pytest.raises(InputError, match=message):
        check_weighted(text, "negative-prompt", steps=8)


def test_a_text_that_appears_during_the_run():
    text = "(a:1.2[:.3:2])"  # (a:1.2) for two steps, then (a:1.2.3)
    check_weighted(text, steps=1)
    with pytest.raises(InputError, match=r"'1\.2\.3' is not a number"):
        check_weighted(text, steps=3)


def test_one_of_several_is_quoted():
    with pytest.raises(InputError, match=r"is not a number; .* \(in '\(b:1\.\.2\)'\)$"):
        check_all(["a cat", "(b:1..2)", "(c:1..2)"], "prompt", 8)
    with pytest.raises(InputError, match=r"for brackets$"):
        check_all(["(b:1..2)"] * 3, "prompt", 8)
