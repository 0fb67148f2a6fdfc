"""Meetings of this rank with all others: what `drawbar.train.collective` and its kin do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from drawbar.train._messages import CollectiveCalled, CollectiveKind, Message, Wishes
from drawbar.train._orders import CollectiveDone
from drawbar.train._package_files import is_drawbar_frame
from drawbar.train._serialization import serialize
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.thread_guard import ThreadGuard
from drawbar.train._worker.user_frames import format_caller_location

_CORE = "drawbar.train."


class Collectives:
    """The collectives of one rank in one attempt, numbered in the order of its calls.

    Args:
        rank: The rank.
        callers: Check who calls.
        order: Held while something is numbered and said.
        say: Tells the controller something.
        mailbox: Where the answers arrive.
    """

    def __init__(
        self,
        rank: int,
        thread_guard: ThreadGuard,
        send_lock: AbstractContextManager[object],
        say: Callable[[Message], None],
        command_queue: CommandQueue,
    ) -> None:
        self._rank = rank
        self._callers = thread_guard
        self._order = send_lock
        self._say = say
        self._mailbox = command_queue
        self._next = 0
        self._next_of_user = 0

    @property
    def call_count(self) -> int:
        """Do what `drawbar.train.backend.collectives_called` says."""
        return self._next

    def set_call_count(self, count: int) -> None:
        """Begin after those that this rank has called in another process."""
        self._next = count

    def call(
        self, kind: CollectiveKind, value: object = None, *, timeout: float | None = None
    ) -> list[Any]:
        """Run one collective call and return its values (none for a barrier)."""
        # What nobody reads is not packed: it may be large, or not pickle.
        has_payload = kind == "all_gather" or (
            kind == "broadcast_from_rank_zero" and self._rank == 0
        )
        payload = serialize(value) if has_payload else None
        where, is_users = format_caller_location(), not _is_called_by_integration()
        with self._order:
            self._callers.check_reporting_thread("a collective")
            sequence, self._next = self._next, self._next + 1
            number = self._next_of_user if is_users else None
            self._next_of_user += is_users
            self._say(
                CollectiveCalled(
                    sequence=sequence, number=number, kind=kind, payload=payload, where=where
                )
            )
        done = self._mailbox.wait((CollectiveDone, sequence), timeout=timeout)
        assert isinstance(done, CollectiveDone)
        return [p.deserialize() for p in done.payloads if p is not None]

    def get_requests(self) -> Wishes:
        """Ask, together with all ranks, what the controller wishes."""
        (wishes,) = self.call("wishes")
        found: Wishes = wishes
        return found


def _is_called_by_integration() -> bool:
    """Return whether an integration made this collective call, and not the user's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_CORE):
        frame = frame.f_back
    return is_drawbar_frame(frame)
