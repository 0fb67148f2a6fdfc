"""Write a checkpoint to storage in another process while training continues."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from drawbar._process.errors import CheckpointError, StorageError
from drawbar._process.threads import DaemonThreadPool
from drawbar._storage import writer_process
from drawbar._storage.contents import FileEntry, format_exact_size
from drawbar._storage.memory_files import MemoryFiles
from drawbar._storage.retries import add_context, is_transient

_END_TIMEOUT_S = 1.0
_MAX_REPLY_BYTES = 1 << 16


@dataclass(frozen=True)
class BackgroundWrite:
    """Files that another process is writing to a directory.

    Attributes:
        files: The files.
        done: Future that has no result. Its exception states why the files are not written.
    """

    files: tuple[FileEntry, ...]
    done: Future[None]


class BackgroundWriter:
    """Process that writes files from shared memory, one checkpoint at a time.

    The process starts with the first checkpoint and ends with this object or with its process.

    Attributes:
        files: Files of the next checkpoint. They must not change while a checkpoint is written.
    """

    def __init__(self) -> None:
        self.files = MemoryFiles()
        self._process = _WriterProcess()
        self._thread = DaemonThreadPool(1, "drawbar-writer")
        weakref.finalize(self, _end, self.files, self._process, self._thread)

    def submit(self, directory: Path) -> BackgroundWrite:
        """Start to write all files of `files` to a directory."""
        files, descriptors = self.files.list_files(), self.files.get_descriptors()
        # A reference to this object until the end: its end frees the memory.
        done = self._thread.submit(self._write, directory, files, descriptors)
        return BackgroundWrite(files, done)

    def _write(
        self, directory: Path, files: tuple[FileEntry, ...], descriptors: dict[str, int]
    ) -> None:
        """Write the files.

        Raises:
            StorageError: The storage is full, for example.
            OSError: The error is transient.
            CheckpointError: The process has died.
        """
        for file in files:
            self._process.write(directory, file, descriptors[file.path])


class _WriterProcess:
    """Connection to the process, which is started when it is needed."""

    def __init__(self) -> None:
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
        request = json.dumps(fields).encode() + b"\n"
        connection = self._connect()
        try:
            socket.send_fds(connection, [request], [descriptor])
            reply = connection.recv(_MAX_REPLY_BYTES)
        except ConnectionError:
            reply = b""
        if not reply:
            raise CheckpointError(
                f"{path} is incomplete, because the process that was writing it {self._wait()}. "
                "The checkpoint is not committed."
            )
        if error := json.loads(reply):
            cause = OSError(error["errno"], error["reason"])
            cause = add_context(cause, f"writing {format_exact_size(file.size)} to {path}")
            raise cause if is_transient(cause) else StorageError(*cause.args)

    def _connect(self) -> socket.socket:
        # If the process has died between two checkpoints, no file is lost.
        if self._connection is None or self._process is None or self._process.poll() is not None:
            self.end()
            self._connection, child = socket.socketpair()
            with child:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-E", os.path.abspath(writer_process.__file__)],
                    stdin=child.fileno(),
                    # It must not keep the output of the attempt open.
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",  # so that it does not keep a filesystem busy
                )
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
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _end(files: MemoryFiles, process: _WriterProcess, thread: DaemonThreadPool) -> None:
    thread.shutdown(wait=False)
    process.end()
    files.release()
