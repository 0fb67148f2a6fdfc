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
from drawbar.train._threads import run_in_daemon_thread


class FileTransfers:
    """Write chunks that ranks send and read chunks that they request.

    Must be used on the event loop. A rank sends the next chunk after the reply to the last one, so
    its chunks are written in order.

    Args:
        directory: Run directory.
        on_failed: Called on the event loop when a chunk cannot be read or written.
    """

    def __init__(self, directory: RunDirectory, on_failed: Callable[[Exception], None]) -> None:
        self._directory = directory
        self._on_failed = on_failed
        self._staging_directories: dict[tuple[str, int], Path] = {}  # by checkpoint and rank
        self._running: set[asyncio.Task[None]] = set()

    def write_chunk(self, rank: int, chunk: FileChunk, reply: Callable[[Command], None]) -> None:
        """Write a chunk of a rank's assigned files and acknowledge it."""

        def write() -> FileChunkAck:
            if (chunk.checkpoint_name, rank) not in self._staging_directories:
                self._staging_directories[chunk.checkpoint_name, rank] = (
                    self._directory.staging.make_directory(f"rank_{rank}")
                )
            write_chunk(
                self._staging_directories[chunk.checkpoint_name, rank] / chunk.path,
                chunk.offset,
                chunk.data,
            )
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
                reply(await run_in_daemon_thread(work))
            except OSError as error:
                self._on_failed(error)

        task = asyncio.create_task(run_and_reply())
        # asyncio keeps only a weak reference to a task.
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def pop_staging_directory(self, name: str, rank: int) -> Path | None:
        """Remove and return the directory of a rank's transferred files; None if there is none."""
        return self._staging_directories.pop((name, rank), None)

    async def finish(self) -> None:
        """Wait for the running transfers, and drop incomplete files."""
        if self._running:
            await asyncio.wait(self._running)
        self._staging_directories.clear()
