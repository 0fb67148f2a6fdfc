"""Chunks from nodes with node-local storage: a slow disk blocks only its own rank."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from drawbar.train import CheckpointConfig
from drawbar.train._controller.checkpoint_coordinator import CheckpointCoordinator
from drawbar.train._controller.commits import CommitContext, StorageFailed
from drawbar.train._controller.progress import AttemptProgress, ReportRound
from drawbar.train._protocol.commands import Command, FileChunkAck, PersistFiles
from drawbar.train._protocol.messages import CheckpointOffer, FileChunk, Report
from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.run_directory import RunDirectory

TIMEOUT_S = 20
FILES = (FileEntry("fast", 1), FileEntry("slow", 1))


def make_report(rank: int) -> Report:
    offer = CheckpointOffer(
        directory=f"/rank/{rank}", files=FILES, is_staged=False, checkpoint_name="checkpoint_000000"
    )
    return Report(index=0, metrics={}, time=0.0, location="", offer=offer)


def make_chunk(number: int, path: str, data: bytes) -> FileChunk:
    return FileChunk(
        request_id=number, checkpoint_name="checkpoint_000000", path=path, offset=0, data=data
    )


async def send_chunks_of_two_ranks(path: Path) -> None:
    directory = RunDirectory(path)
    directory.create_directories()
    replies: asyncio.Queue[object] = asyncio.Queue()
    checkpoints = CheckpointCoordinator(
        directory,
        CheckpointConfig(),
        metadata={},
        validator=None,
        emit=lambda _: None,
        put_event=replies.put_nowait,
    )

    async def receive_reply() -> object:
        return await asyncio.wait_for(replies.get(), TIMEOUT_S)

    def send_command(rank: int, command: Command) -> None:
        if not isinstance(command, PersistFiles):
            replies.put_nowait(command)

    report_round = ReportRound(0, {0: make_report(0), 1: make_report(1)}, {0: FILES, 1: FILES})
    checkpoints.start_attempt(AttemptProgress(2, 0), CommitContext("r", 0, 2, send_command))
    checkpoints.commit_round(report_round)
    checkpoints.on_message(0, make_chunk(0, "fast", b"f"))
    assert await receive_reply() == FileChunkAck(request_id=0)
    (staging_directory,) = directory.staging.list_directories()
    slow_file = staging_directory / "slow"
    os.mkfifo(slow_file)  # opening it blocks until it is read, as on a slow disk
    checkpoints.on_message(0, make_chunk(1, "slow", b"s"))
    checkpoints.on_message(1, make_chunk(2, "fast", b"f"))
    assert await receive_reply() == FileChunkAck(request_id=2)
    reader = await asyncio.to_thread(open, slow_file, "rb")
    with reader:
        assert await receive_reply() == FileChunkAck(request_id=1)
        assert await asyncio.to_thread(reader.read) == b"s"
    slow_file.unlink()
    slow_file.mkdir()
    checkpoints.on_message(0, make_chunk(3, "slow", b"s"))
    failed = await receive_reply()
    assert isinstance(failed, StorageFailed)
    assert isinstance(failed.error, IsADirectoryError)
    await checkpoints.close()


def test_chunks_of_other_ranks_are_acknowledged_during_slow_write(tmp_path: Path) -> None:
    asyncio.run(send_chunks_of_two_ranks(tmp_path))
