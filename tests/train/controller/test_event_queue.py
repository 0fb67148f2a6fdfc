"""EventQueue: one consumer, which handles events while it waits for an operation."""

from __future__ import annotations

import asyncio

import pytest

from drawbar.train._controller.event_queue import EventQueue

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
