"""Progress of each rank, collective calls of all ranks, and proof that ranks wait without end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from drawbar._base.indexed_heap import IndexedHeap
from drawbar._base.wording import format_count
from drawbar._process.serialization import Serialized
from drawbar._storage.contents import format_exact_size
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CollectiveCalled,
    CollectiveKind,
    Report,
)


class ActivityClock:
    """Times of the last messages of the ranks, by the clock of this process.

    The clocks of the nodes may differ.
    """

    def __init__(self, world_size: int) -> None:
        self._times = dict.fromkeys(range(world_size), time.monotonic())

    def record(self, rank: int) -> None:
        """Record a message of a rank."""
        self._times[rank] = time.monotonic()

    def get_idle_seconds(self) -> float:
        """Return the time since the last message of any rank."""
        return time.monotonic() - max(self._times.values())

    def get_idle_seconds_by_rank(self) -> dict[int, float]:
        """Return the time since the last message of each rank."""
        now = time.monotonic()
        return {rank: now - message_time for rank, message_time in self._times.items()}


@dataclass
class RankProgress:
    """Progress of one rank: its calls, the call that blocks it, and whether it has finished.

    Attributes:
        reports: Number of the next report.
        collectives: Number of collective calls, including those that Drawbar makes.
        users_collectives: Number of collective calls of the user's code.
        last: Line of the last report or collective call of the user's code, "" if there is none.
        awaited_report: Report whose checkpoint the rank waits for.
        awaited_collective: Collective that the rank waits in.
        awaited_checkpoints: Request for the list of checkpoints that the rank waits for.
        is_finished: Whether the rank's function has returned.
        pending_offers: Reports with files whose rounds are not complete, in order, by index.
    """

    reports: int
    collectives: int = 0
    users_collectives: int = 0
    last: str = ""
    awaited_report: Report | None = None
    awaited_collective: CollectiveCalled | None = None
    awaited_checkpoints: CheckpointListRequest | None = None
    is_finished: bool = False
    pending_offers: dict[int, Report] = field(default_factory=dict)

    @property
    def is_blocked(self) -> bool:
        """True if a call of Drawbar blocks the rank."""
        return (
            self.awaited_collective is not None
            or self.awaited_report is not None
            or self.awaited_checkpoints is not None
        )

    @property
    def oldest_offer(self) -> Report | None:
        """First report with files whose round is not complete; None if there is none."""
        return next(iter(self.pending_offers.values()), None)

    @property
    def needed_report(self) -> int:
        """Index of the last report that the rank needs from all running ranks; -1 if none.

        A rank that waits in a collective needs no report.
        """
        if self.awaited_checkpoints is not None:
            return self.reports - 1  # includes the oldest offer
        offer = self.oldest_offer
        return -1 if offer is None else offer.index

    def describe(self) -> str:
        """Describe the call that the rank is in."""
        if self.awaited_collective is not None:
            call = self.awaited_collective
            which = "internal collective" if call.number is None else f"collective #{call.number}"
            return f"waits in {which} ({call.kind}) at {call.location}"
        if self.awaited_report is not None:
            report = self.awaited_report
            return f"waits for report #{report.index} with a checkpoint at {report.location}"
        if self.awaited_checkpoints is not None:
            location = self.awaited_checkpoints.location
            return (
                f"waits in get_all_reported_checkpoints() for report #{self.reports - 1} at "
                f"{location}"
            )
        if self.is_finished:
            calls = (
                f"{format_count(self.reports, 'report')} and "
                f"{format_count(self.users_collectives, 'collective')}"
            )
            return f"finished after {calls}" + (f", the last at {self.last}" if self.last else "")
        return "runs"

    def describe_wait(self) -> str:
        """Describe why the rank needs calls of other ranks."""
        offer = self.oldest_offer
        if offer is None or self.is_blocked:
            return self.describe()
        return f"has a checkpoint pending in report #{offer.index} from {offer.location}"


MAX_RESULT_BYTES = 1_000_000_000
"""Maximum size of the serialized result of a collective, which every rank receives."""


class CollectiveCalls:
    """Collective calls by rank, until all ranks have made the same call.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._calls: dict[int, CollectiveCalled] = {}
        # By sequence number and kind. Two entries prove a divergence.
        self._num_ranks: dict[tuple[int, CollectiveKind], int] = {}

    def add(self, rank: int, call: CollectiveCalled) -> dict[int, CollectiveCalled] | None:
        """Add a call. Return the calls of all ranks if this one completes the collective."""
        previous = self._calls.get(rank)
        # A rank whose call has timed out may make another one.
        if previous is not None:
            self._remove(previous)
        self._calls[rank] = call
        key = call.sequence, call.kind
        self._num_ranks[key] = self._num_ranks.get(key, 0) + 1
        if len(self._calls) < self._world_size or self.has_different_calls:
            return None
        calls, self._calls = self._calls, {}
        self._num_ranks.clear()
        return calls

    def _remove(self, call: CollectiveCalled) -> None:
        key = call.sequence, call.kind
        self._num_ranks[key] -= 1
        if not self._num_ranks[key]:
            del self._num_ranks[key]

    @property
    def has_different_calls(self) -> bool:
        """True if two ranks wait in different collectives."""
        return len(self._num_ranks) > 1

    @property
    def sequence(self) -> int:
        """Sequence number of the collective that ranks wait in, if it is only one; -1 if none."""
        return next(iter(self._num_ranks))[0] if self._num_ranks else -1


def collect_payloads(calls: Mapping[int, CollectiveCalled]) -> tuple[Serialized, ...]:
    """Return the payloads that the ranks of a complete collective receive, in rank order.

    The payloads are not deserialized: only ranks deserialize user objects.

    Raises:
        ValueError: The payloads are larger than `MAX_RESULT_BYTES`.
    """
    # Without the calls that have no payload: all of a barrier, and all but one of a broadcast.
    payloads = tuple(call.payload for _, call in sorted(calls.items()) if call.payload is not None)
    size = sum(payload.size for payload in payloads)
    if size > MAX_RESULT_BYTES:
        call = calls[0]
        raise ValueError(
            f"{call.kind}() at {call.location} has a result of "
            f"{format_exact_size(size)}, but every rank can receive at most "
            f"{format_exact_size(MAX_RESULT_BYTES)}. Pass smaller values, save them in a "
            "checkpoint, or use a collective of the framework, such as "
            "torch.distributed.all_gather."
        )
    return payloads


class DivergenceDetector:
    """Find ranks that wait forever.

    The proof is one pair of ranks: one waits for a call of all ranks, and the other one has
    finished without that call, or is blocked in a different call that needs the first rank.
    Comparing all pairs at each message takes too long. Therefore `find` compares them only if the
    extreme values of the ranks show that a pair exists (`is_suspected`).

    Args:
        ranks: Progress by rank.
        collectives: Collective calls that are not complete.
    """

    def __init__(self, ranks: Mapping[int, RankProgress], collectives: CollectiveCalls) -> None:
        self._ranks = ranks
        self._collectives = collectives
        # Finished ranks: number of their next report, and of their collectives.
        self._finished_reports = IndexedHeap[int]()
        self._finished_collectives = IndexedHeap[int]()
        # Running ranks that wait in a collective: number of their next report.
        self._reports_in_collective = IndexedHeap[int]()
        # Ranks outside of collectives: index of the oldest pending offer, and of the report that a
        # blocked rank needs. Both are negative, because the largest ones are needed.
        self._oldest_offers = IndexedHeap[int]()
        self._needed_reports = IndexedHeap[int]()

    def update(self, rank: int) -> None:
        """Record that the progress of a rank has changed."""
        progress = self._ranks[rank]
        if progress.is_finished:
            self._finished_reports.set(rank, progress.reports)
            self._finished_collectives.set(rank, progress.collectives)
        if progress.awaited_collective is None:
            self._reports_in_collective.discard(rank)
            self._update_needs(rank, progress)
            return
        self._oldest_offers.discard(rank)
        self._needed_reports.discard(rank)
        if progress.is_finished:  # after a timeout of the collective
            self._reports_in_collective.discard(rank)
        else:
            self._reports_in_collective.set(rank, progress.reports)

    def on_collective_completed(self) -> None:
        """Record that no rank waits in a collective anymore."""
        self._reports_in_collective.clear()
        for rank, progress in self._ranks.items():
            if progress.pending_offers or progress.is_blocked:
                self._update_needs(rank, progress)

    def _update_needs(self, rank: int, progress: RankProgress) -> None:
        offer = progress.oldest_offer
        if offer is None:
            self._oldest_offers.discard(rank)
        else:
            self._oldest_offers.set(rank, -offer.index)
        if progress.is_blocked:
            self._needed_reports.set(rank, -progress.needed_report)
        else:
            self._needed_reports.discard(rank)

    def find(self) -> str | None:
        """Return why a rank waits forever, and the remedy on a second line; None if none does."""
        return self._compare_all_pairs() if self.is_suspected else None

    @property
    def is_suspected(self) -> bool:
        """False if no pair of ranks can prove a divergence.

        If True, a pair exists, except in rare cases after a timeout.

        Ranks that wait in the same collective do not need each other. Neither do ranks that wait
        outside of collectives, because each has made the report that it needs.
        """
        return (
            self._collectives.has_different_calls
            or self._finished_collectives.smallest <= self._collectives.sequence
            or self._finished_reports.smallest <= -self._oldest_offers.smallest
            or self._reports_in_collective.smallest <= -self._needed_reports.smallest
        )

    def _compare_all_pairs(self) -> str | None:
        ranks = self._ranks.items()
        # A rank with a checkpoint in flight is not blocked yet, but will wait for it at its end.
        waiters = [rank for rank, p in ranks if p.is_blocked or p.pending_offers]
        others = [rank for rank, p in ranks if p.is_blocked or p.is_finished]
        for waiter in waiters:
            for other in others:
                reason = self._explain_deadlock(waiter, other)
                if reason:
                    return f"{reason}\n{self._remedy(waiter, other)}"
        return None

    def _explain_deadlock(self, waiter: int, other: int) -> str | None:
        a, b = self._ranks[waiter], self._ranks[other]
        if waiter == other:
            return None
        # Check this first, because it is the clearest case: a finished rank never calls again.
        if b.is_finished and _depends_on(a, b):
            return f"rank {other} {b.describe()}; rank {waiter} {a.describe_wait()}"
        if a.awaited_collective is not None and b.awaited_collective is not None:
            call_a, call_b = a.awaited_collective, b.awaited_collective
            if (call_a.sequence, call_a.kind) != (call_b.sequence, call_b.kind):
                return f"rank {waiter} {a.describe()}; rank {other} {b.describe()}"
        if a.is_blocked and b.is_blocked and _depends_on(a, b) and _depends_on(b, a):
            return f"rank {waiter} {a.describe()}; rank {other} {b.describe()}"
        return None

    def _remedy(self, waiter: int, other: int) -> str:
        """Return what to change in the training function, for ranks that wait forever."""
        if not self._ranks[other].is_finished:
            return (
                "All ranks must reach both calls, in the same order. Move them out of branches "
                "that depend on the rank."
            )
        call = self._ranks[waiter].awaited_collective
        if call is None:
            return (
                "All ranks must call report() equally often as long as one of them reports "
                "checkpoints. Call report(metrics) without a checkpoint at the same step on the "
                "other ranks."
            )
        if call.number is None:
            return (
                f"All ranks must run the line that rank {waiter} is at, equally often. Move it out "
                "of branches that depend on the rank, and run the same number of steps on each."
            )
        return (
            f"All ranks must call {call.kind}() equally often. Move it out of "
            "branches that depend on the rank, and run the same number of steps on each."
        )


def _depends_on(waiter: RankProgress, other: RankProgress) -> bool:
    """Return whether `waiter` is blocked until `other` makes a call."""
    call = waiter.awaited_collective
    if call is not None:
        return other.collectives <= call.sequence
    # `get_all_reported_checkpoints` does not wait for ranks that have finished.
    if waiter.awaited_checkpoints and not other.is_finished and other.reports < waiter.reports:
        return True
    oldest = waiter.oldest_offer
    return oldest is not None and other.reports <= oldest.index
