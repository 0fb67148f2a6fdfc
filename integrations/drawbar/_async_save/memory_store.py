"""Memory of one node, from which ranks on other nodes read checkpoints: a Ray actor.

With `CheckpointConfig(memory_replication=True)`, each node of a run has a `MemoryStore`. It
receives the files of `save_async` from the ranks of the previous node, and also opens the memory of
the ranks on its node. After a restart, the store of each node provides the files of the resume
checkpoint to its ranks. It copies missing ones from the other stores.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, NamedTuple

from drawbar._storage.contents import FileEntry
from drawbar._storage.manifest import compute_checksum

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from ray import ObjectRef

CHUNK_BYTES = 1 << 23
CHUNKS_IN_FLIGHT = 3
RESTORE_GROUP = "restore"
"""Concurrency group of `open_files`, which calls other stores, and so must not block `read`."""

OBSERVATION_KIND = "memory_replication"
"""Kind of the observations with which ranks report checkpoints that are not copied."""

_MAX_COPIES = 2
_REPLY_TIMEOUT_S = 10.0
_MAX_MEMORY_FRACTION = 0.5


class StoredFile(NamedTuple):
    """Size and xxh3 checksum of a file."""

    size: int
    checksum: str


class OpenFile(NamedTuple):
    """Descriptor in a process of this node. The inode shows whether it is still the same file."""

    pid: int
    descriptor: int
    inode: int
    size: int

    @classmethod
    def of(cls, descriptor: int) -> OpenFile:
        """Return the description of an open file of this process."""
        status = os.fstat(descriptor)
        return cls(os.getpid(), descriptor, status.st_ino, status.st_size)


class _MemoryFile:
    """File in memory, which is freed with this object.

    Args:
        file: Description of the file.
        fd: Descriptor of the memory of a rank. Default: new memory.
    """

    def __init__(self, file: StoredFile, fd: int | None = None) -> None:
        self.description = file
        self.num_received = file.size if fd is not None else 0
        self._is_verified = False
        self.fd = os.memfd_create("drawbar-replica") if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        if fd is None and file.size:
            if not has_memory(file.size):
                raise OSError(errno.ENOMEM, f"this node has no memory for {file.size} bytes")
            os.posix_fallocate(self.fd, 0, file.size)

    @property
    def is_complete(self) -> bool:
        return self.num_received == self.description.size

    def write(self, offset: int, data: ReadableBuffer) -> None:
        with memoryview(data) as view:
            if offset != self.num_received or offset + view.nbytes > self.description.size:
                raise ValueError(f"expected bytes from {self.num_received} on, found {offset}")
            os.pwrite(self.fd, view, offset)
            self.num_received += view.nbytes

    def verify(self) -> bool:
        """Return whether the content is complete and has its checksum.

        If it is the memory of a rank, keep the rank from overwriting it from now on.
        """
        if not self._is_verified and self.is_complete:
            with contextlib.suppress(BlockingIOError):  # the rank is overwriting it
                fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                checksum = compute_checksum(Path(f"/proc/self/fd/{self.fd}"))
                self._is_verified = checksum == self.description.checksum
                if not self._is_verified:
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
        return self._is_verified


class MemoryStore:
    """Checkpoints in the memory of a node. It keeps the two newest ones.

    Checkpoints have the names of `make_copy_name`.
    """

    def __init__(self) -> None:
        self._copies: dict[str, dict[str, _MemoryFile]] = {}
        self._lock = threading.Lock()
        self._unavailable: set[str] = set()

    def keep(self, name: str, files: Mapping[str, StoredFile], fds: Mapping[str, OpenFile]) -> None:
        """Keep the memory of a rank on this node, also if its processes are killed.

        Args:
            name: Name of the checkpoint.
            files: Descriptions of the files by path.
            fds: Their descriptors in the process of the rank.

        Raises:
            OSError: This process cannot open them.
        """
        for path, file in files.items():
            descriptor = open_shared(fds[path])
            self._add(name, path, _MemoryFile(file, descriptor))

    def write(
        self, name: str, path: str, file: StoredFile, offset: int, data: ReadableBuffer
    ) -> None:
        """Receive the next bytes of a file.

        Args:
            name: Name of the checkpoint.
            path: Path of the file in the checkpoint.
            file: Description of the file.
            offset: Position of the bytes in the file.
            data: The bytes.

        Raises:
            LookupError: Two newer checkpoints, or a commit of a newer attempt, have replaced this
                one.
            OSError: There is not enough memory.
        """
        if offset == 0:
            self._add(name, path, _MemoryFile(file))
        with self._lock:
            received = self._copies[name][path]
        received.write(offset, data)

    def _add(self, name: str, path: str, file: _MemoryFile) -> None:
        with self._lock:
            names = sorted({*self._copies, name}, key=_parse_name)
            for old in names[:-_MAX_COPIES]:
                self._copies.pop(old, None)
            if name not in names[-_MAX_COPIES:]:
                raise LookupError("the peer has two newer checkpoints")
            self._copies.setdefault(name, {})[path] = file

    def drop(self, attempt: int) -> None:
        """Free the memory of checkpoints of earlier attempts."""
        with self._lock:
            for name in [name for name in self._copies if _parse_name(name)[0] < attempt]:
                del self._copies[name]
        self._unavailable.clear()

    # -- for other stores

    def list_files(self, name: str) -> dict[str, StoredFile]:
        """Return the complete files of a checkpoint in the memory of this node, by path."""
        return {path: file.description for path, file in self._get_complete(name).items()}

    def _get_complete(self, name: str) -> dict[str, _MemoryFile]:
        with self._lock:
            files = dict(self._copies.get(name, {}))
        return {path: file for path, file in files.items() if file.is_complete}

    def read(self, name: str, path: str, offset: int) -> PickleBuffer:
        """Return bytes of a file from an offset on.

        Raises:
            LookupError: The memory has been freed.
        """
        # A rank may overwrite the content, so the receiver verifies the checksum.
        return read_chunk(self._get_complete(name)[path].fd, offset)

    # -- for the ranks on this node

    def open_files(
        self,
        name: str,
        files: Sequence[FileEntry],
        all_stores: Sequence[ObjectRef[dict[str, Any]]] = (),
    ) -> dict[str, OpenFile]:
        """Copy missing files of a checkpoint to this node, and return all that the store has.

        Args:
            name: Name of the checkpoint.
            files: Files that the ranks of this node need.
            all_stores: Reference to the handles of all stores by node.

        Returns:
            Files with a valid checksum, by path.
        """
        found = self._find_valid(name, files)
        missing = {file.path: file.size for file in files if file.path not in found}
        if missing and name not in self._unavailable:
            if has_memory(sum(missing.values())):
                self._copy_missing(name, missing, all_stores)
            found = self._find_valid(name, files)
            if len(found) < len(files):
                self._unavailable.add(name)  # the other ranks of this node need not wait again
        return {path: OpenFile.of(file.fd) for path, file in found.items()}

    def _find_valid(self, name: str, files: Iterable[FileEntry]) -> dict[str, _MemoryFile]:
        complete = self._get_complete(name)
        return {
            file.path: complete[file.path]
            for file in files
            if file.path in complete
            and complete[file.path].description.size == file.size
            and complete[file.path].verify()
        }

    def _copy_missing(
        self,
        name: str,
        missing: dict[str, int],
        all_stores: Sequence[ObjectRef[dict[str, Any]]],
    ) -> None:
        """Copy files from the stores that reply first. A store on a lost node may not reply."""
        import ray

        replies = {
            store.list_files.remote(name): store
            for reference in all_stores
            for node, store in ray.get(reference, timeout=_REPLY_TIMEOUT_S).items()
            if node != ray.get_runtime_context().get_node_id()
        }
        while missing and replies:
            ready, _ = ray.wait(list(replies), timeout=_REPLY_TIMEOUT_S)
            if not ready:
                return
            store = replies.pop(ready[0])
            with contextlib.suppress(ray.exceptions.RayError, LookupError, OSError, ValueError):
                for path, file in ray.get(ready[0]).items():
                    if missing.get(path) == file.size:
                        self._copy_file(name, path, file, store)
                        del missing[path]

    def _copy_file(self, name: str, path: str, file: StoredFile, store: Any) -> None:
        replies: deque[tuple[int, Any]] = deque()
        for offset in iter_offsets(file.size):
            replies.append((offset, store.read.remote(name, path, offset)))
            if len(replies) == CHUNKS_IN_FLIGHT:
                self._write_reply(name, path, file, *replies.popleft())
        while replies:
            self._write_reply(name, path, file, *replies.popleft())

    def _write_reply(self, name: str, path: str, file: StoredFile, offset: int, reply: Any) -> None:
        import ray

        self.write(name, path, file, offset, ray.get(reply, timeout=_REPLY_TIMEOUT_S))


def open_shared(file: OpenFile) -> int:
    """Return a new descriptor of a file that another process of this node has open.

    Raises:
        OSError: It has ended, or has closed the file.
    """
    descriptor = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDONLY)
    if os.fstat(descriptor).st_ino == file.inode:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EBADF, f"process {file.pid} has closed a file in memory")


def _parse_name(name: str) -> tuple[int, ...]:
    """Return the numbers in the result of `make_copy_name`, which sort checkpoints by age."""
    return tuple(map(int, name.split("/")))


def iter_offsets(size: int) -> Iterator[int]:
    """Yield the offsets of the chunks of a file. An empty file has one chunk."""
    return iter(range(0, max(size, 1), CHUNK_BYTES))


def read_chunk(descriptor: int, offset: int) -> PickleBuffer:
    """Return bytes of a file, which the receiver can read in Ray's object store without a copy."""
    # Not mapped: a rank may truncate its memory meanwhile, and SIGBUS would kill this process.
    return PickleBuffer(os.pread(descriptor, CHUNK_BYTES, offset))


def has_memory(size: int) -> bool:
    """Return whether new files of this size need at most half of the free memory of this node."""
    meminfo = Path("/proc/meminfo").read_text()
    available = int(meminfo.partition("MemAvailable:")[2].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError, IndexError):  # without a limit of a cgroup (v2)
        cgroup = Path("/sys/fs/cgroup")
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cached = (cgroup / "memory.stat").read_text().partition("inactive_file ")[2].split()[0]
        available = min(available, limit - used + int(cached))
    return size <= _MAX_MEMORY_FRACTION * available
