"""Prompts as people might type them: odd brackets, numbers, escapes, schedules, LoRA tags and letters."""

from hypothesis import strategies as st

Drawn = tuple[str, tuple[tuple[str, str], ...]]  # the kind of pipeline, and the options of a call

_WORDS = ["a cat", "the dog", " ", ",", "\n", "", "BREAK", " BREAK ", "BREAK" * 3, " AND ", "and", "x" * 400]
_BRACKETS = ["(", ")", "[", "]", "((", "]]", "\\", "\\(", "\\]", "\\\\", "|", ":", "::", "(" * 50, "[" * 99, "([" * 60]
_WEIGHTS = [":1.2)", ":0)", ":-3)", ":1e3)", ":.)", ":1.2.3)", ": +7 )", f":{'9' * 400})", ":1000)", ":1001)", ":nan)"]
_WHEN = [":0.5]", ":7]", ":-1]", ":.5]", f":{'9' * 400}]", ":1.]", ":٣]", ":0.0]", "]:2]"]
_TAGS = ["<lora:ink:0.8>", "<lora:ink>", "<lora::>", "<lora:x:nan>", "<lyco:a:1>", "<hypernet:a:1>", "<", ">"]
_LETTERS = ["\0", "\ud800", "猫", "e\u0301", "\u202e", "🙂", "\u200b", ":٣)", "ﬁ", "\ufeff", "\x1b[31m"]
_LONG = ["a " * 80, "cat, " * 30, "BREAK " * 70, "(a:1.1)" * 100, "[a|" * 40, "x" * 200_000]
_PARTS = [*_WORDS * 2, *_BRACKETS * 2, *_WEIGHTS, *_WHEN, *_TAGS, *_LETTERS, *_LONG]


def _prompts(most: int) -> st.SearchStrategy[str]:
    part = st.sampled_from(_PARTS) | st.sampled_from([*_WORDS, *_BRACKETS]) | st.text(max_size=5)
    sound = st.sampled_from(["(a:1.2) cat", "[a:b:0.5]", "[a|b]", "((cat)) BREAK [dog]", r"a \(cat\)"])
    return st.lists(part | sound, max_size=most).map("".join)


def called() -> st.SearchStrategy[Drawn]:
    """Return calls with weighted prompts."""
    options = {
        "prompt": _prompts(8),
        "negative_prompt": st.just("") | _prompts(3),
        "emphasis": st.sampled_from(["original", "no-norm"]),
        "num_inference_steps": st.sampled_from("123"),
        "guidance_scale": st.sampled_from(["1", "4"]),
    }
    drawn = st.tuples(*(value.map(lambda text, name=name: (name, text)) for name, value in options.items()))
    return st.tuples(st.sampled_from(["sd1", "sd1", "sdxl"]), drawn)
