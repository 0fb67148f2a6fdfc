"""Collectives of one rank through the controller."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from drawbar._base.frames import format_caller_location, is_drawbar_frame
from drawbar._process.serialization import serialize
from drawbar._process.training_thread import ThreadGuard
from drawbar.train._protocol.commands import CollectiveResult
from drawbar.train._protocol.messages import CollectiveCalled, CollectiveKind
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.rank_timer import RankTimer

_CORE = "drawbar.train."


class Collectives:
    """Collectives of one rank in one attempt, numbered in call order.

    Args:
        rank: World rank of this worker.
        thread_guard: Checks which thread may call collectives.
        send_lock: Lock to hold while a message is numbered and sent.
        command_queue: Sends messages to the controller and receives the results.
        timer: Measures the time in collectives.
    """

    def __init__(
        self,
        rank: int,
        thread_guard: ThreadGuard,
        send_lock: AbstractContextManager[object],
        command_queue: CommandQueue,
        timer: RankTimer,
    ) -> None:
        self._rank = rank
        self._thread_guard = thread_guard
        self._send_lock = send_lock
        self._command_queue = command_queue
        self._timer = timer
        self._next_sequence = 0
        self._next_user_number = 0

    @property
    def call_count(self) -> int:
        """Number of collectives that this rank has called in this attempt."""
        return self._next_sequence

    def set_call_count(self, count: int) -> None:
        """Continue the numbering after calls of this rank in another process."""
        self._next_sequence = count

    def call(
        self, kind: CollectiveKind, value: object = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Run one collective call and return its values (none for a barrier).

        Args:
            kind: Which collective to run.
            value: This rank's value, for all_gather and on rank 0 of a broadcast.
            timeout: Time limit in seconds. None waits without limit.

        Raises:
            TimeoutError: Not every rank made this call within `timeout`.
        """
        # Do not serialize values that no rank reads: they may be large, or not picklable.
        has_payload = kind == "all_gather" or (
            kind == "broadcast_from_rank_zero" and self._rank == 0
        )
        payload = serialize(value) if has_payload else None
        location, is_user_call = format_caller_location(), not _is_called_by_integration()
        with self._send_lock:
            self._thread_guard.check_reporting_thread("a collective")
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            number = self._next_user_number if is_user_call else None
            self._next_user_number += is_user_call
            self._command_queue.send(
                CollectiveCalled(
                    sequence=sequence, number=number, kind=kind, payload=payload, location=location
                )
            )
        with self._timer.measure("collective"):
            result = self._command_queue.wait((CollectiveResult, sequence), timeout=timeout)
        assert isinstance(result, CollectiveResult)
        return [p.deserialize() for p in result.payloads if p is not None]


def _is_called_by_integration() -> bool:
    """Return whether an integration made this collective call, and not the user's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_CORE):
        frame = frame.f_back
    return is_drawbar_frame(frame)
