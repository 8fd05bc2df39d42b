"""A mutation: a change of one place in the code that some test must catch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A text that occurs once in a file, its replacement, and the tests that must then fail."""

    file: str  # relative to the root of the tree
    old: str
    new: str
    tests: str  # files or node ids, separated by blanks
    interpreted: bool = False  # whether they run with TRITON_INTERPRET=1

    def applied_to(self, root: Path) -> str:
        """Return the file's changed text. Raises ValueError unless the old text occurs exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.file} has this text {text.count(self.old)} times instead of once: {self.old!r}")
        return text.replace(self.old, self.new)


Rooms = Mapping[str, Sequence[Mutation]]


def named(rooms: Rooms) -> dict[str, Mutation]:
    """Return the mutations by name, which is the room and the number in it."""
    return {f"{room}-{i}": mutation for room, mutations in rooms.items() for i, mutation in enumerate(mutations, 1)}
