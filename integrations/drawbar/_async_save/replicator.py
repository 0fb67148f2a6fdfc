"""Copy the checkpoints of a rank to a peer node, and read them from there after a restart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar._async_save.memory_store import (
    CHUNKS_IN_FLIGHT,
    RESTORE_GROUP,
    OpenFile,
    StoredFile,
    iter_offsets,
    open_shared,
    read_chunk,
)
from drawbar._process.threads import DaemonThreadPool
from drawbar._storage.contents import FileEntry
from drawbar._storage.manifest import compute_checksum

if TYPE_CHECKING:
    from ray import ObjectRef

    from drawbar._async_save.memory_replication import NodeStores

_CHUNK_TIMEOUT_S = 60.0
_OPEN_TIMEOUT_S = 30.0
_MIN_BYTES_PER_S = 50_000_000


class Replicator:
    """Thread that copies the checkpoints of this rank to the store of the peer node.

    If a copy takes longer than the training function needs for the next two checkpoints, only the
    newest one is copied next.
    """

    def __init__(self) -> None:
        self._next: _Copy | None = None
        self._lock = threading.Lock()
        self._thread = DaemonThreadPool(1, "drawbar-replicator")
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def submit(
        self,
        stores: ObjectRef[NodeStores],
        notify: Callable[[str], None],
        name: str,
        descriptors: Mapping[str, int],
    ) -> None:
        """Copy a checkpoint to the peer node in the background.

        Args:
            stores: Reference to the stores that this node uses.
            notify: Callback that receives the reason if a checkpoint is not copied.
            name: Name of the checkpoint, as in `make_copy_name`.
            descriptors: Memory of its files by path, which contains them until the checkpoint after
                the next one.
        """
        try:
            copy = _Copy(stores, notify, name, descriptors)
        except OSError as error:  # too many open files
            notify(_describe(error))
            return
        with self._lock:
            skipped, self._next = self._next, copy
        if skipped is not None:
            skipped.close()
            notify("copying takes longer than the time between two checkpoints")
        self._thread.submit(self._send_next)

    def _send_next(self) -> None:
        with self._lock:
            copy, self._next = self._next, None
            # Before the next `submit`, after which the rank may use the memory for other content.
            is_locked = copy is not None and copy.try_lock()
        if copy is None:
            return
        try:
            if is_locked:
                copy.send()
        except Exception as error:  # the peer may be lost, or have too little memory
            copy.notify(_describe(error))
        finally:
            copy.close()


def _describe(error: Exception) -> str:
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return f"the peer node has not received data for {_CHUNK_TIMEOUT_S:.0f} s"
    if isinstance(error, RayActorError):
        return "the process that keeps the copies on the peer node has ended"
    cause = error.cause if isinstance(error, RayTaskError) else error
    return f"{type(cause).__name__}: {cause}"


class _Copy:
    """Files of a checkpoint, opened again, so that they have separate locks."""

    def __init__(
        self,
        stores: ObjectRef[NodeStores],
        notify: Callable[[str], None],
        name: str,
        descriptors: Mapping[str, int],
    ) -> None:
        self._stores = stores
        self.notify = notify
        self._name = name
        self._files: dict[str, int] = {}
        try:
            for path, descriptor in descriptors.items():
                self._files[path] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        except OSError:
            self.close()
            raise

    def try_lock(self) -> bool:
        """Keep the rank from overwriting the files; return False if it does so already."""
        try:
            for descriptor in self._files.values():
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def send(self) -> None:
        """Let the store of this node keep the memory, and send the files to the one of the peer.

        Raises:
            RayError: The peer cannot receive them.
        """
        import ray

        stores = ray.get(self._stores)
        opened = {path: OpenFile.of(descriptor) for path, descriptor in self._files.items()}
        descriptions = {path: _describe_file(file) for path, file in opened.items()}
        keep = stores.own.keep.remote(self._name, descriptions, opened)
        ray.get(keep, timeout=_CHUNK_TIMEOUT_S)
        if stores.peer is None:
            return
        replies: deque[Any] = deque()
        for path, file in descriptions.items():
            for offset in iter_offsets(file.size):
                data = read_chunk(self._files[path], offset)
                replies.append(stores.peer.write.remote(self._name, path, file, offset, data))
                if len(replies) == CHUNKS_IN_FLIGHT:
                    ray.get(replies.popleft(), timeout=_CHUNK_TIMEOUT_S)
        ray.get(list(replies), timeout=_CHUNK_TIMEOUT_S)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _lock(descriptor: int) -> int:
    """Keep a rank from overwriting a file, and return its descriptor.

    The store, which has a lock, releases it with the next commit.

    Raises:
        BlockingIOError: The rank is overwriting it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _describe_file(file: OpenFile) -> StoredFile:
    return StoredFile(file.size, compute_checksum(Path(f"/proc/self/fd/{file.descriptor}")))


def request_from_stores(
    stores: ObjectRef[NodeStores], name: str, files: Sequence[FileEntry]
) -> dict[str, tuple[int, int]]:
    """Return the descriptors and sizes of files that the store of this node provides, by path.

    Args:
        stores: Reference to the stores that this node uses.
        name: Name of the checkpoint, as in `make_copy_name`.
        files: Files of the checkpoint.
    """
    import ray
    from ray.exceptions import RayError

    timeout = _OPEN_TIMEOUT_S + sum(file.size for file in files) / _MIN_BYTES_PER_S
    try:
        node_stores = ray.get(stores, timeout=_OPEN_TIMEOUT_S)
        open_files = node_stores.own.open_files.options(concurrency_group=RESTORE_GROUP)
        reply = open_files.remote(name, list(files), node_stores.all_stores)
        found = ray.get(reply, timeout=timeout)
    except RayError:  # a lost store is like one without files
        return {}
    opened = {}
    for path, file in found.items():
        with contextlib.suppress(OSError):  # the store has freed it meanwhile
            opened[path] = _lock(open_shared(file)), file.size
    return opened
