"""Read, write, and delete files of checkpoints outside the event loop.

Checksums, deletions, and uploads of run files run in a low-priority thread. File chunks of nodes
with node-local storage are transferred by several threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from drawbar._process.threads import DaemonThreadPool
from drawbar._records.event_stream import Emit
from drawbar._records.live_events import Notice
from drawbar._storage.contents import CHECKSUMS_FILE, MANIFEST_FILE, FileEntry, list_files
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._protocol.commands import FILE_CHUNK_BYTES, Command, FileChunkAck, FileReply
from drawbar.train._protocol.messages import FileChunk, FileRequest

CLOSE_NOTICE_S = 5.0
"""Time that the end of a run waits for background tasks before it emits a notice."""

_logger = logging.getLogger("drawbar.train")


class BackgroundTasks:
    """Run tasks one after the other on a low-priority thread. Must be used on the event loop."""

    def __init__(self) -> None:
        # Use a single thread, so that a checkpoint is never hashed while it is being deleted.
        self._thread = DaemonThreadPool(1, "drawbar-background", _lower_thread_priority)
        self._running: set[asyncio.Future[None]] = set()
        self._should_stop_waiting = False

    def submit(self, action: Callable[..., object], *arguments: object) -> None:
        """Queue a call. Its exceptions are logged."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, run_and_log_errors, action, *arguments)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def stop_waiting(self) -> None:
        """Cancel queued calls and make `close()` return without waiting for the running one."""
        self._should_stop_waiting = True
        for future in list(self._running):
            future.cancel()

    async def close(self, emit: Emit) -> None:
        """Wait until all calls have ended or are cancelled.

        Args:
            emit: Receives a notice if this takes longer than `CLOSE_NOTICE_S`.
        """
        if self._running:
            _, unfinished = await asyncio.wait(self._running, timeout=CLOSE_NOTICE_S)
            if unfinished:
                emit(Notice(_CLOSE_NOTICE))
                await asyncio.wait(unfinished)
        self._thread.shutdown(wait=not self._should_stop_waiting, cancel_futures=True)


_CLOSE_NOTICE = (
    "Training has ended. Waiting for checksums and deletions of checkpoints. This takes as long as "
    "reading the checkpoints. To skip it, call stop() or press Ctrl-C."
)


def run_and_log_errors(action: Callable[..., object], *arguments: object) -> None:
    """Call a function and log its exceptions as warnings."""
    try:
        action(*arguments)
    except Exception as error:  # fsspec filesystems raise the exceptions of their libraries
        _logger.warning("%s", error)


def _lower_thread_priority() -> None:
    """Lower the priority of this thread, so that hashing does not slow commits and training."""
    if sys.platform != "linux":
        return  # on other systems this would affect the entire process
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_TRANSFER_THREADS = 8  # limits the chunks of all ranks that are written at the same time


class FileTransfers:
    """Write chunks that ranks send and read chunks that they request.

    Must be used on the event loop, which does not wait for the I/O. A rank sends the next chunk
    after the reply to the last one, so its chunks are written in order.

    Args:
        directory: Run directory.
        on_failed: Called on the event loop when a chunk cannot be read or written.
    """

    def __init__(self, directory: RunDirectory, on_failed: Callable[[Exception], None]) -> None:
        self._directory = directory
        self._on_failed = on_failed
        self._pool = DaemonThreadPool(_TRANSFER_THREADS, "drawbar-transfers")
        self._running: set[asyncio.Task[None]] = set()

    def write_chunk(
        self, chunk: FileChunk, target_directory: Path, reply: Callable[[Command], None]
    ) -> None:
        """Write a chunk of a rank's assigned files to a directory, and acknowledge it."""

        def write() -> FileChunkAck:
            _write_chunk(target_directory / chunk.path, chunk.offset, chunk.data)
            return FileChunkAck(request_id=chunk.request_id)

        self._run_in_thread(write, reply)

    def read_chunk(self, request: FileRequest, reply: Callable[[Command], None]) -> None:
        """Read a chunk of a committed checkpoint and send it."""

        def read() -> FileReply:
            chunk = _read_chunk(
                self._directory, request.checkpoint_name, request.path, request.offset
            )
            return msgspec.structs.replace(chunk, request_id=request.request_id)

        self._run_in_thread(read, reply)

    def _run_in_thread(self, work: Callable[[], Command], reply: Callable[[Command], None]) -> None:
        """Run blocking I/O in a thread and send its result."""

        async def run_and_reply() -> None:
            try:
                reply(await asyncio.wrap_future(self._pool.submit(work)))
            except OSError as error:
                self._on_failed(error)

        task = asyncio.create_task(run_and_reply())
        # asyncio keeps only a weak reference to a task.
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self) -> None:
        """Wait for the running transfers."""
        if self._running:
            await asyncio.wait(self._running)

    def close(self) -> None:
        """End the threads. Call `finish` first."""
        self._pool.shutdown(wait=False)


def _read_chunk(directory: RunDirectory, name: str, path: str, offset: int) -> FileReply:
    """Return the requested chunk; the list of files if `path` is empty."""
    checkpoint_path = directory.local_path / name
    if not path:
        names = (MANIFEST_FILE, CHECKSUMS_FILE)
        reserved = [
            FileEntry(name, (checkpoint_path / name).stat().st_size)
            for name in names
            if (checkpoint_path / name).exists()
        ]
        return FileReply(request_id=0, files=(*list_files(checkpoint_path), *reserved))
    with open(checkpoint_path / path, "rb") as reader:
        reader.seek(offset)
        return FileReply(request_id=0, data=reader.read(FILE_CHUNK_BYTES))


def _write_chunk(target: Path, offset: int, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "ab" if offset else "wb") as file:
        file.write(data)
