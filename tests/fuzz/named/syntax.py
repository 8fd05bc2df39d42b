"""Prompts as people might type them: odd brackets, numbers, escapes, schedules, LoRA tags and letters."""

from hypothesis import strategies as st

from tests.fuzz.named.loras import NAME, SOUND, WEIGHTS

Drawn = tuple[str, tuple[tuple[str, str], ...]]  # the kind of pipeline, and the options of a call

_WORDS = ["a cat", "the dog", " ", ",", "\n", "", "BREAK", " BREAK ", "BREAK" * 3, " AND ", "and", "x" * 400]
_BRACKETS = ["(", ")", "[", "]", "((", "]]", "\\", "\\(", "\\]", "\\\\", "|", ":", "::", "(" * 50, "[" * 99, "([" * 60]
_WEIGHTS = [":1.2)", ":0)", ":-3)", ":1e3)", ":.)", ":1.2.3)", ": +7 )", f":{'9' * 400})", ":1000)", ":1001)", ":nan)"]
_WHEN = [":0.5]", ":7]", ":-1]", ":.5]", f":{'9' * 400}]", ":1.]", ":٣]", ":0.0]", "]:2]"]
_TAGS = ["<lora:ink:0.8>", "<lora:ink>", "<lora::>", "<lora:x:nan>", "<lyco:a:1>", "<hypernet:a:1>", "<", ">"]
_OF_FILE = ["<lora:style:0.8>", "<lora:style>", "<lora:style:0:1>", "<lora:style:unet=-1>", "<lora:style:te=1:te=1>"]
_OF_FILE += ["<lora:style:1e39>", "<lora:style:1e308>", "<lora:style:>", "<lora:stile:1>", "<lora: style :1>"]
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


@st.composite
def tagged(draw: st.DrawFn) -> tuple[tuple[tuple[str, ...], ...], str, str, tuple[tuple[str, str], ...]]:
    """Return the edits, the door, what to call, and the flags of a command whose prompt names its LoRA."""
    edit = ("lora", draw(st.sampled_from([*SOUND])), draw(st.integers(0, 1000).map(str)))
    sound = st.sampled_from(_OF_FILE[:4]).map("a (cat:1.2) {}".format)
    odd = st.lists(st.sampled_from([*_OF_FILE, *_OF_FILE, *_TAGS]) | _prompts(2), max_size=3).map("".join)
    text = draw(sound | odd)
    flags = {"--lora": f"../model/{NAME}{draw(st.sampled_from(WEIGHTS[:5]))}", "--prompt-syntax": "weighted"}
    return (edit,), "command", "sample", (*flags.items(), ("--prompt", text))
