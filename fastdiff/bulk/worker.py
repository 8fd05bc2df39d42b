"""A worker claims and draws shards of a plan until all are done or given up. Any worker can draw any shard."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from fastdiff.bulk.attempts import Attempts
from fastdiff.bulk.claims import Claims, Lease
from fastdiff.bulk.fingerprint import Fingerprint, digest
from fastdiff.bulk.folder import (
    JOINED,
    Folder,
    Record,
    data_sha256,
    naming_disk,
    read_object,
    sync_folder,
    write_object,
)
from fastdiff.bulk.formats import join_npz
from fastdiff.bulk.plan import Plan, Shard
from fastdiff.bulk.stopping import Stop
from fastdiff.bulk.writing import Job, ShardWriter, remove, remove_abandoned
from fastdiff.errors import DeviceLostError, InputError, in_one_line
from fastdiff.runs.drawing import Progress, Records, draw, wait_for_pictures

if TYPE_CHECKING:
    from torch import device as Device

    from fastdiff.pipelines import Pipeline

_PAUSE = 1.0  # seconds between checks of shards that other workers hold


class Stopped(Exception):
    """The worker was told to stop."""


class Worker:
    """Draws shards of a plan into an open folder."""

    def __init__(
        self,
        plan: Plan,
        folder: Folder,
        pipe: "Pipeline",
        fingerprint: Fingerprint,
        stop: Stop,
        threads: int = 2,  # for encoding pictures
        say: Callable[[str], None] = lambda line: None,  # prints a notice
    ) -> None:
        self.plan, self.folder, self.pipe, self.stop = plan, folder, pipe, stop
        self._say, self._noticed = say, False
        self.name = f"{platform.node()}:{os.getpid()}"
        self._fingerprint = digest(fingerprint)
        self._records = Records(plan.run, pipe)
        self._attempts = Attempts(folder.shards)
        self._claims = Claims(folder.shards)
        self._writer = ShardWriter(folder, plan.format, threads)
        self._settled: set[int] = set()
        self._under_way: dict[str, Lease] = {}  # by shard name: being drawn or committed
        stop.cleanup = self._let_go

    def work(self) -> None:
        """Draw until every shard is done or given up.

        Raises Stopped, OSError if the disk refuses, or DeviceLostError.
        """
        with self._claims, self._writer:
            while shards := self._open_shards():
                if not any([self._try(shard) for shard in shards]):
                    self._writer.wait()
                    self._pause()
            if self.plan.format == "npz":
                self._join()

    def _open_shards(self) -> list[Shard]:
        """Return the shards that are not settled, those already tried last, once the running commit has ended."""
        self._writer.wait()
        tried = self._attempts.tried()
        shards = [shard for shard in self.plan.shards if not self._is_settled(shard)]
        return sorted(shards, key=lambda shard: shard.name in tried)

    def _is_settled(self, shard: Shard) -> bool:
        """Return whether a shard is done or given up, which is final for this worker."""
        if shard.number in self._settled:
            return True
        if self.folder.is_done(shard) or self.folder.error(shard).exists():
            self._settled.add(shard.number)
        return shard.number in self._settled

    def _try(self, shard: Shard) -> bool:
        """Draw a shard if no other worker holds it. Return whether this worker got it."""
        if self.stop.asked:
            raise Stopped
        lease = self._claims.claim(shard.name)
        if lease is None:
            return False
        self._under_way[shard.name] = lease
        try:
            if self._attempts.failures(shard.name):
                self._writer.wait()  # if this shard kills the process, the previous one must not be blamed
            if self._is_settled(shard) or not self._attempts.begin(shard.name, self.name):
                self._finish(shard)
            else:
                self._draw(shard, lease)
        except BaseException:
            self._finish(shard)
            raise
        return True

    def _draw(self, shard: Shard, lease: Lease) -> None:
        """Draw a shard, and commit it in a thread while the next one is drawn."""
        start, times = time.perf_counter(), StepTimes(self.pipe.device)
        try:
            remove_abandoned(self.folder, shard)
            job = Job(self._writer, shard)
        except OSError:
            self._attempts.take_back(shard.name)
            raise
        try:
            for progress in times.of(draw(self.plan.run_of(shard), self.pipe, self._records, wait=False)):
                if progress.ended:
                    job.add(partial(wait_for_pictures, progress, self._records))
                lease.drawn = int(progress.done)
                if progress.step.notice and not self._noticed:
                    self._noticed = True
                    self._say(progress.step.notice)
                self._stop_if_asked(progress)
        except (Stopped, InputError, OSError):
            job.abandon()
            self._attempts.take_back(shard.name)
            raise
        except Exception as error:
            job.abandon()
            self._fail(shard, error)
            self._finish(shard)
            return
        try:
            self._writer.commit(lambda: self._commit(shard, job, start, times))
        except BaseException:  # from the previous commit
            job.abandon()
            self._attempts.take_back(shard.name)
            raise

    def _stop_if_asked(self, progress: Progress) -> None:
        """Raise Stopped after a batch, unless it is the shard's last, or after any step if the batch takes too long."""
        is_last = progress.places.stop == len(progress.run.cells)
        if (progress.ended and not is_last and self.stop.asked) or (not progress.ended and self.stop.is_late):
            raise Stopped

    def _fail(self, shard: Shard, error: Exception) -> None:
        """Record that a shard could not be drawn. Raise the error if the GPU is lost."""
        self._attempts.fail(shard.name, in_one_line(error))
        if isinstance(error, DeviceLostError):
            raise error

    def _commit(self, shard: Shard, job: Job, start: float, times: "StepTimes") -> None:
        """Wait until a shard is drawn and written, then mark it as done."""
        try:
            size, sha256, pixels_sha256 = job.write()
            record = Record(
                shard=shard.number,
                count=len(shard.cells),
                bytes=size,
                sha256=sha256,
                pixels_sha256=pixels_sha256,
                seconds=round(time.perf_counter() - start, 3),
                gpu_seconds=times.seconds(),
                worker=self.name,
                fingerprint=self._fingerprint,
            )
            if not self._is_settled(shard):
                self.folder.commit(shard, job.aside, record)
            self._attempts.forget(shard.name)
        except FileNotFoundError:
            pass  # this process was suspended for so long that another took the shard and removed its files
        except (InputError, OSError):
            self._attempts.take_back(shard.name)
            raise
        except Exception as error:
            self._fail(shard, error)
        finally:
            job.abandon()
            self._finish(shard)

    def _finish(self, shard: Shard) -> None:
        """Release the lease of a shard."""
        lease = self._under_way.pop(shard.name, None)
        if lease is not None:
            self._claims.release(lease)

    def _let_go(self) -> None:
        """Release all shards in progress, before the process ends."""
        for name, lease in list(self._under_way.items()):
            self._attempts.take_back(name)
            self._claims.release(lease)

    def _pause(self) -> None:
        if self.stop.wait(_PAUSE):
            raise Stopped

    def _join(self) -> None:
        """Join all shards into one npz, unless some were given up. Only one worker writes it."""
        records = [Record.read(self.folder.record(shard)) for shard in self.plan.shards]
        parts = [record.sha256 for record in records if record is not None]
        target, mark = self.folder.path / f"{JOINED}.npz", self.folder.shards / f"{JOINED}.json"
        while len(parts) == len(records) and not (target.exists() and (read_object(mark) or {}).get("parts") == parts):
            lease = self._claims.claim(JOINED)
            if lease is None:
                self._pause()
                continue
            aside = self.folder.path / f".{JOINED}.tmp"
            try:
                with naming_disk(target):
                    aside.unlink(missing_ok=True)
                    join_npz([self.folder.data(shard) for shard in self.plan.shards], aside)
                    sha256 = data_sha256(aside)
                    os.replace(aside, target)
                    sync_folder(target.parent)
                write_object(mark, {"sha256": sha256, "parts": parts})
            finally:
                remove(aside)
                self._claims.release(lease)


class StepTimes:
    """The GPU time of a shard's steps, measured with CUDA events, without a wait on the host.

    The first step of a batch may include a wait for the host, and the last one decodes the latents. Both count as the
    average of the batch's other steps.
    """

    def __init__(self, device: "Device") -> None:
        self._on_gpu = device.type == "cuda"
        self._batches: list[list] = []  # pairs of events for each batch, without its last step
        self._steps: list[int] = []  # number of steps of each batch

    def of(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Yield the steps, and record an event before and after each."""
        if not self._on_gpu:
            yield from steps
            return
        import torch

        while True:
            before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            progress = next(steps, None)
            if progress is None:
                return
            behind.record()
            if progress.step.index == 0:
                self._batches.append([])
                self._steps.append(progress.step.num_steps)
            if not progress.ended:
                self._batches[-1].append((before, behind))
            yield progress

    def seconds(self) -> float | None:
        """Return the total, once the pictures are on the host; None on a CPU."""
        if not self._on_gpu:
            return None
        total = 0.0
        for pairs, steps in zip(self._batches, self._steps, strict=True):
            pairs = pairs[1:] or pairs
            milliseconds = sum(before.elapsed_time(behind) for before, behind in pairs)
            total += milliseconds / 1000 * steps / max(1, len(pairs))
        return round(total, 4)
