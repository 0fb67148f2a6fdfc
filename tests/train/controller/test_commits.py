"""Pieces of files that travel from nodes of their own: a slow disk holds nothing else up."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from drawbar.train import CheckpointConfig
from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.progress import ReportRound
from drawbar.train._messages import FileSent, Offer, Reported
from drawbar.train._orders import FileTaken, Order, Persist
from drawbar.train._storage import upkeep
from drawbar.train._storage.contents import FileEntry
from drawbar.train._storage.run_directory import RunDirectory

PATIENCE_S = 20
FILES = (FileEntry("fast", 1), FileEntry("slow", 1))


def offered(rank: int) -> Reported:
    offer = Offer(directory=f"/of/rank/{rank}", files=FILES, staged=False, name="checkpoint_000000")
    return Reported(index=0, metrics={}, time=0.0, where="", offer=offer)


def sent(number: int, path: str, data: bytes) -> FileSent:
    return FileSent(number=number, name="checkpoint_000000", path=path, offset=0, data=data)


async def pieces_of_two_ranks(folder: Path) -> None:
    directory = RunDirectory(folder)
    upkeep.create_directories(directory)
    said: asyncio.Queue[object] = asyncio.Queue()
    commits = CheckpointCommitter(
        directory,
        CheckpointConfig(),
        metadata={},
        emit=lambda _: None,
        on_committed=said.put_nowait,
        on_failed=said.put_nowait,
    )

    async def next_said() -> object:
        return await asyncio.wait_for(said.get(), PATIENCE_S)

    def order(rank: int, order: Order) -> None:
        assert isinstance(order, Persist)

    complete = ReportRound(0, {0: offered(0), 1: offered(1)}, {0: FILES, 1: FILES})
    commits.start(complete, run_id="r", attempt=0, world_size=2, send_command=order)
    commits.on_chunk(0, sent(0, "fast", b"f"), said.put_nowait)
    assert await next_said() == FileTaken(number=0)
    (stage,) = directory.staging.path.glob("rank_0-*")
    os.mkfifo(stage / "slow")  # opening it waits for a reader, as for a disk
    commits.on_chunk(0, sent(1, "slow", b"s"), said.put_nowait)
    commits.on_chunk(1, sent(2, "fast", b"f"), said.put_nowait)
    assert await next_said() == FileTaken(number=2)
    reader = await asyncio.to_thread(open, stage / "slow", "rb")
    with reader:
        assert await next_said() == FileTaken(number=1)
        assert await asyncio.to_thread(reader.read) == b"s"
    (stage / "slow").unlink()
    (stage / "slow").mkdir()
    commits.on_chunk(0, sent(3, "slow", b"s"), said.put_nowait)
    assert isinstance(await next_said(), IsADirectoryError)
    await commits.close()


def test_while_a_slow_disk_writes_for_one_rank_others_are_answered(tmp_path: Path) -> None:
    asyncio.run(pieces_of_two_ranks(tmp_path))
