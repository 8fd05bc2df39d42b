"""Write the tables of measurements into the documents, from benchmarks/results.

    python benchmarks/write_tables.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; `documents/tables.py` defines it. Never edit it by
hand. `--check` writes nothing; it exits with code 1 if a document differs from what would be written.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.documents.marks import filled
from benchmarks.documents.tables import TABLES

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    check = parser.parse_args().check
    outdated = {path: text for path, text in written() if text != path.read_text()}
    for path, text in outdated.items():
        if not check:
            path.write_text(text)
        done = "out of date; run python benchmarks/write_tables.py" if check else "written"
        print(f"{path.relative_to(ROOT)}: {done}")
    return int(check and bool(outdated))


def documents() -> list[Path]:
    """Return the documents that may have tables."""
    return [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written() -> Iterator[tuple[Path, str]]:
    """Yield each document with the text that it should have."""
    for path in documents():
        yield path, filled(path.read_text(), lambda name: TABLES[name].markdown())


if __name__ == "__main__":
    sys.exit(main())
