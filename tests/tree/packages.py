"""Building the wheel and the source distribution, and running commands."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.waiting import TIMEOUT


def run(command: Sequence[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(target: str, tree: Path, folder: Path) -> Path:
    """Build the `wheel` or the `sdist` of a tree into an empty folder, and return its path."""
    run([sys.executable, "-I", "-m", "hatchling", "build", "-t", target, "-d", folder], tree)
    (path,) = folder.iterdir()
    return path
