"""Requests of the controller, which take effect at the same call on every rank.

A rank only counts its calls, because a message for each call would take too long. When the
controller has a request, all ranks agree on a call that none of them has made yet:

1. The controller announces the request. The thread that receives commands replies with the number
   of the rank's next call. From then on, that call waits for the result.
2. When all ranks have replied, the largest number is the result. No rank waits for the progress of
   another one, so this also works while ranks wait for each other in a collective of a framework.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from drawbar._process.training_thread import ThreadGuard
from drawbar.train._protocol.commands import ControllerRequests, RequestAgreed, RequestAnnounced
from drawbar.train._protocol.messages import RequestSeen
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.rank_timer import RankTimer


class RankRequests:
    """Requests of the controller to one rank in one attempt.

    Args:
        thread_guard: Checks which thread may call `get`.
        command_queue: Sends replies to the controller and receives the agreed calls.
        timer: Measures the time in which a call waits, and knows when the rank saves.
    """

    def __init__(
        self, thread_guard: ThreadGuard, command_queue: CommandQueue, timer: RankTimer
    ) -> None:
        self._thread_guard = thread_guard
        self._command_queue = command_queue
        self._timer = timer
        self._lock = threading.Lock()
        self.call_count = 0
        self._last_call = self._longest_interval = 0.0  # in seconds
        self._commands: list[RequestAnnounced | RequestAgreed] = []
        self._announced: list[int] = []  # ids of requests that the next call waits for
        self._agreed = deque[RequestAgreed]()  # requests that take effect at a later call
        self._current = ControllerRequests()

    def get(self) -> ControllerRequests:
        """Return the requests in effect. The k-th call returns the same value on all ranks.

        Raises:
            AttemptInterrupted: The attempt has been interrupted.
        """
        with self._lock:
            self._thread_guard.check_reporting_thread("should_checkpoint()")
            self.call_count += 1
            previous, self._last_call = self._last_call, time.monotonic()
            interval = self._last_call - (previous or self._last_call)
            self._longest_interval = max(self._longest_interval, interval)
            if not self._announced and not self._agreed:
                return self._current
            call, announced = self.call_count, self._announced
            self._announced = []
        for request_id in announced:
            with self._timer.measure("collective"):
                agreed = self._command_queue.wait((RequestAgreed, request_id))
            assert isinstance(agreed, RequestAgreed)
            self._agreed.append(agreed)
        with self._lock:
            while self._agreed and self._agreed[0].call <= call:
                self._current = self._agreed.popleft().requests
            return self._current

    def handle_command(self, command: RequestAnnounced | RequestAgreed) -> None:
        """Handle a command of the controller. Called from any thread; never blocks."""
        with self._lock:
            self._commands.append(command)
            if isinstance(command, RequestAnnounced):
                self._announced.append(command.request_id)
            reply = RequestSeen(
                request_id=command.request_id,
                call=self.call_count + 1,
                longest_interval=self._longest_interval,
                is_saving=self._timer.is_saving or self._current.should_checkpoint,
            )
        if isinstance(command, RequestAnnounced):
            self._command_queue.send(reply)
        else:
            self._command_queue.put(command)

    def get_commands(self) -> tuple[RequestAnnounced | RequestAgreed, ...]:
        """Return all commands of this attempt."""
        with self._lock:
            return tuple(self._commands)

    def restore(
        self, call_count: int, commands: Iterable[RequestAnnounced | RequestAgreed]
    ) -> None:
        """Continue after calls and commands of this rank in another process.

        The controller ignores the repeated replies.
        """
        self.call_count = call_count
        for command in commands:
            self.handle_command(command)
