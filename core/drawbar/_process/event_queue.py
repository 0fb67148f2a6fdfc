"""Queue of everything that happens in a run, in order, with one consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

EventT = TypeVar("EventT")
T = TypeVar("T")


class Marker(NamedTuple):
    """Entry of the queue that calls a function when all earlier events are handled."""

    on_reached: Callable[[], None]


class EventQueue(Generic[EventT]):
    """Queue whose consumer handles events while it waits. Must be created on an event loop.

    Args:
        handle: Handles one event. Only `call` and `handle_until` call it.
    """

    def __init__(self, handle: Callable[[EventT], None]) -> None:
        self._handle = handle
        # Not an `asyncio.Queue`, which takes several times as long for each event.
        self._events: deque[EventT | Marker] = deque()
        self._has_events: asyncio.Future[None] | None = None
        self._operation: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()

    def put(self, event: EventT | Marker) -> None:
        """Add an event. Must be called on the event loop."""
        self._events.append(event)
        if self._has_events is not None and not self._has_events.done():
            self._has_events.set_result(None)

    def put_from_thread(self, event: EventT) -> None:
        """Add an event. Thread-safe.

        Raises:
            RuntimeError: The event loop is closed.
        """
        self._loop.call_soon_threadsafe(self.put, event)

    async def join(self) -> None:
        """Wait until the consumer has handled all events that are on the queue now."""
        handled = asyncio.Event()
        self.put(Marker(handled.set))
        await handled.wait()

    async def call(self, operation: Coroutine[Any, Any, T]) -> T | None:
        """Handle events until an operation has ended.

        Returns:
            The result of the operation; None if it was cancelled by `cancel_operation`.
        """
        task = self._operation = asyncio.create_task(operation)
        has_ended = asyncio.Event()
        # Events that were put on the queue before the operation ended are handled first.
        task.add_done_callback(lambda _: self.put(Marker(has_ended.set)))
        try:
            await self.handle_until(has_ended.is_set)
        finally:
            self._operation = None
            task.cancel()  # has no effect unless an event could not be handled
        return None if task.cancelled() else task.result()

    async def handle_until(self, is_done: Callable[[], bool]) -> None:
        """Handle one event after the other until a condition is true."""
        events, handle = self._events, self._handle
        while not is_done():
            if not events:
                self._has_events = self._loop.create_future()
                await self._has_events
                continue
            event = events.popleft()
            if isinstance(event, Marker):
                event.on_reached()
            else:
                handle(event)

    def cancel_operation(self) -> None:
        """Cancel the operation that the consumer waits for, if there is one."""
        if self._operation is not None:
            self._operation.cancel()
