"""Interface between the controller and a worker group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.stack import Stack
from drawbar.train._config.backend import BackendWorkerGroup
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import Command, InterruptFunction
from drawbar.train._protocol.messages import GroupMessage

SubmitCall = Callable[[Callable[[], None]], None]
"""Runs a call in a thread of this process."""

OnMessages = Callable[[int, Sequence[GroupMessage]], None]
OnWaiting = Callable[[int, bool], None]
"""Receives the number of ready workers, and whether the resources of all workers are reserved."""


class Replacement(NamedTuple):
    """New process of a rank: a function that returns its assignment, and `on_messages`."""

    make_assignment: Callable[[WorkerInfo], WorkerAssignment]
    on_messages: OnMessages


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """Request to end an attempt.

    Attributes:
        grace: Maximum time to wait, in seconds. Processes whose function is still running are then
            killed.
        should_keep: Whether processes whose function has ended are kept for another attempt instead
            of being killed.
        should_replace: Whether new processes start at once in place of dead and killed ones.
        is_user_request: Whether the user has stopped the run.
        failed_ranks: Ranks whose processes are not kept, unless a process has died.
    """

    grace: float
    should_keep: bool = True
    should_replace: bool = False
    is_user_request: bool = False
    failed_ranks: Collection[int] = ()

    @property
    def interrupt(self) -> InterruptFunction:
        """Command that interrupts the functions."""
        return InterruptFunction(reason="the attempt is over", is_user_request=self.is_user_request)


class WorkerGroup(BackendWorkerGroup, Protocol):
    """A group of workers, as the controller uses it."""

    @property
    def num_idle_workers(self) -> int:
        """Number of workers that became ready too late to take part in the attempt."""
        ...

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Start the missing workers, wait until enough of them are ready, and assign ranks.

        An elastic group may return fewer workers than its maximum. The other methods identify
        workers by their rank.

        Args:
            on_waiting: Called every few seconds while workers are missing.

        Returns:
            The ready workers with their ranks, in rank order.
        """
        ...

    def run(self, assignments: Sequence[WorkerAssignment], on_messages: OnMessages) -> None:
        """Start an attempt.

        Args:
            assignments: One assignment for each worker.
            on_messages: Called on the event loop with a rank and its messages, in the order in
                which the rank sent them. `WorkerDied` reports that the process of the rank died.
        """
        ...

    def replace_worker(self, rank: int, new: Replacement, *, shares_node: bool) -> None:
        """Start a new process for a rank whose process has died, in the same attempt.

        If that fails, a `WorkerDied` of the rank follows.

        Args:
            rank: Rank of the dead process.
            new: The new process.
            shares_node: Whether the process starts on the node of another rank, without reserved
                resources, because the resources of the rank are lost.
        """
        ...

    def send_command(self, rank: int, command: Command) -> None:
        """Send a command to a rank without waiting."""
        ...

    def broadcast_command(self, ranks: Collection[int], command: Command) -> None:
        """Send the same command to several ranks without waiting.

        This serializes a large command only once.
        """
        ...

    async def end_attempt(self, end: AttemptEnd) -> None:
        """Interrupt training functions that are still running, and wait until they end."""
        ...

    async def stop(self) -> None:
        """End all processes and release the resources. Idle processes run exit handlers first."""
        ...

    def kill(self) -> None:
        """Kill every process immediately. The next `start` may place new ones on other nodes."""
        ...

    def exclude_node(self, node_id: str) -> bool:
        """Start no worker on a node after the next `kill`.

        Returns:
            False if the other nodes have no room for the workers.
        """
        ...

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Return the stack trace of every rank; None for a rank that does not reply."""
        ...
