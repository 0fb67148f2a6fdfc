"""Pieces of files, under way between here and the nodes that do not share the run's directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from drawbar.train._messages import FileAsked, FileSent
from drawbar.train._orders import FileTaken, Order
from drawbar.train._storage.node_local_storage import FileReply, read_chunk, write_chunk
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import run_in_daemon_thread


class FileTransfers:
    """Writes what ranks of such nodes send, and reads what they ask for. Made on the event loop.

    A rank sends the next piece when it has heard of the last one, so they are written in order.

    Args:
        directory: Where the run lies.
        failed: Called on the event loop when the disk refuses a piece.
    """

    def __init__(self, directory: RunDirectory, failed: Callable[[Exception], None]) -> None:
        self._directory = directory
        self._failed = failed
        self._staging_directories: dict[tuple[str, int], Path] = {}  # by checkpoint and rank
        self._running: set[asyncio.Task[None]] = set()

    def write_chunk(self, rank: int, sent: FileSent, answer: Callable[[Order], None]) -> None:
        """Write a piece of a rank's share of a checkpoint, then say so."""

        def write() -> FileTaken:
            if (sent.name, rank) not in self._staging_directories:
                self._staging_directories[sent.name, rank] = self._directory.staging.make_directory(
                    f"rank_{rank}"
                )
            write_chunk(
                self._staging_directories[sent.name, rank] / sent.path, sent.offset, sent.data
            )
            return FileTaken(number=sent.number)

        self._run_in_thread(write, answer)

    def read_chunk(self, asked: FileAsked, answer: Callable[[Order], None]) -> None:
        """Give a piece of a committed checkpoint."""

        def read() -> FileReply:
            piece = read_chunk(self._directory, asked.name, asked.path, asked.offset)
            return msgspec.structs.replace(piece, number=asked.number)

        self._run_in_thread(read, answer)

    def _run_in_thread(self, work: Callable[[], Order], answer: Callable[[Order], None]) -> None:
        """Have a thread do what the disk may hold up, and answer with what it gives."""

        async def answered() -> None:
            try:
                answer(await run_in_daemon_thread(work))
            except OSError as error:
                self._failed(error)

        task = asyncio.create_task(answered())
        # asyncio holds a task only weakly.
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def pop_staging_directory(self, name: str, rank: int) -> Path | None:
        """Give the folder of a share that is here in full; None if no piece of it came."""
        return self._staging_directories.pop((name, rank), None)

    async def finish(self) -> None:
        """Wait until none is being written; what has come of shares that never end is dropped."""
        if self._running:
            await asyncio.wait(self._running)
        self._staging_directories.clear()
