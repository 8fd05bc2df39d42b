"""Names and writes of files: names from a pattern, all checked before the first picture is drawn, and writes that
leave a whole file or none."""

import errno
import os
import re
import stat
import string
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from fastdiff.errors import InputError
from fastdiff.requests.completion import Cell
from fastdiff.requests.request import SubjectName
from fastdiff.runs import temporaries

_OTHER_FORMATS = (".npy", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")


def default_pattern(subject: SubjectName | None) -> str:
    """The format string of a picture's name in a folder."""
    return "{seed}.png" if subject is None else f"{{{subject}}}-{{seed}}.png"


def as_pattern(out: str, subject: SubjectName | None) -> str:
    """A format string of {seed} and the `subject`, {label} or {prompt}, for the folder, PNG file or pattern `out`.

    InputError for a field we do not have and for a name that is not PNG.
    """
    name = default_pattern(subject)
    if not out or "\0" in out:
        raise InputError(f"-o {out!r} is not a path; name a folder, a PNG file or a pattern such as out/{name}")
    if os.path.isdir(out):
        return str(Path(out.replace("{", "{{").replace("}", "}}")) / name)
    has_fields = _check_fields(out, subject)
    suffix = "" if out.endswith(("/", os.sep)) else Path(out).suffix.lower()
    if suffix == ".png":
        return out
    if suffix in _OTHER_FORMATS or has_fields:
        raise InputError(f"-o {out} is not the name of a PNG; end it with .png, or name a folder")
    return str(Path(out) / name)


def _check_fields(pattern: str, subject: SubjectName | None) -> bool:
    """Whether `pattern` has fields; InputError for one that is not {seed} (perhaps {seed:06d}) or the subject's."""
    try:
        fields = [part[1:] for part in string.Formatter().parse(pattern) if part[1] is not None]
    except ValueError as error:
        raise InputError(f"-o {pattern} is not a pattern ({error}); write {{{{ for a brace that is meant") from None
    for name, spec, conversion in fields:
        known = (name == "seed" and re.fullmatch(r"(\d{1,2}d?)?", spec or "")) or (
            name in get_args(SubjectName) and not spec
        )
        if not known or conversion:
            raise InputError(
                f"-o {pattern} has an unknown field; there are {{seed}}, {{seed:06d}}, {{label}} and {{prompt}}"
            )
        if name in get_args(SubjectName) and name != subject:
            raise InputError(f"-o {pattern} asks for a {name}, but these pictures have none; leave out {{{name}}}")
    return bool(fields)


def picture_paths(pattern: str, cells: Iterable[Cell], names: Iterable[str | None]) -> list[Path]:
    """The path of each picture, in order; `names`: of their labels or prompts. InputError where two agree."""
    paths: dict[str, Path] = {}
    for cell, name in zip(cells, names, strict=True):
        path = Path(pattern.format(seed=cell.seed, label=name, prompt=name))
        key = file_key(path)
        if key in paths:
            field = "{label}" if cell.prompt is None else "{prompt}"
            raise InputError(f"more than one picture would be {path}; put {{seed}} and {field} in -o, or give a folder")
        paths[key] = path
    return list(paths.values())


def file_key(path: Path) -> str:
    """A text that is equal for paths that may be one file: on macOS and Windows also for those of another case."""
    return os.path.abspath(path).casefold()


def grid_path(name: str) -> Path:
    """InputError unless `name` is the name of a PNG."""
    if "\0" in name or Path(name).suffix.lower() != ".png":
        raise InputError(f"--grid {name!r} is not the name of a PNG; end it with .png")
    return Path(name)


def check(paths: Sequence[Path], may_exist: bool, flag: str = "-o", *, may_resume: bool = True) -> None:
    """InputError unless every path can be written: no such file yet (or `may_exist`), and a folder that takes files.

    `flag` is the one that the message says names another place; `may_resume`: whether it speaks of --resume.
    """
    kept = " --resume keeps it if this run would draw the same," if may_resume else ""
    for path in paths:
        mode = _mode(path, flag)
        if mode is not None and stat.S_ISDIR(mode):
            raise InputError(f"{path} is a folder; name another file with {flag}")
        if not may_exist and (mode is not None or os.path.lexists(path)):
            raise InputError(f"{path} already exists; --overwrite replaces it,{kept} {flag} names another place")
        if any(len(os.fsencode(part)) > 255 for part in path.parts):
            raise InputError(f"{path} cannot be written (a name in it is too long); name another file with {flag}")
    for folder in {path.parent for path in paths}:
        _check_folder(folder, flag)


def _mode(path: Path, flag: str) -> int | None:
    """The mode of what is at `path`, None where nothing is. InputError where the system does not tell."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror})"
        raise InputError(f"{reason}; name another place with {flag}") from None
    except UnicodeEncodeError as error:
        reason = f"{path} cannot be written (names of files are {error.encoding} in this locale)"
        raise InputError(f"{reason}; set a locale of UTF-8, or name another file with {flag}") from None


def _check_folder(folder: Path, flag: str) -> None:
    """Try a nameless file in `folder`, or in the nearest folder above it that exists: access bits do not tell all."""
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        reason = "it is not a folder" if error.errno == errno.ENOTDIR or nearest.is_file() else error.strerror
        raise InputError(f"cannot write to {nearest} ({reason}); name another place with {flag}") from None


def write(path: Path, data: bytes, overwrite: bool) -> None:
    """Write a file whole or not at all, and replace none without `overwrite`. OSError with a one-line message."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, data) as temporary:
            (os.replace if overwrite else rename_exclusive)(temporary, path)
    except FileExistsError:
        raise OSError(f"{path} appeared while it was being drawn and was kept; draw again with another -o") from None
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}); make room or name another place with -o") from error


def rename_exclusive(source: Path, target: Path) -> None:
    """Give `source` the name `target`; FileExistsError where that is taken, even by a process that is quicker."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: an empty file claims the name first
        target.touch(exist_ok=False)
        os.replace(source, target)
