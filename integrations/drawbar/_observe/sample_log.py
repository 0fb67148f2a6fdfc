"""Write and read samples of a run, one JSON line for each: resources of nodes, times of ranks.

Old samples are thinned out, so the files have a bounded size. A damaged or missing file affects
nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from drawbar._process.threads import DaemonThreadPool
from drawbar._storage.files import (
    inherit_directory_mode,
    read_regular_file,
    write_atomically,
)
from drawbar._storage.run_directory import RunDirectory

MAX_SAMPLES = 10_000
"""Number of samples above which old ones are thinned out."""

MIN_SAMPLES_PER_SOURCE = 20
"""With many sources, at least twice this number of samples per source is kept."""

_MAX_PENDING = 1_000  # samples that are written together, if the storage is slow

_logger = logging.getLogger("drawbar.train")


class Sample(Protocol):
    """Struct with the time of the sample, in seconds since the epoch."""

    @property
    def time(self) -> float: ...


SampleT = TypeVar("SampleT", bound=Sample)


@dataclass(frozen=True)
class SampleFile(Generic[SampleT]):
    """File in the run directory with samples of one type.

    Create it once for all threads: msgspec can crash if two threads use a type for the first time.

    Attributes:
        name: Name of the file.
        decoder: Decodes a line.
        get_source: Returns the source of a sample, such as its node. The samples of each source are
            thinned out separately.
    """

    name: str
    decoder: msgspec.json.Decoder[SampleT]
    get_source: Callable[[SampleT], Hashable]

    def read(self, directory: RunDirectory) -> list[SampleT]:
        """Return the readable samples of a run, in the order of their arrival.

        Returns:
            The samples; empty if the run has none, or if the file cannot be read.
        """
        with contextlib.suppress(Exception):  # fsspec filesystems raise any type of error
            return self.read_newer(directory)
        return []

    def read_newer(self, directory: RunDirectory) -> list[SampleT]:
        """Return the readable lines of the newer one of the local and the remote file."""
        local: list[SampleT] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            local = self._decode(read_regular_file(directory.local_path / self.name))
        if directory.remote_path is None:
            return local
        remote = self._decode(directory.remote_path.read_or_none(self.name) or b"")
        return max(local, remote, key=lambda samples: samples[-1].time if samples else 0.0)

    def _decode(self, data: bytes) -> list[SampleT]:
        samples = []
        for line in data.splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                samples.append(self.decoder.decode(line))
        return samples

    def thin_out(self, samples: Sequence[SampleT]) -> list[SampleT]:
        """Return every second sample of each source, with its last one."""
        kept: list[SampleT] = []
        counts: dict[Hashable, int] = {}
        for sample in reversed(samples):
            source = self.get_source(sample)
            if counts.get(source, 0) % 2 == 0:
                kept.append(sample)
            counts[source] = counts.get(source, 0) + 1
        kept.reverse()
        return kept


class SampleLog(Generic[SampleT]):
    """Writes samples in a thread. It stops after an error.

    Args:
        directory: Directory of the run.
        file: File for the samples.
    """

    def __init__(self, directory: RunDirectory, file: SampleFile[SampleT]) -> None:
        self._directory = directory
        self._file = file
        self._path = directory.local_path / file.name
        self._writer = DaemonThreadPool(1, "drawbar-sample-log")
        self._lock = threading.Lock()
        self._pending: list[SampleT] = []
        self._num_samples: int | None = None
        self._sources: set[Hashable] = set()
        self._has_failed = False

    def add(self, sample: SampleT) -> None:
        """Schedule the write of a sample. Never blocks."""
        if self._has_failed:
            return
        with self._lock:
            # If the storage is slower than the samples, lose the new ones instead of memory.
            if len(self._pending) >= _MAX_PENDING:
                return
            self._pending.append(sample)
            is_scheduled = len(self._pending) > 1
        if not is_scheduled:
            self._writer.submit(self._write)

    def close(self) -> None:
        """Write the remaining samples."""
        self._writer.shutdown()

    def _write(self) -> None:
        with self._lock:
            samples, self._pending = self._pending, []
        if self._has_failed:  # by a write that was scheduled earlier
            return
        try:
            self._append(samples)
        except Exception as error:
            self._has_failed = True
            _logger.warning(
                "Samples are no longer written to %s: %s. The run continues.", self._path, error
            )

    def _append(self, samples: Sequence[SampleT]) -> None:
        if self._num_samples is None:
            self._num_samples = self._open()
        # "r+b": if the run directory was deleted, it must not be created again.
        with open(self._path, "r+b") as file:
            file.seek(0, 2)
            file.write(_encode(samples))
        self._num_samples += len(samples)
        self._sources |= set(map(self._file.get_source, samples))
        if self._num_samples > max(MAX_SAMPLES, 2 * MIN_SAMPLES_PER_SOURCE * len(self._sources)):
            self._thin_out()

    def _open(self) -> int:
        """Create the file, or complete it, and return the number of its samples."""
        earlier = self._file.read_newer(self._directory)
        self._sources = set(map(self._file.get_source, earlier))
        # Write all of them: the last line may be torn, or the file may only be in remote storage.
        self._rewrite(earlier)
        return len(earlier)

    def _thin_out(self) -> None:
        """Drop every second sample of each source. Older samples then are farther apart."""
        samples = self._file.thin_out(self._file.read_newer(self._directory))
        self._rewrite(samples)
        self._num_samples = len(samples)

    def _rewrite(self, samples: Sequence[SampleT]) -> None:
        # The staging area exists while the run is in progress, unless the run was deleted.
        staging = self._directory.staging.path
        write_atomically(self._path, _encode(samples), temp_directory=staging)
        inherit_directory_mode(self._path)


def _encode(samples: Sequence[object]) -> bytes:
    return b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
