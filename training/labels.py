"""Labels of emoji64: style x subgroup, made from each picture's Unicode group and CLDR short name.

`subgroups.json` splits the nine groups: group -> subgroup -> name patterns (fnmatch, first match wins). The part of a
name after a colon (skin tones, countries) is ignored. A subgroup with too few pictures in a style is merged into the
last subgroup of its group. If the group's last subgroup has too few as well, its pictures only train the null label.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

MIN_PICTURES = 10
SUBGROUPS: dict[str, dict[str, list[str]]] = json.loads((Path(__file__).parent / "subgroups.json").read_text("utf-8"))
SHORT_GROUPS = {
    "Smileys & Emotion": "smileys",
    "People & Body": "people",
    "Animals & Nature": "animals",
    "Food & Drink": "food",
    "Travel & Places": "travel",
    "Activities": "activities",
    "Objects": "objects",
    "Symbols": "symbols",
    "Flags": "flags",
}


@dataclass(frozen=True)
class Labels:
    """The label names, the label of every picture, and the finer labels of each name "<style> <group>"."""

    names: tuple[str, ...]  # index -> "noto birds"; the null label has no name and the index len(names)
    of_picture: tuple[int, ...]  # label index of each picture, null_label if its subgroup was too small
    groups: dict[str, tuple[str, ...]]  # "noto animals" -> its finer names, in table order

    @property
    def null_label(self) -> int:
        return len(self.names)

    @property
    def replaced(self) -> dict[str, str]:
        """Map each name "<style> <group>" without labels to the same group in the styles that have it."""
        styles = dict.fromkeys(name.split(" ")[0] for name in self.groups)
        return {
            f"{style} {group}": " or ".join(name for name in self.groups if name.endswith(f" {group}"))
            for style in styles
            for group in SHORT_GROUPS.values()
            if f"{style} {group}" not in self.groups
        }


def subgroup_of(group: str, name: str) -> str:
    """Return the subgroup of a CLDR short name within its Unicode group. Raises KeyError for an unknown group."""
    base = name.split(":")[0]
    for subgroup, patterns in SUBGROUPS[group].items():
        if any(fnmatchcase(base, pattern) for pattern in patterns):
            return subgroup
    raise ValueError(f"{name!r} matches no pattern of {group!r}: add '*' to its last subgroup in subgroups.json")


def coarse_names(styles: Sequence[str]) -> tuple[str, ...]:
    """Return the labels "<style> <group>" in the order of the first emoji64: index = style * 9 + group."""
    return tuple(f"{style_name(style)} {group}" for style in styles for group in SHORT_GROUPS.values())


def style_name(style: str) -> str:
    return style.replace("_", "-")


def make_labels(styles: Sequence[str], groups: Sequence[str], names: Sequence[str], counted: Sequence[bool]) -> Labels:
    """Make labels of pictures with style ("fluent_3d"), group ("Flags") and name; `counted` marks training pictures.

    A label needs at least MIN_PICTURES counted pictures.
    """
    keys = [(style, group, subgroup_of(group, name)) for style, group, name in zip(styles, groups, names, strict=True)]
    enough = _large_keys(keys, counted)
    keys = [key if key in enough else _rest(key) for key in keys]
    enough = _large_keys(keys, counted)
    ordered = [
        (style, group, subgroup)
        for style in sorted(set(styles))
        for group in SHORT_GROUPS
        for subgroup in SUBGROUPS[group]
        if (style, group, subgroup) in enough
    ]
    index = {key: i for i, key in enumerate(ordered)}
    members: dict[str, list[str]] = {}
    for style, group, subgroup in ordered:
        coarse = f"{style_name(style)} {SHORT_GROUPS[group]}"
        members.setdefault(coarse, []).append(f"{style_name(style)} {subgroup}")
    return Labels(
        names=tuple(f"{style_name(style)} {subgroup}" for style, _, subgroup in ordered),
        of_picture=tuple(index.get(key, len(ordered)) for key in keys),
        groups={coarse: tuple(fine) for coarse, fine in members.items()},
    )


def _large_keys(keys: Sequence[tuple], counted: Sequence[bool]) -> set[tuple]:
    counts = Counter(key for key, count in zip(keys, counted, strict=True) if count)
    return {key for key, count in counts.items() if count >= MIN_PICTURES}


def _rest(key: tuple[str, str, str]) -> tuple[str, str, str]:
    style, group, _ = key
    return style, group, list(SUBGROUPS[group])[-1]
