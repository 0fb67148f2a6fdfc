"""Transfer file chunks to and from nodes with node-local storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from drawbar.train._protocol.commands import Command, FileChunkAck
from drawbar.train._protocol.messages import FileChunk, FileRequest
from drawbar.train._storage.node_local_storage import FileReply, read_chunk, write_chunk
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import DaemonThreadPool

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
            write_chunk(target_directory / chunk.path, chunk.offset, chunk.data)
            return FileChunkAck(request_id=chunk.request_id)

        self._run_in_thread(write, reply)

    def read_chunk(self, request: FileRequest, reply: Callable[[Command], None]) -> None:
        """Read a chunk of a committed checkpoint and send it."""

        def read() -> FileReply:
            chunk = read_chunk(
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
