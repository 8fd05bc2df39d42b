"""Files of embeddings (textual inversion), sound and unsound, next to a model's files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

NAME = "blurb.safetensors"
WIDTH = 32  # of the tiny model's text encoder


def embedding(folder: Path, form: str, count: str, width: str) -> None:
    """Write an embedding of `count` vectors of `width` channels."""
    vectors = torch.linspace(-1, 1, int(count) * int(width)).view(int(count), int(width))
    save_file({key: each.clone() for key, each in FORMS[form](vectors).items()}, folder / NAME)


FORMS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "A1111": lambda vectors: {"emb_params": vectors},
    "diffusers": lambda vectors: {"<cat>": vectors},
    "one vector": lambda vectors: {"<cat>": vectors[0]},
    "half": lambda vectors: {"emb_params": vectors.half()},
    "double": lambda vectors: {"emb_params": vectors.double()},
    "float8": lambda vectors: {"emb_params": vectors.to(torch.float8_e4m3fn)},
    "large": lambda vectors: {"emb_params": vectors * 1e30},
    "odd token": lambda vectors: {"\N{SNOWMAN} \n" * 9: vectors},
    "word": lambda vectors: {"a": vectors},
    "end token": lambda vectors: {"<|endoftext|>": vectors},
    "empty key": lambda vectors: {"": vectors},
    "pair": lambda vectors: {"clip_l": vectors, "clip_g": vectors},
    "first of a pair": lambda vectors: {"clip_l": vectors},
    "NaN": lambda vectors: {"emb_params": vectors * float("nan")},
    "NaN in float8": lambda vectors: {"emb_params": (vectors * float("nan")).to(torch.float8_e4m3fn)},
    "infinity": lambda vectors: {"emb_params": vectors.double() * 1e300 * 1e300},
    "beyond float32": lambda vectors: {"emb_params": (vectors.double() + 2) * 1e300},
    "integers": lambda vectors: {"emb_params": vectors.int()},
    "bools": lambda vectors: {"emb_params": vectors.bool()},
    "complex": lambda vectors: {"emb_params": vectors.to(torch.complex64)},
    "no vectors": lambda vectors: {"emb_params": vectors[:0]},
    "one number": lambda vectors: {"emb_params": vectors[0, 0]},
    "three dimensions": lambda vectors: {"emb_params": vectors[None]},
    "two tensors": lambda vectors: {"<a>": vectors, "<b>": vectors + 1},
    "a LoRA": lambda vectors: {"lora_unet_x.lora_up.weight": vectors},
    "nothing": lambda vectors: {},
}
SOUND = ("A1111", "diffusers", "one vector", "half", "double", "float8", "first of a pair")
NAMED_BADLY = ("odd token", "word", "end token", "empty key", "large")  # refused or not, as the command line says
REFUSED = FORMS.keys() - {*SOUND, *NAMED_BADLY}
TOKENS = (
    "",
    ":<cat>",
    ":<cat>",
    ":a",
    ":my cat",
    ":",
    ":x\ny",
    ":\N{SNOWMAN}",
    ":<|endoftext|>",
    f":{'x' * 300}",
    ":_1",
)
COUNTS, WIDTHS = ("1", "1", "2", "22", "23", "1000"), (*[str(WIDTH)] * 6, "1", "40", "768", "1280")


def must_be_refused(form: str, count: str, width: str) -> bool:
    """Return whether drawing with the file must fail, whatever its token."""
    is_long = int(count) > 22 and form != "one vector"
    return form in REFUSED or is_long or int(width) != WIDTH


@st.composite
def written(draw: st.DrawFn) -> tuple[str, ...]:
    """Return an edit that writes a file."""
    form = draw(st.sampled_from([*SOUND, *SOUND, *FORMS]))
    return "embedding", form, draw(st.sampled_from(COUNTS)), draw(st.sampled_from(WIDTHS))


@st.composite
def loaded(draw: st.DrawFn, headers: Sequence[str]) -> tuple[Any, ...]:
    """Return the edits, the door, what to call, and the flags of a case. Most files are sound, some are damaged.

    headers: the ways to damage the header of a file.
    """
    name = st.just(NAME)
    damage = st.one_of(
        st.tuples(st.just("flip"), name, st.integers(0, 1000).map(str), st.integers(0, 7).map(str)),
        st.tuples(st.just("truncate"), name, st.integers(0, 1000).map(str)),
        st.tuples(st.just("append"), name, st.sampled_from(["1", "1000"])),
        st.tuples(st.just("header"), name, st.sampled_from(headers)),
    )
    damaged = draw(st.lists(damage, max_size=1)) if draw(st.integers(0, 3)) == 3 else []
    return (draw(written()), *damaged), "command", "sample", draw(flags())


@st.composite
def flags(draw: st.DrawFn) -> tuple[tuple[str, str], ...]:
    """Return the flags that load the file, most often once."""
    tokens = draw(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=2))[: draw(st.sampled_from([1, 1, 2]))]
    return tuple(("--embedding", f"../model/{NAME}{token}") for token in tokens)
