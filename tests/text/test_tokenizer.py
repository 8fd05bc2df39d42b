"""CLIPTokenizer against transformers' CLIPTokenizer, on a small vocabulary, in every layout of the files."""

import itertools
import json
import random

import pytest
import transformers

from fastdiff import InputError
from fastdiff.text.tokenizer import CLIPTokenizer

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz ",
    "ABCabcXYZ 0123456789 .,!?'\"-()",
    "äöüßéèñçøåÄÖÜÉ e\u0301a\u0308 ﬁﬃ ǅ İı ſ K Å",
    "日本語 中文 한국어 кириллица ελληνικά עברית العربية हिन्दी ไทย",
    "😀😂👩‍👩‍👧‍👦🏳️‍🌈🇩🇪❤️👍🏽🤷‍♀️✨🔥 ☃ ♥ ∞ → ½ Ⅷ ² ٣ 三",
    " \t\n\r\u00a0\u2003\u3000\u200b\u200d\ufeff\u0085\x00\x1f",
    "<|startoftext|> <|endoftext|> <|ENDOFTEXT|> 's 't 're 've 'm 'll 'd 'S 'LL",
)
WORDS = ("photo", "of a", "cat", "the cat's", "astronaut", "riding", "<|endoftext|>", "it'll", "4k", "!!!", "trending")
WORDS += ("<|EndOfText|>", "<|StartOfText|>")  # the folder says whether case matters


def strings(count: int, seed: int = 0) -> list[str]:
    """Return random texts: letters and words of many scripts, and any characters except surrogates."""
    rng = random.Random(seed)

    def piece() -> str:
        kind = rng.randrange(len(ALPHABETS) + 2)
        if kind < len(ALPHABETS):
            return "".join(rng.choices(ALPHABETS[kind], k=rng.randint(1, 12)))
        if kind == len(ALPHABETS):
            return rng.choice(WORDS)
        ranges = rng.choices(((0, 0x2FF), (0x300, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)), k=3)
        return "".join(chr(rng.randint(*each)) for each in ranges)

    return [rng.choice(("", " ")).join(piece() for _ in range(rng.randint(0, 8))) for _ in range(count)]


LAYOUTS = ("two-files", "one-file", "old", "both")


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path, save_tokenizer):
    return save_tokenizer(tmp_path / "tokenizer", layout=request.param, length=77)


def theirs(folder, prompts):
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    given = {"padding": "max_length", "max_length": tokenizer.model_max_length, "truncation": True}
    return [tuple(ids) for ids in tokenizer(prompts, **given).input_ids]


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ids_are_those_of_transformers(folder, count):
    tokenizer, prompts = CLIPTokenizer(folder), strings(count)
    for prompt, expected in zip(prompts, theirs(folder, prompts), strict=True):
        assert tokenizer(prompt).ids == expected, ascii(prompt)


@pytest.mark.parametrize("said", list(itertools.product(("text", "lowered", "kept"), repeat=3)), ids="-".join)
def test_one_token_of_several_names_is_looked_for_as_transformers_does(tmp_path, save_tokenizer, said):
    """The end token is also the unknown and the padding token. Each of the three may say how to match its text."""
    folder = save_tokenizer(tmp_path / "tokenizer", layout="old")
    end = {"content": "<|endoftext|>", "lstrip": False, "rstrip": False, "single_word": False}
    names = ("eos_token", "unk_token", "pad_token")
    named = {
        name: end["content"] if how == "text" else end | {"normalized": how == "lowered"}
        for name, how in zip(names, said, strict=True)
    }
    path = folder / "special_tokens_map.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    prompt = "the cat <|EndOfText|> of"
    assert CLIPTokenizer(folder)(prompt).ids == theirs(folder, [prompt])[0]


def test_the_strings_say_something(tmp_path, save_tokenizer):
    tokenizer = CLIPTokenizer(save_tokenizer(tmp_path))
    made = [tokenizer(prompt) for prompt in strings(2000)]
    assert len({tokens.ids for tokens in made}) > 1700
    assert 100 < sum(bool(tokens.cut) for tokens in made) < 1900
    assert len({each for tokens in made for each in tokens.ids}) > 300


@pytest.mark.parametrize("pad", ["!", "<|endoftext|>"])
def test_pad_token_and_length_are_the_folders(tmp_path, save_tokenizer, pad):
    folder = save_tokenizer(tmp_path, pad=pad, length=9)
    tokenizer = CLIPTokenizer(folder)
    ids = tokenizer("cat").ids
    assert tokenizer.length == len(ids) == 9
    assert (ids[0], ids[-1]) == (tokenizer.start, tokenizer.pad)
    assert (tokenizer.pad == tokenizer.end) == (pad == "<|endoftext|>")
    assert [ids] == theirs(folder, ["cat"])


def test_a_long_prompt_is_cut_and_the_warning_quotes_what_was(tmp_path, save_tokenizer):
    tokenizer = CLIPTokenizer(save_tokenizer(tmp_path, length=6))
    fits, long = tokenizer("the Cat, the"), tokenizer("the Cat, the\n  Astronaut 😀!")
    assert (fits.cut, fits.warning()) == ("", None)
    assert long.ids == fits.ids
    assert long.cut == "Astronaut 😀!"
    assert long.warning() == "prompt: longer than the 6 tokens that the model reads; cut: 'Astronaut 😀!'"


def test_tokens_that_were_added_later(tmp_path, save_tokenizer):
    tokenizer = transformers.CLIPTokenizer.from_pretrained(save_tokenizer(tmp_path / "before"))
    tokenizer.add_tokens(["<sks>", "blurb"])
    tokenizer.save_pretrained(tmp_path / "after")
    prompts = ["a photo of <sks>", "<SKS> blurb", "blurbs of<sks>cat", *strings(200)]
    ours = CLIPTokenizer(tmp_path / "after")
    assert [ours(prompt).ids for prompt in prompts] == theirs(tmp_path / "after", prompts)
    assert ours("<sks>").ids != ours("<sk>").ids


def test_a_merge_of_number_signs_is_no_comment(tmp_path, save_tokenizer):
    folder = save_tokenizer(tmp_path)
    path = folder / "vocab.json"
    ids = json.loads(path.read_text())
    path.write_text(json.dumps(ids | {"##</w>": len(ids)}))
    broken(folder, "merges.txt", lambda text: f"{text}# #</w>\n")
    found = CLIPTokenizer(folder)("cat ##").ids
    assert found == theirs(folder, ["cat ##"])[0] and len(ids) in found


def broken(folder, name, change):
    """Change the text of one file."""
    path = folder / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def options(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


BROKEN = {
    "no-merges": ("merges.txt", lambda _: "#version: 0.2\nca x</w>\n", "it is no valid tokenizer"),
    "half-a-merge": ("merges.txt", lambda text: text + "\nalone", "merges.txt: merges: .* is not a list of pairs"),
    "vocabulary-of-texts": ("vocab.json", options(a="1"), "vocab.json: vocab: .* is not an object of tokens"),
    "id-below-0": ("vocab.json", options(a=-1), "vocab.json: vocab: .* is not an object of tokens"),
    "no-letter-and-none-for-it": (
        "vocab.json",
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k not in ("ð", "<|endoftext|>")}),
        r"its vocabulary lacks letters, and the unknown token '<\|endoftext\|>'; save it again",
    ),
    "another-class": (
        "tokenizer_config.json",
        options(tokenizer_class="T5Tokenizer"),
        "tokenizer_class: 'T5Tokenizer'",
    ),
    "no-room": ("tokenizer_config.json", options(model_max_length=1), "model_max_length: 1 is not"),
    "endless": ("tokenizer_config.json", options(model_max_length=10**31), "more than 31 digits"),
    "left": ("tokenizer_config.json", options(padding_side="left"), "padding_side: 'left' is not one of right"),
    "cut-left": (
        "tokenizer_config.json",
        options(truncation_side="left"),
        "truncation_side: 'left' is not one of right",
    ),
    "no-pad-token": ("tokenizer_config.json", options(pad_token=None), "pad_token: .* None is not a string"),
    "pad-token-of-nothing": (
        "tokenizer_config.json",
        options(pad_token={}),
        "tokenizer_config.json: pad_token: content is missing; add it",
    ),
    "another-id": (
        "tokenizer_config.json",
        options(added_tokens_decoder={"7": {"content": "<sks>"}}),
        "the token '<sks>' has id .*, not 7",
    ),
    "no-json": ("vocab.json", lambda _: "{", "not readable JSON"),
}


@pytest.mark.parametrize(("name", "change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(tmp_path, save_tokenizer, name, change, message):
    broken(save_tokenizer(tmp_path), name, change)
    with pytest.raises(InputError, match=message) as error:
        CLIPTokenizer(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("vocab.json", "neither tokenizer.json nor vocab.json"), ("merges.txt", "merges.txt is not a file")],
)
def test_a_missing_file_is_named(tmp_path, save_tokenizer, missing, message):
    (save_tokenizer(tmp_path) / missing).unlink()
    with pytest.raises(InputError, match=message):
        CLIPTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "message"), [(7, "prompt: 7 has the wrong type; give a"), ("\ud83d", "half a surrogate pair")]
)
def test_a_prompt_that_is_no_text(tmp_path, save_tokenizer, prompt, message):
    with pytest.raises(InputError, match=message):
        CLIPTokenizer(save_tokenizer(tmp_path))(prompt)
