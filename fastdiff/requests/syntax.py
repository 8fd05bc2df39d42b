"""How prompts are read: the names of the ways, and `<lora:name:0.8>` in prompts, as in A1111. Imports no torch."""

import re
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, get_args

from fastdiff.arguments import as_float, did_you_mean, shown
from fastdiff.errors import InputError

PromptSyntax = Literal["plain", "weighted"]
Emphasis = Literal["original", "no-norm"]
SYNTAXES: tuple[str, ...] = get_args(PromptSyntax)
EMPHASES: tuple[str, ...] = get_args(Emphasis)
EMPHASIS: Emphasis = "original"
SYNTAX: PromptSyntax = "plain"
_TAG = re.compile(r"<(lora|lyco|hypernet):([^<>:]+)(?::([^<>]*))?>")
_OTHERS = {
    "lyco": "load the file as a LoRA, and write <lora:{}>",
    "hypernet": "hypernetworks are not supported; leave it out",
}


class Tag(NamedTuple):
    """A LoRA that a prompt names."""

    name: str
    weight: float
    of_text: float | None = None  # the weight in the text encoders; None: `weight`


def split_loras(text: str) -> tuple[str, tuple[Tag, ...]]:
    """Return a prompt without its tags, and the tags in the order of their names.

    `<lora:name:0.5:0.8>` has the weights of the text encoders and of the U-Net, as `<lora:name:te=0.5:unet=0.8>`.
    Raises InputError for a weight that is no number, a LoRA that is named twice, and other kinds of networks.
    """
    tags = [_tag(match) for match in _TAG.finditer(text)]
    names = [tag.name for tag in tags]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"prompt: <lora:{name}> is there twice; write it once, with the sum of the weights")
    return _TAG.sub("", text), tuple(sorted(tags, key=lambda tag: tag.name))


def split_all(texts: Sequence[str]) -> tuple[list[str], tuple[Tag, ...]]:
    """Return the prompts of a call without their tags, and the tags.

    Raises InputError as `split_loras`, and for prompts with other tags than the first one's.
    """
    split = [split_loras(text) for text in texts]
    tags = split[0][1] if split else ()
    for _, other in split:
        if other != tags:
            (name, *_), *_ = set(other) ^ set(tags)
            raise InputError(
                f"prompt: <lora:{name}> is not the same in all prompts; draw prompts with other LoRAs in other calls"
            )
    return [text for text, _ in split], tags


def tags_in(text: str | None, prompt_syntax: str | None) -> tuple[Tag, ...]:
    """Return the tags of a prompt. A plain prompt has none. Raises as `split_loras`."""
    return split_loras(text)[1] if text and prompt_syntax == "weighted" else ()


def without_loras(text: str, names: Collection[str]) -> str:
    """Return a prompt without the tags of these LoRAs."""
    return _TAG.sub(lambda match: "" if match[2] in names else match[0], text)


def check_loras(text: str, known: Sequence[str]) -> str:
    """Return a prompt without its tags. Raises InputError as `split_loras`, and for a LoRA that is not `known`."""
    rest, tags = split_loras(text)
    for tag in tags:
        if tag.name not in known:
            hint = did_you_mean(tag.name, known)
            hint += f"{' ' * bool(hint)}the names are {', '.join(known)}" if known else "give its file with --lora"
            raise InputError(f"prompt: <lora:{tag.name}>: no --lora has this name; {hint}")
    return rest


def check_no_loras(text: str, name: str = "prompt") -> None:
    """Raise InputError for a text that names a LoRA."""
    for tag in split_loras(text)[1]:
        raise InputError(f"{name}: <lora:{tag.name}> names a LoRA, which only the prompt may; write it there")


def _tag(match: re.Match[str]) -> Tag:
    kind, name, rest = match.groups()
    if kind in _OTHERS:
        raise InputError(f"prompt: <{kind}:{name}>: {_OTHERS[kind].format(name)}")
    given: dict[str, float] = {}
    for place, part in enumerate([] if rest is None else rest.split(":")):
        key, is_named, value = part.rpartition("=")
        key = key.strip() if is_named else ("te", "unet", "")[min(place, 2)]
        if key not in ("te", "unet") or key in given:
            raise InputError(f"prompt: <lora:{name}>: {shown(part)} is one too many; write <lora:{name}:0.8>")
        given[key] = _weight(name, value)
    of_text = given.get("te", 1.0)
    return Tag(name, given["unet"], of_text) if "unet" in given else Tag(name, of_text)


def _weight(name: str, text: str) -> float:
    try:
        weight = as_float(float(text))
    except ValueError:
        weight = None
    if weight is None:
        raise InputError(f"prompt: <lora:{name}>: its weight {shown(text)} is not a number; write <lora:{name}:0.8>")
    return weight
