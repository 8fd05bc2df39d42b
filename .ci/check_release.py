#!/usr/bin/env python3
"""Check that a tag can be released: .ci/check_release.py v0.2.0 https://github.com/OWNER/REPOSITORY

The tag is the package's version, CHANGELOG.md has a dated section for it, and pyproject.toml names the repository.
"""

import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]


def faults(tag: str, repository: str) -> list[str]:
    """Return a line for each reason not to release."""
    version = re.findall(r'^__version__ = "(.*)"$', (ROOT / "fastdiff/__init__.py").read_text(), re.MULTILINE)[0]
    changes = re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    found = []
    if tag != f"v{version}":
        found.append(f"tag {tag}: fastdiff/__init__.py has version {version}; tag the commit as v{version}")
    if version not in changes[:1]:
        found.append(f"CHANGELOG.md: its newest dated section is not {version}; give Unreleased its version and date")
    if repository != source:
        found.append(f"pyproject.toml: Source is {source}, but this is {repository}; correct its addresses")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(faults(*sys.argv[1:])) or None)
