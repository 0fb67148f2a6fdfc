"""Send the messages of a worker in batches."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from drawbar.train._protocol.messages import Message, Report

REPORT_BATCH_S = 0.25
"""Minimum time between two batches if the second one begins with a report of `report_buffered`."""

MAX_BATCHES_PER_S = 100
"""Maximum rate, over all ranks, of batches with only reports. Each costs the driver about 1 ms."""

MAX_BATCH_INTERVAL_S = 2.0
"""Maximum time that a report waits for others."""

BURST_REPORTS = 100
"""Number of reports of all ranks that are sent at once before the maximum rate applies."""


class Outbox:
    """Ordered buffer for the messages of a worker.

    Reports without a checkpoint wait if the ranks report faster than `MAX_BATCHES_PER_S`. All other
    messages are sent at once, together with earlier reports, because a process may be waiting for
    them.

    Args:
        world_size: Number of ranks, which share the maximum rate.
    """

    def __init__(self, world_size: int) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._has_urgent = threading.Event()
        self._interval = min(world_size / MAX_BATCHES_PER_S, MAX_BATCH_INTERVAL_S)
        self._max_lead = max(BURST_REPORTS / world_size - 1, 0) * self._interval
        self._last_batch_time = -REPORT_BATCH_S
        # Time of the next batch at the maximum rate. A batch may be earlier by `_max_lead`.
        self._next_batch_time = 0.0

    def put(self, message: Message) -> None:
        """Add a message. Can be called from any thread."""
        self._messages.put(message)
        # `set()` takes a lock each time, and a loop that prints calls this a million times.
        can_wait = isinstance(message, Report) and message.offer is None
        if not can_wait and not self._has_urgent.is_set():
            self._has_urgent.set()

    def take_batch(self) -> list[Message]:
        """Wait for a message and return all messages that have been added.

        If all of them can wait, return them when the next batch is due.
        """
        batch = [self._messages.get()]
        is_urgent = self._has_urgent.wait(max(self._get_due_time(batch[0]) - time.monotonic(), 0))
        # Clear before emptying the queue, so that no urgent message is missed.
        self._has_urgent.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._messages.get_nowait())
        self._last_batch_time = time.monotonic()
        if not is_urgent:  # urgent messages do not delay later reports
            self._next_batch_time = (
                max(self._next_batch_time, self._last_batch_time) + self._interval
            )
        return batch

    def _get_due_time(self, message: Message) -> float:
        """Return when a batch that begins with a message is due if no message is urgent."""
        if isinstance(message, Report) and message.is_buffered:
            return self._last_batch_time + max(REPORT_BATCH_S, self._interval)
        return self._next_batch_time - self._max_lead
