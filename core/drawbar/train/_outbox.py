"""What a worker has to say, on its way into the stream.

Each item of the stream costs a millisecond or two of CPU time, most of it Ray's, in the worker and
in the driver. Where all cores train, all ranks wait for the one that was held up. So what may wait
gathers.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from drawbar.train._messages import Message, Reported

GATHER_SECONDS = 0.25
"""How long after the last item a report that may wait is kept for the next one, at the most."""


class Outbox:
    """Keeps a worker's messages, in order, until they are taken."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._last = -GATHER_SECONDS

    def put(self, message: Message) -> None:
        """Keep a message; called from any thread."""
        self._messages.put(message)
        may_wait = isinstance(message, Reported) and message.may_wait
        if not may_wait and not self._urgent.is_set():
            self._urgent.set()

    def take(self) -> list[Message]:
        """Give all messages, once there is one; if none is urgent, not too soon after the last."""
        batch = [self._messages.get()]
        self._urgent.wait(max(self._last + GATHER_SECONDS - time.monotonic(), 0))
        self._urgent.clear()  # before the queue is emptied, so that none is overlooked
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._messages.get_nowait())
        self._last = time.monotonic()
        return batch
