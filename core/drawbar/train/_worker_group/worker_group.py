"""Interface between the controller and a worker group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from drawbar.train._config.backend import BackendWorkerGroup
from drawbar.train._messages import Assignment, Message, Ranks, WorkerInfo
from drawbar.train._orders import Order
from drawbar.train._worker.stack import Stack

OnMessages = Callable[[int, Sequence[Message]], None]
OnWaiting = Callable[[int, bool], None]
"""Receives the number of ready processes, and whether all of them are placed."""


class WorkerGroup(BackendWorkerGroup, Protocol):
    """A group of workers, as the controller uses it."""

    @property
    def num_idle_workers(self) -> int:
        """Number of ready processes that do not take part in the attempt."""
        ...

    async def start(self, on_waiting: OnWaiting) -> list[WorkerInfo]:
        """Start a worker in every slot that has none, and wait for the workers.

        An elastic group returns as many workers as the cluster has room for.

        Args:
            on_waiting: Called repeatedly while the start takes long.

        Returns:
            The workers, by slot.
        """
        ...

    def set_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Set the rank of each worker that `start` returned. Other methods use ranks."""
        ...

    def run(self, assignments: Sequence[Assignment], on_messages: OnMessages) -> None:
        """Start an attempt.

        Args:
            assignments: Assignments, by slot.
            on_messages: Called on the event loop with a rank and its messages, in the order in
                which the rank sent them. `Gone` reports that the process of the rank died.
        """
        ...

    def send_command(self, rank: int, order: Order) -> None:
        """Send a command to a rank without waiting."""
        ...

    async def end_attempt(
        self,
        *,
        grace: float,
        should_keep: bool,
        should_replace: bool,
        is_user_request: bool = False,
    ) -> None:
        """Interrupt the functions that are still running.

        Args:
            grace: Seconds in which a function must end.
            should_keep: Keep idle processes for another attempt instead of killing them.
            should_replace: Start replacements of dead processes while others are still stopping.
            is_user_request: The user requested the interruption.
        """
        ...

    async def stop(self) -> None:
        """Shut down all processes, gracefully where they are idle, and release the resources."""
        ...

    def kill(self) -> None:
        """Kill every process immediately."""
        ...

    def relocate_on_next_start(self) -> None:
        """Make the next start place all processes again."""
        ...

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Return the stack of every rank, or None for a rank that does not reply."""
        ...
