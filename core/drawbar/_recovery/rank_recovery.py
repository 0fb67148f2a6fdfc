"""In-place recovery as one rank sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from drawbar._base.api import set_public_module
from drawbar._process.ranks import Ranks
from drawbar._recovery.messages import (
    GroupFormed,
    RanksLost,
    RecoveryCommand,
    RecoveryDeclined,
    RecoveryFinished,
    RecoveryMessage,
    RecoveryReady,
)

DEATH_NOTICE_S = 30.0
"""Maximum time from an error in a collective until the controller reports a death."""


class Assignment(Protocol):
    """Assignment of a worker."""

    @property
    def ranks(self) -> Ranks:
        """Ranks of the worker."""
        ...

    @property
    def replaced(self) -> RanksLost | None:
        """Death after which this process replaces a worker; None in its first process."""
        ...

    @property
    def num_received_reports(self) -> int:
        """Number of the next report of the dead process."""
        ...


class Waiter(Protocol):
    """Lets the thread of the training function wait until the attempt ends.

    Attributes:
        take_task: Returns a function that a waiting thread must run before it waits any longer.
    """

    take_task: Callable[[], Callable[[], None] | None]

    def wait_until(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Wait until a condition is true. Raise an exception if the attempt has ended."""
        ...

    def notify(self) -> None:
        """Let all threads check their conditions again."""
        ...


class Numbering(Protocol):
    """Numbers of the reports, collectives, and requests of a rank."""

    def get_counters(self) -> tuple[int, int, int]:
        """Return the numbers."""
        ...

    def set_counters(self, counters: tuple[int, int, int]) -> None:
        """Continue with the numbers of another rank."""
        ...


class RankRecovery:
    """In-place recovery of this rank, for framework integrations.

    An integration that can recover registers itself with `set_member`. From then on, the death of
    another rank is announced in another thread. The training function then calls `wait_for_group`
    at the next point at which its state is known.

    Args:
        assignment: Rank of this worker, and the death after which it replaces a process.
        send: Callback that sends messages to the controller.
        waiter: Waits in the thread of the training function.
        numbering: Numbers the reports of the rank.

    Attributes:
        is_joining: Whether this process replaces a dead rank and has not received the state yet.

    Example:
        >>> recovery = get_recovery()
        >>> if recovery is not None:
        ...     recovery.set_member(leave_collectives, recover)
    """

    def __init__(
        self,
        assignment: Assignment,
        send: Callable[[RecoveryMessage], None],
        waiter: Waiter,
        numbering: Numbering,
    ) -> None:
        self.is_joining = assignment.replaced is not None
        self._rank = assignment.ranks.world_rank
        self._num_received_reports = assignment.num_received_reports
        self._send = send
        self._waiter = waiter
        self._numbering = numbering
        waiter.take_task = self._take_task
        self._lost = assignment.replaced or RanksLost(generation=0, leader=0)
        self._formed: GroupFormed | None = None
        self._generation = 0  # of the group that this rank is in
        self._leave_collectives: Callable[[], str] | None = None
        self._recover: Callable[[], None] | None = None
        self._thread: int | None = None

    def set_member(self, leave_collectives: Callable[[], str], recover: Callable[[], None]) -> None:
        """Join recoveries from now on. Call it in the thread of the training function.

        Args:
            leave_collectives: Called in another thread when a rank has died. It ends collectives
                of this rank with an error, and returns why the rank cannot recover, "" if it can.
            recover: Called in the thread of the training function while it waits in a function of
                `drawbar.train`. It must call `wait_for_group`.
        """
        self._leave_collectives, self._recover = leave_collectives, recover
        self._thread = threading.get_ident()

    def handle_command(self, command: RecoveryCommand) -> None:
        """Handle a command of the controller. Called from any thread; never blocks."""
        if isinstance(command, GroupFormed):
            self._formed = command
        elif command.generation > self._lost.generation:
            self._lost = command
            reason = "its function has not prepared a model and an optimizer yet"
            if self._leave_collectives is not None:
                reason = self._leave_collectives()
            if reason and not self.is_joining:
                self.decline(reason)
        self._waiter.notify()

    def _take_task(self) -> Callable[[], None] | None:
        """Return the recovery that the calling thread must run while it waits, if there is one."""
        is_needed = self._lost.generation > self._generation and not self.is_joining
        return self._recover if is_needed and threading.get_ident() == self._thread else None

    def wait_for_group(self, open_store: Callable[[], str]) -> GroupFormed:
        """Wait until all ranks are ready for a new group, and return it.

        Args:
            open_store: Opens a store on this node for the new group, and returns its address. It is
                called on one rank.

        Returns:
            The new group.

        Raises:
            TimeoutError: No death was announced, so that an error in a collective has another
                cause.
        """
        self._waiter.wait_until(lambda: self._lost.generation > self._generation, DEATH_NOTICE_S)
        if self._lost.generation <= self._generation:
            raise TimeoutError("no rank has died")
        while True:
            lost = self._lost
            address = open_store() if self._rank == lost.leader else ""
            self._send(RecoveryReady(generation=lost.generation, address=address))
            self._waiter.wait_until(partial(self._is_decided, lost.generation), None)
            formed = self._formed
            if formed is not None and formed.generation == self._lost.generation:
                self._generation = formed.generation
                return formed

    def _is_decided(self, generation: int) -> bool:
        is_formed = self._formed is not None and self._formed.generation == generation
        return is_formed or self._lost.generation > generation

    @property
    def has_lost_ranks(self) -> bool:
        """True if a rank has died since the latest group was formed."""
        return self._lost.generation > self._generation

    def get_counters(self) -> tuple[int, int, int]:
        """Return the numbers of reports, collectives, and requests of this rank.

        A rank that has them and the state of the framework can continue in place of this one.
        """
        return self._numbering.get_counters()

    def join(self, counters: tuple[int, int, int], latest: tuple[int, int, int]) -> None:
        """Record that this rank has received the state of another one.

        Until then, reports have no effect, and collectives return their recorded results.

        Args:
            counters: Result of `get_counters` on the other rank, at the place of the state.
            latest: Result of `get_counters` on the other rank when it sent the state.
        """
        reports, collectives, requests = counters
        # The other rank may report more or less often than this one, for example if only rank 0
        # reports. The dead process may have made one report more than the other rank.
        if not reports - 1 <= self._num_received_reports <= latest[0] + 1:
            reports = self._num_received_reports
        self._numbering.set_counters((reports, collectives, requests))
        self.is_joining = False

    def decline(self, reason: str) -> None:
        """End the attempt, so that the run restarts from its latest checkpoint."""
        self._send(RecoveryDeclined(generation=self._lost.generation, reason=reason))

    def finish(self, stopped_seconds: float) -> None:
        """Report that this rank trains in the new group again.

        Args:
            stopped_seconds: Time in seconds in which it did not.
        """
        self._send(RecoveryFinished(generation=self._generation, stopped_seconds=stopped_seconds))


set_public_module(globals(), module="drawbar.train.backend", names=["RankRecovery"])
