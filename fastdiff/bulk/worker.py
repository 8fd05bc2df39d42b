"""A worker: claims shards of a plan and draws them, until all are done or given up. Any worker draws any shard."""

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
from fastdiff.pipelines import TextToImagePipeline
from fastdiff.runs.drawing import Progress, Records, draw, wait_for_pictures

if TYPE_CHECKING:
    from torch import device as Device

    from fastdiff.pipelines import Pipeline

_TEXTS = 64  # encoded prompts that are kept from batch to batch: a negative one is wanted by each
_PAUSE = 1.0  # seconds between looks at shards that others have


class Stopped(Exception):
    """The worker was told to stop."""


class Worker:
    """Draws shards of a plan into a folder that was opened."""

    def __init__(
        self,
        plan: Plan,
        folder: Folder,
        pipe: "Pipeline",
        fingerprint: Fingerprint,
        stop: Stop,
        threads: int = 2,  # that encode pictures
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
        self._under_way: dict[str, Lease] = {}  # by the shard's name: drawn, or waiting to be committed
        stop.cleanup = self._let_go
        if isinstance(pipe, TextToImagePipeline):
            pipe.encoders.remember(_TEXTS)

    def work(self) -> None:
        """Draw until every shard is done or given up. Stopped, OSError where the disk refuses, DeviceLostError."""
        with self._claims, self._writer:
            while shards := self._open_shards():
                if not any([self._try(shard) for shard in shards]):
                    self._writer.wait()
                    self._pause()
            if self.plan.format == "npz":
                self._join()

    def _open_shards(self) -> list[Shard]:
        """The shards that are neither settled nor under way here; those that were tried come last."""
        self._writer.wait()
        tried = self._attempts.tried()
        shards = [shard for shard in self.plan.shards if not self._is_settled(shard)]
        return sorted(shards, key=lambda shard: shard.name in tried)

    def _is_settled(self, shard: Shard) -> bool:
        """Whether a shard is done or given up; it stays so for this worker."""
        if shard.number in self._settled:
            return True
        if self.folder.is_done(shard) or self.folder.error(shard).exists():
            self._settled.add(shard.number)
        return shard.number in self._settled

    def _try(self, shard: Shard) -> bool:
        """Draw a shard, if it is to be had. Whether it was."""
        if self.stop.asked:
            raise Stopped
        lease = self._claims.claim(shard.name)
        if lease is None:
            return False
        self._under_way[shard.name] = lease
        try:
            if self._attempts.failures(shard.name):
                self._writer.wait()  # should this one end the process, the shard before it is not to blame
            if self._is_settled(shard) or not self._attempts.begin(shard.name, self.name):
                self._finish(shard)
            else:
                self._draw(shard, lease)
        except BaseException:
            self._finish(shard)
            raise
        return True

    def _draw(self, shard: Shard, lease: Lease) -> None:
        """Draw a shard, and have it committed beside the next one."""
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
        except BaseException:  # of the commit before this one
            job.abandon()
            self._attempts.take_back(shard.name)
            raise

    def _stop_if_asked(self, progress: Progress) -> None:
        """Raise Stopped after a batch, but for the shard's last, and after any step once the batch has taken long."""
        is_last = progress.places.stop == len(progress.run.cells)
        if (progress.ended and not is_last and self.stop.asked) or (not progress.ended and self.stop.is_late):
            raise Stopped

    def _fail(self, shard: Shard, error: Exception) -> None:
        """Note that a shard could not be drawn. Raises the error where nothing can be drawn after it."""
        self._attempts.fail(shard.name, in_one_line(error))
        if isinstance(error, DeviceLostError):
            raise error

    def _commit(self, shard: Shard, job: Job, start: float, times: "StepTimes") -> None:
        """Wait until a shard is drawn and written, and note it as done."""
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
            pass  # this process stood still for so long that another took the shard, and removed what was left of it
        except (InputError, OSError):
            self._attempts.take_back(shard.name)
            raise
        except Exception as error:
            self._fail(shard, error)
        finally:
            job.abandon()
            self._finish(shard)

    def _finish(self, shard: Shard) -> None:
        """Give the lease of a shard back."""
        lease = self._under_way.pop(shard.name, None)
        if lease is not None:
            self._claims.release(lease)

    def _let_go(self) -> None:
        """Give back all shards under way; the process ends after this."""
        for name, lease in list(self._under_way.items()):
            self._attempts.take_back(name)
            self._claims.release(lease)

    def _pause(self) -> None:
        if self.stop.wait(_PAUSE):
            raise Stopped

    def _join(self) -> None:
        """Have all shards in one npz beside them, unless some are given up; one worker writes it."""
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
    """The seconds in which the GPU was at work on a shard's steps, by its own events; the host does not wait for it.

    The first step of a batch may wait for the host, and the last one draws the pictures of latents. They count as much
    as the batch's others do on average.
    """

    def __init__(self, device: "Device") -> None:
        self._on_gpu = device.type == "cuda"
        self._batches: list[list] = []  # pairs of events, a list for each batch; the last step is left out
        self._steps: list[int] = []  # of each batch

    def of(self, steps: Iterator[Progress]) -> Iterator[Progress]:
        """Yield those steps, an event before and behind each."""
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
        """All of them, once the pictures are on the host; None on a CPU."""
        if not self._on_gpu:
            return None
        total = 0.0
        for pairs, steps in zip(self._batches, self._steps, strict=True):
            pairs = pairs[1:] or pairs
            milliseconds = sum(before.elapsed_time(behind) for before, behind in pairs)
            total += milliseconds / 1000 * steps / max(1, len(pairs))
        return round(total, 4)
