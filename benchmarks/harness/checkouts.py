"""Checkouts of other commits, for `--base REV`."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def checkout(rev: str, folder: Path) -> Iterator[Path]:
    """Yield the checkout `rev`, or a temporary worktree of commit `rev` at `folder`. Raises what `git` raises."""
    if Path(rev, "fastdiff", "__init__.py").is_file():
        yield Path(rev).resolve()
        return
    git(ROOT, "worktree", "add", "--detach", str(folder), rev)
    try:
        yield folder
    finally:
        git(ROOT, "worktree", "remove", "--force", str(folder))


def git(folder: Path, *args: str) -> str:
    """Run git and return its stripped output. Raises LookupError with git's message, or OSError without git."""
    done = subprocess.run(["git", "-C", folder, *args], capture_output=True, text=True)
    if done.returncode:
        raise LookupError(done.stderr.strip())
    return done.stdout.strip()


def commit(folder: Path) -> str:
    """Return the commit that is checked out in `folder`, or the folder's path if it is no git repository."""
    with contextlib.suppress(LookupError, OSError):
        if (folder / ".git").exists():
            return git(folder, "describe", "--always", "--dirty", "--abbrev=10")
    return str(folder)
