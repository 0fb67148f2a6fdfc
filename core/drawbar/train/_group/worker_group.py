"""What a controller asks of its workers, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from drawbar.train._messages import Assignment, Message, Ranks, WorkerInfo
from drawbar.train._orders import Order
from drawbar.train._settings.backend import WorkerGroupView
from drawbar.train._worker.stack import Stack

Hear = Callable[[int, Sequence[Message]], None]
OnWait = Callable[[int, bool], None]
"""Gets how many processes are up, and whether all have their place."""


class WorkerGroup(WorkerGroupView, Protocol):
    """What the controller needs of a group of workers."""

    @property
    def spare(self) -> int:
        """Processes that are up and do not take part in the attempt."""
        ...

    async def start(self, on_wait: OnWait) -> list[WorkerInfo]:
        """Bring up every slot that has no living worker; gives where they are, by slot.

        An elastic group gives those that there is room for. `on_wait` is called now and then.
        """
        ...

    def take_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Learn the rank of each worker that `start` gave; from now on ranks are spoken of."""
        ...

    def run(self, assignments: Sequence[Assignment], hear: Hear) -> None:
        """Begin an attempt; `assignments` are by slot.

        `hear(rank, messages)` is called on the event loop, in each rank's order. A process that
        dies says `Gone`.
        """
        ...

    def order(self, rank: int, order: Order) -> None:
        """Give one rank an order, without waiting."""
        ...

    async def end_attempt(
        self, *, grace: float, keep: bool, replace: bool, by_user: bool = False
    ) -> None:
        """Interrupt what still runs. Kept processes can run another attempt, others are killed.

        `replace` starts the replacements of the dead at once, while the others are still stopping.
        """
        ...

    async def stop(self) -> None:
        """End every process, in an orderly way where it is idle, and give the resources back."""
        ...

    def kill(self) -> None:
        """End every process at once."""
        ...

    def move(self) -> None:
        """Have the next start place every process anew."""
        ...

    async def stacks(self) -> dict[int, Stack | None]:
        """Ask every rank where its threads stand; None for one that does not answer."""
        ...
