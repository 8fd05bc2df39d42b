"""The folder of a bulk run: plan.json, the shards' files, and what is known of each shard.

    plan.json              the plan, and the fingerprint of the workers that draw it
    000012/, .tar, .npz    the pictures of shard 12
    shards/000012.json     written last: the shard is done where it and the pictures agree

Every file is written aside, synced, and renamed. Imports no torch.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from fastdiff.bulk.fingerprint import Fingerprint, differences
from fastdiff.bulk.plan import Plan, Shard
from fastdiff.checkpoints.json_files import parse_json
from fastdiff.errors import InputError
from fastdiff.requests.png import canonical_json
from fastdiff.runs import temporaries
from fastdiff.runs.files import rename_exclusive

SCHEMA = 1
PLAN = "plan.json"
SUFFIXES = {"png": "", "webdataset": ".tar", "npz": ".npz"}
JOINED = "samples"  # the name of all pictures in one npz
_SHOWN = 3  # of the settings that differ
_CHUNK = 2**22


@dataclass(frozen=True)
class Record:
    """The content of the JSON file of a shard that is done."""

    shard: int
    count: int  # of its pictures
    bytes: int  # of their file; of a folder, of all files in it
    sha256: str  # of their file; of a folder, of its files' names and their own
    pixels_sha256: str  # of the pixels alone, in order: a PNG also names the card that drew it
    seconds: float  # from the first step to the commit
    gpu_seconds: float | None  # in which the GPU was at work; None on a CPU
    worker: str  # host and process
    fingerprint: str  # its digest

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """That in `path`; None where there is none, or no whole one."""
        found = read_object(path)
        names = {field.name for field in fields(cls)}
        return cls(**found) if found is not None and found.keys() == names else None


class Folder:
    """The folder `path`, which need not be there yet."""

    def __init__(self, path: str | Path, format: str) -> None:
        self.path = Path(path)
        self.shards = self.path / "shards"
        self.suffix = SUFFIXES[format]

    def check(self, plan: Plan) -> None:
        """InputError where the folder holds anything else than this plan's shards."""
        saved = read_object(self.path / PLAN)
        if saved is None:
            self._check_free()
        else:
            check_plan(self.path, plan, saved)

    def open(self, plan: Plan, fingerprint: Fingerprint, *, allow_mixed: bool = False) -> None:
        """Write plan.json, unless it is there already, and agrees. InputError that names the difference.

        allow_mixed: take workers of other fingerprints too. OSError where nothing can be written.
        """
        self.check(plan)
        identity = hashlib.sha256(canonical_json(plan.record | {"files": fingerprint["model files"]}).encode())
        content = {
            "schema": SCHEMA,
            "sha256": identity.hexdigest(),
            "plan": plan.record,
            "fingerprint": dict(fingerprint),
        }
        if not (self.path / PLAN).exists():
            with contextlib.suppress(FileExistsError):  # another worker was quicker
                write_file(self.path / PLAN, _as_bytes(content), exclusive=True)
        with naming_disk(self.shards):
            self.shards.mkdir(exist_ok=True)
        saved = read_object(self.path / PLAN)
        if saved is None:
            raise OSError(f"{self.path / PLAN} cannot be read back; name another folder with --out")
        check_plan(self.path, plan, saved)
        unlike = differences(fingerprint, saved["fingerprint"])
        if unlike and not allow_mixed:
            raise InputError(
                f"{self.path} is drawn with other bits: here {'; '.join(unlike[:_SHOWN])}; "
                "use what it was begun with, or give --allow-mixed"
            )

    def data(self, shard: Shard) -> Path:
        """The file or folder of its pictures."""
        return self.path / f"{shard.name}{self.suffix}"

    def record(self, shard: Shard) -> Path:
        """The JSON file that says that it is done."""
        return self.shards / f"{shard.name}.json"

    def error(self, shard: Shard) -> Path:
        """The JSON file that says why it is given up."""
        return self.shards / f"{shard.name}.error.json"

    def is_done(self, shard: Shard) -> bool:
        """Whether its pictures and its JSON file are there, and agree in size; `verify` compares every byte."""
        record = Record.read(self.record(shard))
        return record is not None and record.count == len(shard.cells) and _size(self.data(shard)) == record.bytes

    def is_complete(self, plan: Plan) -> bool:
        """Whether all that a plan asks for is there."""
        joined = plan.format != "npz" or (self.path / f"{JOINED}.npz").exists()
        return joined and all(map(self.is_done, plan.shards))

    def verify(self, shard: Shard) -> str | None:
        """Return what is wrong with a shard that has a JSON file; None where it is sound, or not drawn yet."""
        if not self.record(shard).exists():
            return None
        record = Record.read(self.record(shard))
        if record is None:
            return "its JSON file is damaged"
        data = self.data(shard)
        if not data.exists():
            return f"{data.name} is gone"
        if record.count != len(shard.cells) or data_sha256(data) != record.sha256:
            return f"{data.name} is not what was written"
        return None

    def commit(self, shard: Shard, aside: Path, record: Record) -> None:
        """Give the pictures in `aside` their name, then say that they are done. OSError where the disk refuses."""
        with naming_disk(self.data(shard)):
            if aside.is_dir() and self.data(shard).exists():  # of a worker that died before its JSON file
                shutil.rmtree(self.data(shard))
            os.replace(aside, self.data(shard))
            sync_folder(self.path)
        write_file(self.record(shard), _as_bytes(asdict(record)))

    def forget(self, shard: Shard) -> None:
        """Let a shard be drawn again."""
        with naming_disk(self.record(shard)):
            self.record(shard).unlink(missing_ok=True)

    def _check_free(self) -> None:
        """InputError where something is in the folder; names that begin with a dot are of other workers."""
        try:
            found = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"--out {self.path} cannot be read ({error.strerror}); name another folder") from None
        if found and not (self.path / PLAN).exists():
            raise InputError(f"--out {self.path} holds {found[0]} and no whole {PLAN}; name an empty or new folder")


def check_plan(folder: Path, plan: Plan, saved: Mapping[str, Any]) -> None:
    """InputError that names the settings in which `plan` differs from the one of a plan.json."""
    if saved.get("schema") != SCHEMA or not isinstance(saved.get("plan"), dict):
        raise InputError(f"{folder / PLAN} is of another version of fastdiff; name another folder with --out")
    unlike = differences(plan.record, saved["plan"])
    if unlike:
        raise InputError(
            f"{folder} holds another run: this one has {'; '.join(unlike[:_SHOWN])}; "
            "name another folder with --out, or give what that was begun with"
        )


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no whole one."""
    try:
        found = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write a file whole or not at all. FileExistsError where it is there and `exclusive`, else OSError of one line."""
    with naming_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, data) as temporary:
            (rename_exclusive if exclusive else os.replace)(temporary, path)
        sync_folder(path.parent)


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, as `write_file`."""
    write_file(path, _as_bytes(content))


@contextlib.contextmanager
def naming_disk(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into an OSError of one line; what others made or removed meanwhile is no refusal."""
    try:
        yield
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot write {path} ({reason}); make room, and run the same command again") from error


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def data_sha256(path: Path) -> str:
    """That of a file, or of the names and hashes of the files in a folder."""
    if not path.is_dir():
        return _file_sha256(path)
    names = sorted(os.listdir(path))
    return hashlib.sha256("".join(f"{name} {_file_sha256(path / name)}\n" for name in names).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(partial(file.read, _CHUNK), b""):
            found.update(chunk)
    return found.hexdigest()


def data_size(path: Path) -> int:
    """The bytes of a file, or of the files in a folder. OSError where it is not there."""
    if not path.is_dir():
        return path.stat().st_size
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries)


def _size(path: Path) -> int | None:
    try:
        return data_size(path)
    except OSError:
        return None


def _as_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
