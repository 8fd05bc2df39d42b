"""split_chunks: the chunks of a long prompt, by A1111's rules computed by hand."""

from pathlib import Path

import pytest

from fastdiff import InputError
from fastdiff.text.tokenizer import CLIPTokenizer
from fastdiff.text.weighted.chunks import MOST_CHUNKS, may_have_too_many, split_chunks

ROOT = Path(__file__).parents[3]


def clip():
    """Returns a tokenizer with 75 tokens in a prompt, as CLIP's."""
    tokenizer = CLIPTokenizer(ROOT / "fastdiff/bundled/emoji-sd/tokenizer")
    tokenizer.length, tokenizer.room = 77, 75
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return clip()


@pytest.fixture(scope="module")
def words(tokenizer):
    """Returns the prompt's words of each chunk, one token each."""
    names = {tokenizer.ids(word)[0]: word for word in ("a", "b", "c", ",")}

    def words(prompt):
        chunks = split_chunks(prompt, tokenizer)
        for chunk in chunks:
            assert chunk.ids[0] == tokenizer.start and len(chunk.ids) == len(chunk.weights) == tokenizer.length
        return ["".join(names[i] for i in chunk.ids[1 : chunk.ids.index(tokenizer.end)]) for chunk in chunks]

    return words


def test_a_short_prompt_is_the_plain_one(tokenizer):
    (chunk,) = split_chunks("a cat, b", tokenizer)
    assert chunk.ids == tokenizer("a cat, b").ids and set(chunk.weights) == {1.0}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", [""]),
        ("a " * 75, ["a" * 75]),
        ("a " * 76, ["a" * 75, "a"]),
        ("a BREAK b", ["a", "b"]),
        ("a BREAK", ["a"]),
        ("BREAK a", ["", "a"]),
        ("a BREAK BREAK b", ["a", "", "b"]),
        ("a " * 60 + ", " + "b " * 20, ["a" * 60 + ",", "b" * 20]),  # the comma is 15 tokens before the end
        ("a " * 55 + ", " + "b " * 20, ["a" * 55 + ",", "b" * 20]),  # 20 tokens: the farthest
        ("a " * 54 + ", " + "b " * 21, ["a" * 54 + "," + "b" * 20, "b"]),
        ("a " * 75 + ", b", ["a" * 75, ",b"]),  # a comma itself does not go back
        ("a " * 74 + ", b", ["a" * 74 + ",", "b"]),
        ("a , BREAK " + "b " * 75 + "c", ["a,", "b" * 75, "c"]),  # the comma is in another chunk
    ],
)
def test_where_chunks_end(words, prompt, expected):
    assert words(prompt) == expected


def test_weights_stand_beside_their_tokens(tokenizer):
    first, second = split_chunks("a (b:1.5) BREAK [c]", tokenizer)
    assert first.weights[:5] == (1.0, 1.0, 1.5, 1.0, 1.0) and second.weights[:3] == (1.0, 1 / 1.1, 1.0)
    assert {*first.weights[3:], *second.weights[2:]} == {1.0}


def test_weights_move_with_the_words_after_a_comma(tokenizer):
    first, second = split_chunks("a " * 70 + ", (" + "b " * 6 + ":1.5)", tokenizer)
    assert set(first.weights) == {1.0} and second.weights == (1.0, *[1.5] * 6, *[1.0] * 70)


def test_the_vectors_of_an_embedding_stay_together():
    tokenizer = clip()
    tokenizer.use(tokenizer.with_embeddings({"<one>": 1, "<cat>": 4}))
    ids = [*range(tokenizer.size + 1, tokenizer.size + 5)]
    first, second = split_chunks("a " * 72 + "(<cat>:1.2)", tokenizer)
    assert first.ids.index(tokenizer.end) == 73 and [*second.ids[1:5]] == ids
    assert second.weights[:6] == (1.0, *[1.2] * 4, 1.0)
    (only,) = split_chunks("a " * 71 + "<cat>", tokenizer)
    assert [*only.ids[72:76]] == ids


def test_the_number_of_chunks_has_a_limit(tokenizer):
    assert len(split_chunks("BREAK " * (MOST_CHUNKS - 1) + "a", tokenizer)) == MOST_CHUNKS
    with pytest.raises(InputError, match=f"prompt: it has {MOST_CHUNKS + 1} chunks of 75 tokens; give at most"):
        split_chunks("BREAK " * MOST_CHUNKS + "a", tokenizer)


@pytest.mark.parametrize("unit", ["a ", "🙂 ", "a" * 60 + " ,", "\U0001d160 ", "BREAK ", "a cat BREAK, "])
def test_a_prompt_that_surely_fits_is_known_at_little_cost(tokenizer, unit):
    def fits(prompt):
        try:
            return len(split_chunks(prompt, tokenizer)) <= MOST_CHUNKS
        except InputError:
            return False

    assert not may_have_too_many(unit * 10, tokenizer)
    largest = next(2**i for i in range(16) if may_have_too_many(unit * 2**i, tokenizer)) // 2
    assert fits(unit * largest)
    assert may_have_too_many(unit * 10_000, tokenizer)


def test_a_short_prompt_of_an_embedding_may_have_too_many():
    tokenizer = clip()
    tokenizer.use(tokenizer.with_embeddings({"blurb": 75}))
    assert may_have_too_many("blurb", tokenizer)
    with pytest.raises(InputError, match=f"it has {MOST_CHUNKS + 1} chunks"):
        split_chunks("blurb " * (MOST_CHUNKS + 1), tokenizer)
