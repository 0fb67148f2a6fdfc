"""Queue of everything that happens in a run, in order, with one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

EventT = TypeVar("EventT")
T = TypeVar("T")


class OperationEnded(NamedTuple):
    """Event: an operation that the consumer waits for has ended."""

    task: asyncio.Task[Any]


class EventQueue(Generic[EventT]):
    """Queue whose consumer handles events while it waits. Must be created on an event loop.

    Args:
        handle: Handles one event. Only `call` and `handle_until` call it.
    """

    def __init__(self, handle: Callable[[EventT], None]) -> None:
        self._handle = handle
        self._events = asyncio.Queue[EventT | OperationEnded]()
        self._operation: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, event: EventT) -> None:
        """Add an event. Must be called on the event loop."""
        self._events.put_nowait(event)

    def put_from_thread(self, event: EventT) -> None:
        """Add an event. Thread-safe.

        Raises:
            RuntimeError: The event loop is closed.
        """
        self._loop.call_soon_threadsafe(self.put, event)

    async def join(self) -> None:
        """Wait until the consumer has handled all events."""
        await self._events.join()

    async def call(self, operation: Coroutine[Any, Any, T]) -> T | None:
        """Handle events until an operation has ended.

        Returns:
            The result of the operation; None if it was cancelled by `cancel_operation`.
        """
        task = self._operation = asyncio.create_task(operation)
        # Events that were put on the queue before the operation ended are handled first.
        task.add_done_callback(lambda task: self._events.put_nowait(OperationEnded(task)))
        try:
            await self.handle_until(lambda: self._operation is not task)
        finally:
            task.cancel()  # has no effect unless an event could not be handled
        return None if task.cancelled() else task.result()

    async def handle_until(self, is_done: Callable[[], bool]) -> None:
        """Handle one event after the other until a condition is true."""
        while not is_done():
            event = await self._events.get()
            try:
                if not isinstance(event, OperationEnded):
                    self._handle(event)
                elif event.task is self._operation:
                    self._operation = None
            finally:
                self._events.task_done()

    def cancel_operation(self) -> None:
        """Cancel the operation that the consumer waits for, if there is one."""
        if self._operation is not None:
            self._operation.cancel()
