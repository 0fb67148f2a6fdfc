"""Write a checkpoint to storage in another process while training continues."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from drawbar._async_save import writer_process
from drawbar._async_save.memory_copies import listen, make_copy_name, open_owners
from drawbar._async_save.memory_files import MemoryFiles
from drawbar._process.errors import CheckpointError, StorageError
from drawbar._process.sentinel import WORKER_MARKER_VARIABLE
from drawbar._process.threads import DaemonThreadPool
from drawbar._storage.contents import FileEntry, format_exact_size
from drawbar._storage.retries import add_context, is_transient
from drawbar.train._worker.report_checks import BackgroundWrite

_OPTIONS = ("-I", "-S", "-E")
_END_TIMEOUT_S = 1.0
_MAX_REPLY_BYTES = 1 << 16

Replicate = Callable[[str, Mapping[str, int]], None]
"""Copies a checkpoint to another node: receives its name, and descriptors of its files by path."""


class BackgroundWriter:
    """Process that writes files from shared memory, one checkpoint at a time.

    The process starts with the first checkpoint and ends with this object. If this process is
    killed, it keeps the last checkpoints for a while (see `memory_copies.py`).

    Args:
        run_key: Identifier of the run, as in `make_run_key`.
        rank: Rank of this process.
    """

    def __init__(self, run_key: str, rank: int) -> None:
        # The first one has the next checkpoint, the second one the checkpoint before.
        self._files = [MemoryFiles(), MemoryFiles()]
        self._process = _WriterProcess(run_key, rank)
        self._thread = DaemonThreadPool(1, "drawbar-writer")
        weakref.finalize(self, _end, self._files, self._process, self._thread)

    def clear_files(self) -> MemoryFiles:
        """Return the files of the next checkpoint, which are empty.

        They must not change while the checkpoint is written.
        """
        self._files[0].clear()
        return self._files[0]

    def submit(
        self, directory: Path, attempt: int, replicate: Replicate | None = None
    ) -> BackgroundWrite:
        """Start to write all files of the next checkpoint to a directory.

        Args:
            directory: The directory.
            attempt: Number of the attempt.
            replicate: Called when the files are written, before the memory is used again.
        """
        self._files[0].truncate()
        files, descriptors = self._files[0].list_files(), self._files[0].get_descriptors()
        self._files.reverse()
        report_index = Future[int]()
        # A reference to this object until the end: its end frees the memory.
        done = self._thread.submit(
            self._write, directory, files, descriptors, attempt, report_index, replicate
        )
        return BackgroundWrite(files, done, report_index)

    def _write(
        self,
        directory: Path,
        files: tuple[FileEntry, ...],
        descriptors: dict[str, int],
        attempt: int,
        report_index: Future[int],
        replicate: Replicate | None,
    ) -> None:
        """Write the files.

        Raises:
            StorageError: The storage is full, for example.
            OSError: The error is transient.
            CheckpointError: The process has died.
        """
        for file in files:
            self._process.write(directory, file, descriptors[file.path])
        try:
            name = make_copy_name(attempt, report_index.result())
        except CancelledError:  # the checkpoint was not reported
            return
        self._process.set_complete(directory, name)
        if replicate is not None:
            replicate(name, descriptors)


class _WriterProcess:
    """Connection to the process, which is started when it is needed."""

    def __init__(self, run_key: str, rank: int) -> None:
        self._run_key = run_key
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def write(self, directory: Path, file: FileEntry, descriptor: int) -> None:
        """Write a file from its memory to a directory.

        Raises:
            StorageError: The storage is full, for example.
            OSError: The error is transient.
            CheckpointError: The process has died.
        """
        directory = directory.absolute()  # the process has another working directory
        path = directory / file.path
        fields = {"directory": str(directory), "path": file.path, "size": file.size}
        reply = self._request({"id": str(directory), **fields}, [descriptor])
        if reply is None:
            raise CheckpointError(
                f"{path} is incomplete, because the process that was writing it {self._wait()}. "
                "The checkpoint is not committed."
            )
        if reply:
            cause = OSError(reply["errno"], reply["reason"])
            cause = add_context(cause, f"writing {format_exact_size(file.size)} to {path}")
            raise cause if is_transient(cause) else StorageError(*cause.args)

    def set_complete(self, directory: Path, name: str) -> None:
        """Let readers read the files of a directory from memory; see `make_copy_name`."""
        # Without a reply, the process has died: the files are written, so this is no error.
        self._request({"id": str(directory.absolute()), "complete": name}, [])

    def _request(self, request: dict[str, object], descriptors: list[int]) -> dict[str, Any] | None:
        """Return the reply; None if the process has died."""
        connection = self._connect()
        try:
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], descriptors)
            reply = connection.recv(_MAX_REPLY_BYTES)
        except ConnectionError:
            return None
        return json.loads(reply) if reply else None

    def _connect(self) -> socket.socket:
        # If the process has died between two checkpoints, no file is lost.
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self.end()
            self._connection, child = socket.socketpair()
            # Without the variable by which the sentinel of a killed rank finds its processes.
            env = {key: value for key, value in os.environ.items() if key != WORKER_MARKER_VARIABLE}
            script = os.path.abspath(writer_process.__file__)
            with child, listen(self._run_key, self._rank) as listener:
                descriptors = [listener.fileno(), *(owners := open_owners(self._run_key))]
                self._process = subprocess.Popen(
                    [sys.executable, *_OPTIONS, script, *map(str, descriptors)],
                    stdin=child.fileno(),
                    # It must not keep the output of the attempt open.
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",  # so that it does not keep a filesystem busy
                    env=env,
                    pass_fds=descriptors,
                    start_new_session=True,  # the sentinel kills the process group of the rank
                )
                for owner in owners:
                    os.close(owner)
        return self._connection

    def _wait(self) -> str:
        """Return how the process has ended."""
        assert self._process is not None  # it was started
        status = self._process.wait()
        if status >= 0:
            return f"ended with exit code {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def end(self) -> None:
        """End the process."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(b'{"end": true}\n')
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _end(files: list[MemoryFiles], process: _WriterProcess, thread: DaemonThreadPool) -> None:
    thread.shutdown(wait=False)
    process.end()
    for each in files:
        each.release()
