"""File names from a pattern, checked before the first picture is drawn, and writes that leave a whole file or none."""

import contextlib
import errno
import itertools
import os
import re
import stat
import string
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from fastdiff.errors import InputError
from fastdiff.execution import temporaries
from fastdiff.requests.completion import Cell
from fastdiff.requests.request import SubjectName

_OTHER_FORMATS = (".npy", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")


def default_pattern(subject: SubjectName | None) -> str:
    """Return the format string of a picture's file name in a folder."""
    return "{seed}.png" if subject is None else f"{{{subject}}}-{{seed}}.png"


def as_pattern(out: str, subject: SubjectName | None) -> str:
    """Return a format string for the folder, PNG file or pattern `out`.

    Its fields are `{seed}` and the `subject`, `{label}` or `{prompt}`. Raises InputError for an unknown field and for a
    file name that does not end in .png.
    """
    name = default_pattern(subject)
    if not out or "\0" in out:
        raise InputError(f"-o {out!r} is not a path; give a folder, a PNG file or a pattern such as out/{name}")
    if os.path.isdir(out):
        return str(Path(out.replace("{", "{{").replace("}", "}}")) / name)
    has_fields = _check_fields(out, subject)
    suffix = "" if out.endswith(("/", os.sep)) else Path(out).suffix.lower()
    if suffix == ".png":
        return out
    if suffix in _OTHER_FORMATS or has_fields:
        raise InputError(f"-o {out} is not the name of a PNG; end it with .png, or give a folder")
    return str(Path(out) / name)


def _check_fields(pattern: str, subject: SubjectName | None) -> bool:
    """Return whether `pattern` has fields. InputError for a field other than `{seed}`, `{seed:06d}` or the subject."""
    try:
        fields = [part[1:] for part in string.Formatter().parse(pattern) if part[1] is not None]
    except ValueError as error:
        raise InputError(f"-o {pattern} is not a valid pattern ({error}); write {{{{ for a literal brace") from None
    for name, spec, conversion in fields:
        known = (name == "seed" and re.fullmatch(r"(\d{1,2}d?)?", spec or "")) or (
            name in get_args(SubjectName) and not spec
        )
        if not known or conversion:
            raise InputError(
                f"-o {pattern} has an unknown field; use only {{seed}}, {{seed:06d}}, {{label}} or {{prompt}}"
            )
        if name in get_args(SubjectName) and name != subject:
            raise InputError(f"-o {pattern} has {{{name}}}, but these pictures have no {name}; leave it out")
    return bool(fields)


def picture_paths(pattern: str, cells: Iterable[Cell], names: Iterable[str | None]) -> list[Path]:
    """Return the path of each picture, in order. InputError if two paths are equal.

    `names` are the file name parts of the pictures' labels or prompts.
    """
    paths: dict[str, Path] = {}
    for cell, name in zip(cells, names, strict=True):
        path = Path(pattern.format(seed=cell.seed, label=name, prompt=name))
        key = file_key(path)
        if key in paths:
            field = "{label}" if cell.prompt is None else "{prompt}"
            raise InputError(f"two pictures have the name {path}; put {{seed}} and {field} in -o, or give a folder")
        paths[key] = path
    return list(paths.values())


def file_key(path: Path) -> str:
    """Return an equal text for paths that may be the same file, also for paths that differ only in letter case.

    File systems of macOS and Windows ignore case.
    """
    return os.path.abspath(path).casefold()


def grid_path(name: str) -> Path:
    """Return `name` as a path. InputError if it does not end in .png."""
    if "\0" in name or Path(name).suffix.lower() != ".png":
        raise InputError(f"--grid {name!r} is not the name of a PNG; end it with .png")
    return Path(name)


def numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, and then the names of further files like it: a.png, a-2.png, a-3.png ..."""
    yield path
    for number in itertools.count(2):
        yield path.with_stem(f"{path.stem}-{number}")


def check(paths: Sequence[Path], flag: str = "-o") -> None:
    """Raise InputError unless every path can be a file, and its folder takes files. A path may exist.

    The message says which `flag` chooses another place.
    """
    for path in paths:
        mode = _mode(path, flag)
        if mode is not None and stat.S_ISDIR(mode):
            raise InputError(f"{path} is a folder; choose another file with {flag}")
        if any(len(os.fsencode(part)) > 255 for part in path.parts):
            raise InputError(f"{path} cannot be written (a name in it is too long); choose another file with {flag}")
    for folder in {path.parent for path in paths}:
        _check_folder(folder, flag)


def _mode(path: Path, flag: str) -> int | None:
    """Return the mode of the file at `path`, or None if there is none. InputError if it cannot be read."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        raise InputError(f"{reason}; choose another place with {flag}") from None
    except UnicodeEncodeError as error:
        reason = f"{path} cannot be written (file names are {error.encoding} in this locale)"
        raise InputError(f"{reason}; set a UTF-8 locale, or choose another file with {flag}") from None


def _check_folder(folder: Path, flag: str) -> None:
    """Try to create a file in `folder`, or in its nearest existing parent: permission bits do not tell everything."""
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        reason = "it is not a folder" if error.errno == errno.ENOTDIR or nearest.is_file() else error.strerror
        raise InputError(f"cannot write to {nearest} ({reason}); choose another place with {flag}") from None


def write(path: Path, data: bytes, overwrite: bool) -> None:
    """Write a file whole or not at all. OSError with a one-line message.

    Without `overwrite`, FileExistsError if there is a file, even if another process just created it.
    """
    try:
        with contextlib.suppress(FileExistsError):  # the parent is a file: the next line fails
            path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, data) as temporary:
            (os.replace if overwrite else rename_exclusive)(temporary, path)
    except FileExistsError:
        raise FileExistsError(f"{path} appeared during the drawing and was kept; choose another place") from None
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}); free space, or choose another place with -o") from error


def rename_exclusive(source: Path, target: Path) -> None:
    """Rename `source` to `target`. FileExistsError if `target` exists, even if another process just created it."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file claims the name first
        target.touch(exist_ok=False)
        os.replace(source, target)
