"""Copies of checkpoints in the memory of writer processes, which a restart reads.

After `save_async`, the writer process of a rank keeps the files in memory, also if the rank is
killed. `open_memory_copy` provides a directory with links to these files, if the writers on this
node have all files of a committed checkpoint. A copy belongs to one report of one attempt of a run,
so it has the content that was committed.

Writers listen on abstract sockets, which end with their process and are found by name.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drawbar._async_save.memory_files import MEMORY_FILE_PREFIX
from drawbar._async_save.writer_process import MAX_REQUEST_BYTES, is_same_user
from drawbar._storage.contents import FileEntry, check_relative_path
from drawbar._storage.download_cache import get_user_temp_directory
from drawbar._storage.files import remove_tree
from drawbar._storage.manifest import Manifest, read_manifest
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.storage_path import StoragePath

RequestFiles = Callable[[str, Sequence[FileEntry]], dict[str, tuple[int, int]]]
"""Returns the descriptors and sizes of files of a copy that another node has had, by path."""

_MODE_OF_RANK = "rw-s"
"""Mode of the mapping with which a rank writes. Readers must not write to the file."""

_TIMEOUT_S = 5.0
_MAX_WAITING_READERS = 128
_MAX_WRITERS = 4096


def make_run_key(run_id: str, directory: RunDirectory) -> str:
    """Return the identifier of a run by which its processes find each other.

    The ID of a run is not enough: a copy of a run directory has it, too, and numbers its attempts
    and reports in the same way.

    Args:
        run_id: ID of the run.
        directory: Directory of the run.
    """
    return f"{run_id}-{hashlib.sha256(os.fsencode(directory.uri)).hexdigest()[:16]}"


def make_copy_name(attempt: int, report_index: int) -> str:
    """Return the name of a copy, which is unique in its run."""
    return f"{attempt}/{report_index}"


def listen(run_key: str, rank: int) -> socket.socket:
    """Return the socket of a new writer, and end the writer of an earlier process of this rank.

    Args:
        run_key: Identifier of the run, as in `make_run_key`.
        rank: Rank of this process.
    """
    prefix = _make_prefix(run_key)
    _release(f"{prefix}{rank}-")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{prefix}{rank}-{os.getpid()}-{next(_numbers)}")
    listener.listen(_MAX_WAITING_READERS)
    return listener


_numbers = itertools.count()


class RunAnchor:
    """Socket of the process that controls a run, which ends with this process or object.

    The writers on this node have connections to it, and so they detect its end.

    Args:
        run_key: Identifier of the run, as in `make_run_key`.
    """

    def __init__(self, run_key: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_make_anchor_address(run_key))
            self._listener.listen(_MAX_WRITERS)
        except OSError:  # not Linux: there are no writers
            self.close()

    def close(self) -> None:
        """End the connections of the writers."""
        self._listener.close()


def _make_anchor_address(run_key: str) -> str:
    return f"\0drawbar-run-{run_key}"


def open_owners(run_key: str) -> list[int]:
    """Return descriptors that are readable when the raylet or the controlling process has ended.

    Args:
        run_key: Identifier of the run, as in `make_run_key`.
    """
    owners = []
    with contextlib.suppress(OSError):  # it is on another node
        owners.append(_connect(_make_anchor_address(run_key)).detach())
    with contextlib.suppress(AttributeError, KeyError, OSError):  # without Ray, or old Linux
        owners.append(os.pidfd_open(int(os.environ["RAY_RAYLET_PID"])))
    return owners


def _release(prefix: str) -> None:
    for address in _find_addresses(prefix):
        with contextlib.suppress(OSError), _connect(address) as connection:
            connection.send(b'{"release": true}')


def _make_prefix(run_key: str) -> str:
    return f"drawbar-writer-{run_key}-"


def _find_addresses(prefix: str) -> list[str]:
    """Return the addresses of writers that begin with this prefix."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    names = {line.rpartition(" ")[2] for line in lines}
    return [f"\0{name[1:]}" for name in sorted(names) if name.startswith(f"@{prefix}")]


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(address)
        if not is_same_user(connection):
            raise PermissionError(f"{address[1:]} belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


class _WriterConnections:
    """Connections to writers. Writers of killed ranks live as long as a process is connected."""

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    def request_files(self, run_key: str, name: str) -> dict[str, tuple[int, int]]:
        """Return the descriptors and the sizes of the files that writers have, by path."""
        files: dict[str, tuple[int, int]] = {}
        with self._lock:
            for address in _find_addresses(_make_prefix(run_key)):
                # A writer that does not reply is like one that was killed.
                with contextlib.suppress(OSError, ValueError, KeyError):
                    self._request_files(address, name, files)
        return files

    def _request_files(self, address: str, name: str, files: dict[str, tuple[int, int]]) -> None:
        connection = self._connections.pop(address, None) or self._open(address)
        try:
            connection.send(json.dumps({"name": name}).encode())
            while True:
                data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
                message = json.loads(data)
                if not message:
                    break
                path = check_relative_path(message["path"])
                if path in files:
                    os.close(files[path][0])
                files[path] = descriptors[0], message["size"]
        except BaseException:
            connection.close()
            raise
        self._connections[address] = connection

    def _open(self, address: str) -> socket.socket:
        if not self._connections:
            atexit.register(self.end)
        return _connect(address)

    def end(self) -> None:
        """End the connections, and let the writers of killed ranks end."""
        with self._lock:
            while self._connections:
                _, connection = self._connections.popitem()
                with contextlib.suppress(OSError), connection:
                    connection.send(b'{"end": true}')


_writers = _WriterConnections()


@dataclass(frozen=True)
class _Restore:
    """Checkpoint from which this process resumes, and its run."""

    run_id: str
    run_key: str
    on_read: Callable[[str], None]
    request_from_peers: RequestFiles | None


_restores: dict[str, _Restore] = {}  # by path of the checkpoint


@contextmanager
def read_from_memory(
    path: str,
    run_id: str,
    run_key: str,
    on_read: Callable[[str], None],
    request_from_peers: RequestFiles | None = None,
) -> Iterator[None]:
    """Let this process read a checkpoint from memory while the block runs.

    Args:
        path: Path of the checkpoint.
        run_id: ID of the run.
        run_key: Identifier of the run, as in `make_run_key`.
        on_read: Called with the source of the files whenever they are read: "memory" of this node,
            "peer" if some are from another node, or "storage".
        request_from_peers: Requests files that no writer of this node has.
    """
    _restores[path] = restore = _Restore(run_id, run_key, on_read, request_from_peers)
    try:
        yield
    finally:
        if _restores.get(path) is restore:  # in a test, other ranks use this process, too
            del _restores[path]


@contextmanager
def open_memory_copy(path: StoragePath) -> Iterator[Path | None]:
    """Provide a directory with the files of a checkpoint in memory.

    Args:
        path: Path of the checkpoint.

    Yields:
        The directory; None if a file is not in memory, or this process does not resume from the
        checkpoint.
    """
    restore = _restores.get(path.fs_path)
    if restore is None:
        yield None
        return
    with _open_copy(path, restore) as (source, directory):
        restore.on_read(source)
        yield directory


@contextmanager
def _open_copy(path: StoragePath, restore: _Restore) -> Iterator[tuple[str, Path | None]]:
    run_key, request_from_peers = restore.run_key, restore.request_from_peers
    can_have_copy = bool(request_from_peers or _find_addresses(_make_prefix(run_key)))
    manifest = read_manifest(path) if can_have_copy else None
    if manifest is None or manifest.run_id != restore.run_id:
        yield "storage", None
        return
    name, source = make_copy_name(manifest.attempt, manifest.index), "memory"
    files = _writers.request_files(run_key, name)
    try:
        if request_from_peers is not None and not _has_all_files(manifest, files):
            missing = [file for file in manifest.files if file.path not in files]
            files |= request_from_peers(name, missing)
            source = "peer"
        if not _has_all_files(manifest, files):
            yield "storage", None
            return
        directory = _make_directory()
        try:
            for file in manifest.files:
                link = directory / file.path
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(f"/proc/{os.getpid()}/fd/{files[file.path][0]}")
            yield source, directory
        finally:
            remove_tree(directory)
    finally:
        with _open_files_lock:
            _open_files.extend(descriptor for descriptor, _ in files.values())
        close_unmapped_files()


_open_files: list[int] = []
"""Descriptors of files in directories that have been removed. The files may still be mapped."""

_open_files_lock = threading.Lock()


def close_unmapped_files() -> None:
    """Close the files that no code of this process has mapped, as `torch.load(mmap=True)` does.

    While a file is open, its lock keeps its rank from overwriting the content.
    """
    with _open_files_lock:
        mapped = _read_mapped_inodes() if _open_files else set()
        for descriptor in list(_open_files):
            if os.fstat(descriptor).st_ino not in mapped:
                _open_files.remove(descriptor)
                os.close(descriptor)


def _read_mapped_inodes() -> set[int]:
    """Return the inodes of the files in memory that readers in this process have mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {
        int(inode)
        for _, mode, _, _, inode, *path in lines
        if path and path[0].startswith(MEMORY_FILE_PREFIX) and mode != _MODE_OF_RANK
    }


def _has_all_files(manifest: Manifest, files: dict[str, tuple[int, int]]) -> bool:
    return bool(manifest.files) and all(
        file.path in files
        and files[file.path][1] == file.size == os.fstat(files[file.path][0]).st_size
        for file in manifest.files
    )


def _make_directory() -> Path:
    """Return a new directory, and remove the directories of killed processes."""
    parent = get_user_temp_directory()
    for other in parent.glob("memory-*-*"):
        if not Path("/proc", other.name.split("-")[1]).exists():
            remove_tree(other)
    directory = parent / f"memory-{os.getpid()}-{os.urandom(8).hex()}"
    directory.mkdir()
    return directory
