"""Folders of other commits, for `--base REV`."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def checkout(rev: str, folder: Path) -> Iterator[Path]:
    """The folder `rev`, or a worktree of the commit `rev` at `folder`, which goes afterwards. Raises as `git`."""
    if Path(rev, "fastdiff", "__init__.py").is_file():
        yield Path(rev).resolve()
        return
    git(ROOT, "worktree", "add", "--detach", str(folder), rev)
    try:
        yield folder
    finally:
        git(ROOT, "worktree", "remove", "--force", str(folder))


def git(folder: Path, *args: str) -> str:
    """Its output without the line's end. LookupError with its complaint, OSError where there is no git."""
    done = subprocess.run(["git", "-C", folder, *args], capture_output=True, text=True)
    if done.returncode:
        raise LookupError(done.stderr.strip())
    return done.stdout.strip()


def commit(folder: Path) -> str:
    """The commit that `folder` is a checkout of; its path where that has no history."""
    with contextlib.suppress(LookupError, OSError):
        if (folder / ".git").exists():
            return git(folder, "describe", "--always", "--dirty", "--abbrev=10")
    return str(folder)
