"""Write shards in threads while drawing goes on: encode and write the pictures, then commit one shard at a time."""

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


Batch = Callable[[], Sequence[Finished]]  # waits for a batch's pictures, which the GPU may still be computing


class Job:
    """The pictures of one shard while they are written to disk."""

    def __init__(self, writer: "ShardWriter", shard: Shard) -> None:
        """Create the temporary file or folder of the shard. OSError if the disk refuses."""
        self.shard = shard
        self.aside = writer.folder.path / f".{shard.name}-{secrets.token_hex(8)}.tmp"
        self._writer = writer
        self._batches: list[Future[list[Future[Encoded]]]] = []
        with naming_disk(self.aside):
            writer.form.begin(self.aside)

    def add(self, batch: Batch) -> None:
        """Add a batch, once the previous one is drawn. `write` raises the errors of drawing and of the disk."""
        self._batches.append(self._writer.fetch(lambda: self._writer.pictures.submit(self._encode, batch())))

    def _encode(self, finished: Finished) -> Encoded:
        return self._writer.form.encode(self.aside, self.shard.key(finished.place), finished)

    def write(self) -> tuple[int, str, str]:
        """Wait for all pictures. Return the size in bytes, the SHA-256, and the SHA-256 of the pixels.

        Raises a one-line OSError if the disk refuses.
        """
        with naming_disk(self._writer.folder.data(self.shard)):
            pictures = [picture.result() for batch in self._batches for picture in batch.result()]
            self._writer.form.assemble(self.aside, pictures)
            pixels = hashlib.sha256("".join(picture.pixels_sha256 for picture in pictures).encode())
            return data_size(self.aside), data_sha256(self.aside), pixels.hexdigest()

    def abandon(self) -> None:
        """Remove the temporary files. Raises nothing."""
        for batch in self._batches:
            with contextlib.suppress(BaseException):
                pictures = batch.result()
                for picture in pictures:
                    picture.cancel()
                wait(pictures)
        remove(self.aside)


class ShardWriter:
    """A writer of pictures, a thread that fetches batches from the GPU, and a thread that commits shards.

    Each thread handles one item and queues none, so the GPU is at most one batch ahead of the fetching.
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
        """Call `fetch` in a thread, once the previous fetch has ended."""
        if self._fetched is not None:
            wait([self._fetched])
        found = self._fetched = self._fetching.submit(fetch)
        return found

    def commit(self, commit: Callable[[], None]) -> None:
        """Call `commit` in a thread, once the previous commit has ended. Raises the error of the previous commit."""
        self.wait()
        self._last = self._committing.submit(commit)

    def wait(self) -> None:
        """Wait for the running commit and raise its error, if any."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def remove(path: Path) -> None:
    """Remove a file or folder as far as possible, without an error."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def remove_abandoned(folder: Folder, shard: Shard) -> None:
    """Remove what dead workers left of a shard. Only the worker that holds the shard may call this."""
    for path in folder.path.glob(f".{shard.name}-*.tmp"):
        remove(path)
