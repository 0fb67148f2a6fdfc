"""What a controller asks of its workers, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from drawbar.train._config.backend import BackendWorkerGroup
from drawbar.train._messages import Assignment, Message, Ranks, WorkerInfo
from drawbar.train._orders import Order
from drawbar.train._worker.stack import Stack

OnMessages = Callable[[int, Sequence[Message]], None]
OnWaiting = Callable[[int, bool], None]
"""Gets how many processes are up, and whether all have their place."""


class WorkerGroup(BackendWorkerGroup, Protocol):
    """What the controller needs of a group of workers."""

    @property
    def num_idle_workers(self) -> int:
        """Processes that are up and do not take part in the attempt."""
        ...

    async def start(self, on_waiting: OnWaiting) -> list[WorkerInfo]:
        """Bring up every slot that has no living worker; gives where they are, by slot.

        An elastic group gives those that there is room for. `on_wait` is called now and then.
        """
        ...

    def set_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Learn the rank of each worker that `start` gave; from now on ranks are spoken of."""
        ...

    def run(self, assignments: Sequence[Assignment], hear: OnMessages) -> None:
        """Begin an attempt; `assignments` are by slot.

        `hear(rank, messages)` is called on the event loop, in each rank's order. A process that
        dies says `Gone`.
        """
        ...

    def send_command(self, rank: int, order: Order) -> None:
        """Give one rank an order, without waiting."""
        ...

    async def end_attempt(
        self,
        *,
        grace: float,
        should_keep: bool,
        should_replace: bool,
        is_user_request: bool = False,
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

    def relocate_on_next_start(self) -> None:
        """Have the next start place every process anew."""
        ...

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Ask every rank where its threads stand; None for one that does not answer."""
        ...
