"""The tables of mutations, `rooms/*.txt`: a paragraph per mutation, like a patch, under its room in brackets.

    FILE: TEST TEST ...     relative to the root of the tree; TRITON_INTERPRET=1 before the tests sets it for them
    - the old text          any text that occurs once in the file, including indentation
    + the new text          omitted for a deletion

A line that starts with # is a comment.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.mutations.mutation import Mutation, Rooms

INTERPRETED = "TRITON_INTERPRET=1 "


def read_rooms(folder: Path = Path(__file__).parent / "rooms") -> Rooms:
    """Return the mutations in the tables of a folder, by room."""
    rooms: dict[str, list[Mutation]] = {}
    for path in sorted(folder.glob("*.txt")):
        room: list[Mutation] = []
        for first, *rest in _paragraphs(path.read_text(encoding="utf-8")):
            if first.startswith("["):
                room = rooms.setdefault(first.strip("[]"), [])
            else:
                room.append(_mutation(first, rest))
    return rooms


def _paragraphs(text: str) -> Iterator[list[str]]:
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        if lines:
            yield lines


def _mutation(first: str, rest: list[str]) -> Mutation:
    file, _, tests = first.partition(": ")
    old, new = ("\n".join(line[2:] for line in rest if line[0] == sign) for sign in "-+")
    return Mutation(file, old, new, tests.removeprefix(INTERPRETED), tests.startswith(INTERPRETED))
