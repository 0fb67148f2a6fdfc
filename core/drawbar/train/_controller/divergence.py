"""Prove that ranks wait for calls that other ranks will never make."""

from __future__ import annotations

from collections.abc import Mapping

from drawbar.train._controller.indexed_heap import IndexedHeap
from drawbar.train._controller.rank_progress import (
    CollectiveCalls,
    RankProgress,
    get_collective_name,
)


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
            f"All ranks must call {get_collective_name(call)}() equally often. Move it out of "
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
