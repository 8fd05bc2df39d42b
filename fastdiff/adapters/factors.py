"""The user's weight of an adapter: one number, or numbers for blocks of a U-Net, as diffusers' `set_adapters` takes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdiff.arguments import as_float, shown
from fastdiff.errors import InputError

# Layers beside the attentions of a block. As in diffusers, those with the index of an attention share its factor.
_OTHER_LAYERS = re.compile(r"^((?:down|up)_blocks\.\d+)\.\w+\.(\d+)\.")


@dataclass(frozen=True)
class Factor:
    """A number for each layer."""

    usual: float = 1.0
    of_blocks: tuple[tuple[str, float], ...] = ()  # with the start of a layer's name, such as "mid_block.attentions.0."

    def of(self, key: str) -> float:
        """Return the factor of a weight, by diffusers' key."""
        if not self.of_blocks:
            return self.usual
        key = _OTHER_LAYERS.sub(r"\1.attentions.\2.", key)
        return next((value for block, value in self.of_blocks if key.startswith(block)), self.usual)

    def times(self, scale: float) -> "Factor":
        return Factor(self.usual * scale, tuple((block, value * scale) for block, value in self.of_blocks))


ONE = Factor()


def factor(name: str, given: Any, unet: Any) -> Factor:
    """Return the factor that an argument asks for.

    Args:
        name: of the argument in errors.
        given: a number, None for 1, or for a U-Net a dict as in diffusers, such as `{"down": 0.5, "up": {"block_1":
            [0, 1, 1]}}`. Blocks that a dict leaves out get 1.
        unet: the U-Net that a dict is for, with `config`; None for another part.

    Raises InputError for anything else, and for blocks that the U-Net does not have.
    """
    if given is None:
        return ONE
    if not isinstance(given, Mapping):
        return Factor(_number(name, given))
    if unet is None:
        raise InputError(f"{name}: this part has no blocks, only a U-Net; give a number")
    blocks: dict[str, float] = {}
    rest = dict(given)
    if "mid" in rest:
        blocks["mid_block.attentions.0."] = _number(f"{name}['mid']", _single(rest.pop("mid")))
    for side in ("down", "up"):
        if side in rest:
            blocks |= _of_side(f"{name}['{side}']", side, rest.pop(side), unet)
    if rest:
        raise InputError(f"{name}: {shown(next(iter(rest)))} is no part of a U-Net; give down, mid and up")
    return Factor(1.0, tuple(blocks.items()))


def _of_side(name: str, side: str, given: Any, unet: Any) -> dict[str, float]:
    there = _attentions(side, unet)
    if not isinstance(given, Mapping):
        given = {f"block_{block}": given for block in there}
    found: dict[str, float] = {}
    for key, value in given.items():
        number = str(key).removeprefix("block_")
        if not number.isdecimal() or int(number) not in there:
            usable = ", ".join(f"block_{block}" for block in there)
            raise InputError(f"{name}: {shown(key)} has no attention; give one of {usable}")
        count = there[int(number)]
        values = list(value) if isinstance(value, list | tuple) else [value]
        values = values * count if len(values) == 1 else values
        if len(values) != count:
            raise InputError(f"{name}['{key}']: {len(values)} numbers for {count} attentions; give {count}, or one")
        for i, each in enumerate(values):
            found[f"{side}_blocks.{number}.attentions.{i}."] = _number(f"{name}['{key}']", each)
    return found


def _attentions(side: str, unet: Any) -> dict[int, int]:
    """Return the number of attentions of each block that has any."""
    blocks = getattr(unet, f"{side}_blocks")
    return {i: len(block.attentions) for i, block in enumerate(blocks) if len(getattr(block, "attentions", None) or ())}


def _single(given: Any) -> Any:
    return given[0] if isinstance(given, list | tuple) and len(given) == 1 else given


def _number(name: str, given: Any) -> float:
    number = as_float(given)
    if number is None:
        raise InputError(f"{name}: {shown(given)} is not a finite number; give one, such as 0.8")
    return number
