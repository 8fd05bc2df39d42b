"""Shards on their way to the disk: pictures are encoded and written beside the drawing, shards committed in turn."""

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from fastdiff.bulk.folder import Folder, data_sha256, data_size, naming_disk
from fastdiff.bulk.formats import FORMS, Encoded
from fastdiff.bulk.plan import FormatName, Shard
from fastdiff.runs.drawing import Finished
from fastdiff.runs.writing import Writer

T = TypeVar("T")
MOST_THREADS = 8


Batch = Callable[[], Sequence[Finished]]  # waits for the pictures of a batch, which a GPU may still draw


class Job:
    """The pictures of one shard on their way to the disk."""

    def __init__(self, writer: "ShardWriter", shard: Shard) -> None:
        """OSError where the disk refuses."""
        self.shard = shard
        self.aside = writer.folder.path / f".{shard.name}-{secrets.token_hex(8)}.tmp"
        self._writer = writer
        self._batches: list[Future[list[Future[Encoded]]]] = []
        with naming_disk(self.aside):
            writer.form.begin(self.aside)

    def add(self, batch: Batch) -> None:
        """Take a batch, once the one before it is drawn. What drawing raises, and the disk, is raised by `write`."""
        self._batches.append(self._writer.fetch(lambda: self._writer.pictures.submit(self._encode, batch())))

    def _encode(self, finished: Finished) -> Encoded:
        return self._writer.form.encode(self.aside, self.shard.key(finished.place), finished)

    def write(self) -> tuple[int, str, str]:
        """Wait for all pictures; returns the bytes, the SHA-256 and that of the pixels. OSError of one line."""
        with naming_disk(self._writer.folder.data(self.shard)):
            pictures = [picture.result() for batch in self._batches for picture in batch.result()]
            self._writer.form.assemble(self.aside, pictures)
            pixels = hashlib.sha256("".join(picture.pixels_sha256 for picture in pictures).encode())
            return data_size(self.aside), data_sha256(self.aside), pixels.hexdigest()

    def abandon(self) -> None:
        """Remove what is written. Nothing is raised."""
        for batch in self._batches:
            with contextlib.suppress(BaseException):
                pictures = batch.result()
                for picture in pictures:
                    picture.cancel()
                wait(pictures)
        remove(self.aside)


class ShardWriter:
    """A writer of pictures, a thread that fetches batches from the GPU, and one that commits shards.

    Each of the two has one at a time in hand and none waiting: a GPU has work while a batch is fetched, and no more.
    """

    def __init__(self, folder: Folder, format: FormatName, threads: int) -> None:
        self.folder, self.form = folder, FORMS[format]
        self.pictures = Writer(min(threads, MOST_THREADS))
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._fetched: Future | None = None
        self._committing = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._last: Future[None] | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._committing.shutdown()
        self._fetching.shutdown()
        self.pictures.close()

    def fetch(self, fetch: Callable[[], T]) -> Future[T]:
        """Have `fetch` called beside the drawing, once the one before it has ended."""
        if self._fetched is not None:
            wait([self._fetched])
        found = self._fetched = self._fetching.submit(fetch)
        return found

    def commit(self, commit: Callable[[], None]) -> None:
        """Have `commit` called beside the drawing, once the one before it has ended; raises what that raised."""
        self.wait()
        self._last = self._committing.submit(commit)

    def wait(self) -> None:
        """Wait for the commit under way, and raise what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def remove(path: Path) -> None:
    """Remove a file or a folder, as far as that can be done."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_abandoned(folder: Folder, shard: Shard) -> None:
    """Remove what dead workers left of a shard; to be called by the one that has claimed it."""
    for path in folder.path.glob(f".{shard.name}-*.tmp"):
        remove(path)
