"""Event queue of the controller, and sources of events that block neither it nor each other."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from drawbar._process.event_queue import EventQueue
from drawbar._records.live_events import Event, Notice
from drawbar._recovery import node_watcher
from drawbar._recovery.node_watcher import NodeWatcher
from drawbar._storage.contents import FileEntry
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import CheckpointConfig
from drawbar.train._controller.checkpoint_coordinator import CheckpointCoordinator
from drawbar.train._controller.commits import CommitContext, StorageFailed
from drawbar.train._controller.progress import AttemptProgress, ReportRound
from drawbar.train._protocol.commands import Command, FileChunkAck, PersistFiles
from drawbar.train._protocol.messages import CheckpointOffer, FileChunk, Report

TIMEOUT_S = 20.0


def test_event_queue_handles_events_during_operation() -> None:
    async def count_until_three() -> tuple[int | None, list[int]]:
        three = asyncio.Event()
        handled: list[int] = []

        def handle(number: int) -> None:
            handled.append(number)
            if number < 3:
                queue.put(number + 1)
            else:
                three.set()

        async def wait_for_three() -> int:
            queue.put(1)
            await three.wait()
            queue.put(4)  # handled, because the operation has not ended
            return len(handled)

        queue = EventQueue[int](handle)
        return await asyncio.wait_for(queue.call(wait_for_three()), TIMEOUT_S), handled

    assert asyncio.run(count_until_three()) == (3, [1, 2, 3, 4])


def test_event_queue_operation_can_wait_for_handled_events() -> None:
    async def join() -> list[int]:
        handled: list[int] = []
        queue = EventQueue[int](handled.append)

        async def put_and_join() -> list[int]:
            for number in range(3):
                queue.put(number)
            await queue.join()
            return list(handled)

        return await asyncio.wait_for(queue.call(put_and_join()), TIMEOUT_S) or []

    assert asyncio.run(join()) == [0, 1, 2]


def test_event_queue_cancels_operation() -> None:
    async def cancel() -> tuple[object, int | None]:
        queue = EventQueue[str](lambda _: queue.cancel_operation())
        queue.put("stop")
        cancelled = await asyncio.wait_for(queue.call(asyncio.sleep(3600, "slept")), TIMEOUT_S)
        return cancelled, await queue.call(asyncio.sleep(0, 7))

    assert asyncio.run(cancel()) == (None, 7)


def test_event_queue_cancels_operation_if_an_event_cannot_be_handled() -> None:
    async def fail() -> bool:
        ended = asyncio.Event()

        def handle(number: int) -> None:
            raise OSError(number, "disk full")

        async def wait_forever() -> None:
            queue.put(28)
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        queue = EventQueue[int](handle)
        with pytest.raises(OSError, match="disk full"):
            await asyncio.wait_for(queue.call(wait_forever()), TIMEOUT_S)
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        return ended.is_set()

    assert asyncio.run(fail())


# -- unresponsive GCS


def test_node_watcher_reports_unresponsive_and_recovered_gcs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_watcher, "DRAIN_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(node_watcher, "GCS_NOTICE_S", 0.05)
    is_responding, notices = threading.Event(), list[str]()

    def get_draining_nodes() -> dict[str, int]:
        assert is_responding.wait(300)
        return {}

    async def watch() -> None:
        has_both_notices = asyncio.Event()

        def emit(event: Event) -> None:
            assert isinstance(event, Notice)
            notices.append(event.text)
            is_responding.set()
            if len(notices) == 2:
                has_both_notices.set()

        task = asyncio.create_task(NodeWatcher(get_draining_nodes, lambda _: None, emit).run())
        await asyncio.wait_for(has_both_notices.wait(), 60)
        task.cancel()

    asyncio.run(watch())
    assert notices[0].startswith("Ray's control service (GCS) does not respond.")
    assert notices[1] == "Ray's control service (GCS) responds again."


# -- slow disk of one rank

FILES = (FileEntry("fast", 1), FileEntry("slow", 1))


def make_report(rank: int) -> Report:
    offer = CheckpointOffer(
        directory=f"/rank/{rank}", files=FILES, checkpoint_name="checkpoint_000000"
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
