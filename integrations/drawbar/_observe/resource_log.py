"""Write and read the resource samples of a run, one JSON line for each.

Old samples are thinned out, so the file has a bounded size. A damaged or missing file affects
nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

import msgspec

from drawbar._process.threads import DaemonThreadPool
from drawbar._records.live_events import Event, ResourcesSampled
from drawbar._records.resources import ResourceSample
from drawbar._storage.files import (
    inherit_directory_mode,
    read_regular_file,
    write_atomically,
)
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import RESOURCES_FILE

MAX_SAMPLES = 10_000
"""Number of samples above which old ones are thinned out."""

MIN_SAMPLES_PER_NODE = 20
"""With many nodes, at least twice this number of samples per node is kept."""

_MAX_PENDING = 1_000  # samples that are written together, if the storage is slow

_logger = logging.getLogger("drawbar.train")
_decoder = msgspec.json.Decoder(ResourceSample)


class ResourceLog:
    """Watcher that writes resource samples in a thread. It stops after an error.

    Args:
        directory: Directory of the run.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._path = directory.local_path / RESOURCES_FILE
        self._writer = DaemonThreadPool(1, "drawbar-resource-log")
        self._lock = threading.Lock()
        self._pending: list[ResourceSample] = []
        self._num_samples: int | None = None
        self._nodes: set[tuple[str, int]] = set()
        self._has_failed = False

    def on_event(self, event: Event) -> None:
        """Schedule the write of a sample. Never blocks."""
        if not isinstance(event, ResourcesSampled) or self._has_failed:
            return
        with self._lock:
            # If the storage is slower than the samples, lose the new ones instead of memory.
            if len(self._pending) >= _MAX_PENDING:
                return
            self._pending.append(event.sample)
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
                "Resource samples are no longer written to %s: %s. The run continues.",
                self._path,
                error,
            )

    def _append(self, samples: Sequence[ResourceSample]) -> None:
        if self._num_samples is None:
            self._num_samples = self._open()
        # "r+b": if the run directory was deleted, it must not be created again.
        with open(self._path, "r+b") as file:
            file.seek(0, 2)
            file.write(_encode(samples))
        self._num_samples += len(samples)
        self._nodes |= {(sample.node, sample.node_rank) for sample in samples}
        if self._num_samples > max(MAX_SAMPLES, 2 * MIN_SAMPLES_PER_NODE * len(self._nodes)):
            self._thin_out()

    def _open(self) -> int:
        """Create the file, or complete it, and return the number of its samples."""
        earlier = _read_samples(self._directory)
        self._nodes = {(sample.node, sample.node_rank) for sample in earlier}
        # Write all of them: the last line may be torn, or the file may only be in remote storage.
        self._rewrite(earlier)
        return len(earlier)

    def _thin_out(self) -> None:
        """Drop every second sample of each node. Older samples then are farther apart."""
        samples = thin_out(_read_samples(self._directory))
        self._rewrite(samples)
        self._num_samples = len(samples)

    def _rewrite(self, samples: Sequence[ResourceSample]) -> None:
        # The staging area exists while the run is in progress, unless the run was deleted.
        staging = self._directory.staging.path
        write_atomically(self._path, _encode(samples), temp_directory=staging)
        inherit_directory_mode(self._path)


def _encode(samples: Sequence[ResourceSample]) -> bytes:
    return b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)


def thin_out(samples: Sequence[ResourceSample]) -> list[ResourceSample]:
    """Return every second sample of each node, with its last one."""
    kept: list[ResourceSample] = []
    counts: dict[tuple[str, int], int] = {}
    for sample in reversed(samples):
        key = sample.node, sample.node_rank
        if counts.get(key, 0) % 2 == 0:
            kept.append(sample)
        counts[key] = counts.get(key, 0) + 1
    kept.reverse()
    return kept


def read_resources(directory: RunDirectory) -> list[ResourceSample]:
    """Return the readable resource samples of a run, in the order of their arrival.

    Returns:
        The samples; empty if the run has none, or if the file cannot be read.
    """
    with contextlib.suppress(Exception):  # fsspec filesystems raise any type of error
        return _read_samples(directory)
    return []


def _read_samples(directory: RunDirectory) -> list[ResourceSample]:
    """Return the readable lines of the newer one of the local and the remote file."""
    local: list[ResourceSample] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        local = _decode(read_regular_file(directory.local_path / RESOURCES_FILE))
    if directory.remote_path is None:
        return local
    remote = _decode(directory.remote_path.read_or_none(RESOURCES_FILE) or b"")
    return max(local, remote, key=lambda samples: samples[-1].time if samples else 0.0)


def _decode(data: bytes) -> list[ResourceSample]:
    samples = []
    for line in data.splitlines():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            samples.append(_decoder.decode(line))
    return samples
