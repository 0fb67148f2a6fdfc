"""In-place recovery as the controller sees it, for one attempt. No Ray and no I/O."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from drawbar._process.serialization import Serialized
from drawbar._records.events import AttemptEndCause, ReportsLost
from drawbar._recovery.membership import Membership
from drawbar._recovery.messages import (
    JoinTimedOut,
    RanksLost,
    RankStalled,
    RecoveryCommand,
    RecoveryDeclined,
    RecoveryFinished,
    RecoveryMessage,
    RecoveryNotice,
    RecoveryReady,
)
from drawbar._recovery.recorded_collectives import RecordedCollectives

DeathT = TypeVar("DeathT")
CheckBudget = Callable[[AttemptEndCause, Counter[AttemptEndCause]], str]

JOIN_TIMEOUT_S = 120.0
"""Maximum time that a new process needs until it can receive the state of the training."""


def find_obstacle(has_returned: bool, is_in_checkpoint: bool) -> str:
    """Return why a death cannot be recovered in place, "" if it can.

    Args:
        has_returned: Whether a rank has returned from its function.
        is_in_checkpoint: Whether the dead rank took part in a checkpoint that is not committed.
    """
    if has_returned:
        return "a rank has returned from its function"
    if is_in_checkpoint:
        return "the dead rank took part in a checkpoint that is not committed"
    return ""


def make_reports_lost(rank: int, first: int, until: int) -> ReportsLost:
    """Return the event for reports that a rank would have made between two steps.

    Its process has died there, and the new one continues with the next step.
    """
    return ReportsLost(time=time.time(), first=first, until=until, ranks=[rank], checkpoint="")


@dataclass(frozen=True)
class Declined:
    """Decision to restart the run instead of recovering in place."""

    reason: str


@dataclass(frozen=True)
class Recovered(Generic[DeathT]):
    """A recovery that all ranks have finished.

    Attributes:
        deaths: First death by rank.
        num_deaths: Number of deaths by cause, also of new processes.
        stopped_seconds: Longest time in which a rank did not train.
    """

    deaths: Mapping[int, DeathT]
    num_deaths: Counter[AttemptEndCause]
    stopped_seconds: float


class AttemptRecovery(Generic[DeathT]):
    """In-place recoveries of one attempt.

    Args:
        world_size: Number of ranks.
        broadcast: Sends a command to several ranks.
        replace: Starts a new process for a rank, which receives the announcement of the death. It
            is called with the rank, the announcement, and the description of the death.
        on_recovered: Called when all ranks have finished a recovery.
        check_budget: Returns why a further death with this cause cannot be recovered, "" if it can.
            It is called with the cause, and the number of deaths in this recovery by cause.

    Attributes:
        deaths: First death by rank that is not recovered yet. The deaths of new processes are
            often consequences.
        collectives: Results of collectives for new processes that call them again.
    """

    def __init__(
        self,
        world_size: int,
        broadcast: Callable[[Collection[int], RecoveryCommand], None],
        replace: Callable[[int, RanksLost, DeathT], None],
        on_recovered: Callable[[Recovered[DeathT]], None],
        check_budget: CheckBudget = lambda cause, num_deaths: "",
    ) -> None:
        self.deaths: dict[int, DeathT] = {}
        self.collectives = RecordedCollectives()
        self._num_deaths = Counter[AttemptEndCause]()
        self._world_size = world_size
        self._broadcast = broadcast
        self._replace = replace
        self._on_recovered = on_recovered
        self._check_budget = check_budget
        self._membership = Membership(world_size)
        self._had_replacement: set[int] = set()
        self._starting: set[int] = set()  # ranks whose new processes have not sent a message

    @property
    def announcement(self) -> RanksLost:
        """Command that announces the latest death."""
        return self._membership.make_command()

    def on_death(
        self, rank: int, death: DeathT, obstacle: str, cause: AttemptEndCause = "worker"
    ) -> Declined | None:
        """Replace a rank that has died, unless there is an obstacle.

        Args:
            rank: Rank of the dead process.
            death: Description of the death.
            obstacle: Why the attempt cannot recover in place, "" if it can.
            cause: "worker", or "preemption" if the process was lost with its node.
        """
        self.deaths.setdefault(rank, death)
        if obstacle := obstacle or self._check_budget(cause, self._num_deaths):
            return Declined(obstacle)
        self._num_deaths[cause] += 1
        lost = self._membership.on_death(rank)
        if lost is None:
            return Declined("all ranks with the state of the training have died")
        self._starting.add(rank)
        self._had_replacement.add(rank)
        others = [other for other in range(self._world_size) if other not in self._starting]
        self._broadcast(others, lost)
        self._replace(rank, lost, death)
        return None

    def on_message(self, rank: int, message: RecoveryMessage | RecoveryNotice) -> Declined | None:
        """Handle a message of a rank about the recovery."""
        match message:
            case RecoveryReady():
                self._starting.discard(rank)
                if message.generation < self._membership.generation:
                    # Its process did not exist when the latest death was announced.
                    self._broadcast([rank], self._membership.make_command())
                if formed := self._membership.on_ready(rank, message):
                    self._broadcast(range(self._world_size), formed)
            case RankStalled():
                # A new process may have lost the count of its steps.
                if rank in self._had_replacement and not self.is_replaced(rank):
                    return Declined(
                        f"other ranks wait for a call of rank {rank}, whose process was replaced. "
                        "It may count its steps itself, for example with enumerate()"
                    )
            case JoinTimedOut():
                if late := self._membership.list_late(message.generation):
                    return Declined(
                        f"the new process of rank {late[0]} was not ready within "
                        f"{JOIN_TIMEOUT_S:g} s"
                    )
            case RecoveryDeclined():
                if self._membership.is_waiting_for(rank, message.generation):
                    return Declined(f"rank {rank}: {message.reason}")
            case RecoveryFinished():
                if self._membership.on_finished(rank, message):
                    recovered = Recovered(
                        self.deaths, self._num_deaths, self._membership.stopped_seconds
                    )
                    self.deaths, self._num_deaths = {}, Counter()
                    self._on_recovered(recovered)
        return None

    def on_returned(self, rank: int) -> Declined | None:
        """Handle the return of a rank from its function. It cannot join another group."""
        if self._membership.is_recovering:
            return Declined(f"rank {rank} has returned from its function")
        return None

    def is_replaced(self, rank: int) -> bool:
        """Return whether a rank has a new process that does not have the state yet."""
        return rank in self._membership.replaced

    def repeat_collective(
        self, sequence: int, rank: int, call: str
    ) -> tuple[Serialized | None, ...] | Declined:
        """Return the recorded result of a collective that a rank calls again."""
        payloads = self.collectives.find(sequence, rank, call)
        if payloads is None:
            return Declined(
                f"rank {rank} calls {call} again, whose result is not recorded. Only collectives "
                "of the setup and of the current step can be repeated"
            )
        return payloads
