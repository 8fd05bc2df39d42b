"""The folder of a bulk run: the plan, the pictures of each shard, and the state of each shard.

::

    plan.json              the plan, and the fingerprint of its workers
    000012/, .tar, .npz    the pictures of shard 12
    shards/000012.json     written last: the shard is done if this file and the pictures agree

Every file is written under a temporary name, synced and renamed. Imports no torch.
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
from fastdiff.execution import temporaries
from fastdiff.requests.png import canonical_json
from fastdiff.runs.files import rename_exclusive

SCHEMA = 1
PLAN = "plan.json"
SUFFIXES = {"png": "", "webdataset": ".tar", "npz": ".npz"}
JOINED = "samples"  # name of the npz of all pictures
_SHOWN = 3  # different settings in a message
_CHUNK = 2**22


@dataclass(frozen=True)
class Record:
    """The content of a finished shard's JSON file."""

    shard: int
    count: int  # number of pictures
    bytes: int  # size of the file, or of all files in the folder
    sha256: str  # of the file, or of the names and hashes of the files in the folder
    pixels_sha256: str  # of the pixels only, in order: a PNG also contains the GPU's name
    seconds: float  # from the first step to the commit
    gpu_seconds: float | None  # time the GPU was busy; None on a CPU
    worker: str  # host and process id
    fingerprint: str  # its digest

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """Return the record in `path`, or None if it is missing or incomplete."""
        found = read_object(path)
        names = {field.name for field in fields(cls)}
        return cls(**found) if found is not None and found.keys() == names else None


class Folder:
    """The folder `path` of a run. It need not exist yet."""

    def __init__(self, path: str | Path, format: str) -> None:
        self.path = Path(path)
        self.shards = self.path / "shards"
        self.suffix = SUFFIXES[format]

    def check(self, plan: Plan) -> None:
        """Raise InputError if the folder holds anything other than this plan's shards."""
        saved = read_object(self.path / PLAN)
        if saved is None:
            self._check_free()
        else:
            check_plan(self.path, plan, saved)

    def open(self, plan: Plan, fingerprint: Fingerprint, *, allow_mixed: bool = False) -> None:
        """Write plan.json, or check that the existing one agrees. InputError names the difference.

        allow_mixed: accept workers with other fingerprints too. OSError if the folder cannot be written.
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
            with contextlib.suppress(FileExistsError):  # another worker wrote it first
                write_file(self.path / PLAN, _as_bytes(content), exclusive=True)
        with naming_disk(self.shards):
            self.shards.mkdir(exist_ok=True)
        for folder in (self.path, self.shards):
            temporaries.remove_abandoned(folder)
        saved = read_object(self.path / PLAN)
        if saved is None:
            raise OSError(f"{self.path / PLAN} cannot be read back; choose another folder with --out")
        check_plan(self.path, plan, saved)
        if not allow_mixed:
            self._check_bits(fingerprint, saved)

    def check_files(self, model_files: str) -> None:
        """Raise InputError if the run began with model files of another SHA-256 than `model_files`."""
        saved = read_object(self.path / PLAN)
        if saved is not None:
            self._check_bits({**saved["fingerprint"], "model files": model_files}, saved)

    def data(self, shard: Shard) -> Path:
        """Return the file or folder of a shard's pictures."""
        return self.path / f"{shard.name}{self.suffix}"

    def record(self, shard: Shard) -> Path:
        """Return the JSON file that marks a shard as done."""
        return self.shards / f"{shard.name}.json"

    def error(self, shard: Shard) -> Path:
        """Return the JSON file that says why a shard was given up."""
        return self.shards / f"{shard.name}.error.json"

    def is_done(self, shard: Shard) -> bool:
        """Return whether a shard's pictures and JSON file exist and agree in size. `verify` checks every byte."""
        record = Record.read(self.record(shard))
        return record is not None and record.count == len(shard.cells) and _size(self.data(shard)) == record.bytes

    def is_complete(self, plan: Plan) -> bool:
        """Return whether plan.json and all files of the plan are complete."""
        if read_object(self.path / PLAN) is None:
            return False
        joined = plan.format != "npz" or (self.path / f"{JOINED}.npz").exists()
        return joined and all(map(self.is_done, plan.shards))

    def verify(self, shard: Shard) -> str | None:
        """Return what is wrong with a finished shard, or None if it is intact or not drawn yet."""
        if not self.record(shard).exists():
            return None
        record = Record.read(self.record(shard))
        if record is None:
            return "its JSON file is damaged"
        data = self.data(shard)
        if not data.exists():
            return f"{data.name} is missing"
        if record.count != len(shard.cells) or data_sha256(data) != record.sha256:
            return f"{data.name} is damaged"
        return None

    def commit(self, shard: Shard, aside: Path, record: Record) -> None:
        """Move the pictures from `aside` to their place, then mark the shard as done. OSError if the disk refuses."""
        with naming_disk(self.data(shard)):
            if aside.is_dir() and self.data(shard).exists():  # left by a worker that died before writing the JSON file
                shutil.rmtree(self.data(shard))
            os.replace(aside, self.data(shard))
            sync_folder(self.path)
        write_file(self.record(shard), _as_bytes(asdict(record)))

    def forget(self, shard: Shard) -> None:
        """Remove the mark of a finished shard, so that it is drawn again."""
        with naming_disk(self.record(shard)):
            self.record(shard).unlink(missing_ok=True)

    def _check_bits(self, fingerprint: Fingerprint, saved: Mapping[str, Any]) -> None:
        """Raise InputError with the differences from the fingerprint in plan.json, if there are any."""
        unlike = differences(fingerprint, saved["fingerprint"])
        if unlike:
            raise InputError(
                f"bits would differ from those in {self.path}: this is {'; '.join(unlike[:_SHOWN])}; "
                "use the same setup as before, or give --allow-mixed"
            )

    def _check_free(self) -> None:
        """Raise InputError if the folder holds other files. Names that begin with a dot belong to other workers."""
        try:
            found = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"--out {self.path} cannot be read ({error.strerror}); choose another folder") from None
        if found and not (self.path / PLAN).exists():
            raise InputError(f"--out {self.path} holds {found[0]} but no {PLAN}; choose an empty or new folder")


def check_plan(folder: Path, plan: Plan, saved: Mapping[str, Any]) -> None:
    """Raise InputError with the settings in which `plan` differs from plan.json, if any."""
    if saved.get("schema") != SCHEMA or not isinstance(saved.get("plan"), dict):
        raise InputError(f"{folder / PLAN} is from another version of fastdiff; choose another folder with --out")
    unlike = differences(plan.record, saved["plan"])
    if unlike:
        raise InputError(
            f"{folder} holds another run: this one has {'; '.join(unlike[:_SHOWN])}; "
            "choose another folder with --out, or give the settings of that run"
        )


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no complete one."""
    try:
        found = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write a file whole or not at all. FileExistsError if `exclusive` and it exists, else a one-line OSError."""
    with naming_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporaries.holding(path.parent, data) as temporary:
            (rename_exclusive if exclusive else os.replace)(temporary, path)
        sync_folder(path.parent)


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with `write_file`."""
    write_file(path, _as_bytes(content))


@contextlib.contextmanager
def naming_disk(path: Path) -> Iterator[None]:
    """Turn disk errors into a one-line OSError. FileExistsError and FileNotFoundError, from other processes, pass."""
    try:
        yield
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot write {path} ({reason}); free space, and run the same command again") from error


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, if the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def data_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and hashes of the files in a folder."""
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
    """Return the bytes of a file, or of the files in a folder. OSError if it does not exist."""
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
