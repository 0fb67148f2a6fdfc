"""Oracle for `AttemptProgress`: simple code that compares each rank with all others.

It does not share the decisions and texts of the product, because the tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drawbar.train._controller.progress import ReportRound
from drawbar.train._protocol.messages import CheckpointListRequest, CollectiveCalled, Report
from drawbar.train._storage.contents import FileEntry


@dataclass
class RankState:
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
    """

    reports: int
    collectives: int = 0
    users_collectives: int = 0
    last: str = ""
    awaited_report: Report | None = None
    awaited_collective: CollectiveCalled | None = None
    awaited_checkpoints: CheckpointListRequest | None = None
    is_finished: bool = False

    def describe(self) -> str:
        """Describe the call that the rank is in."""
        if self.awaited_collective is not None:
            call = self.awaited_collective
            which = "internal collective" if call.number is None else f"collective #{call.number}"
            return f"waits in {which} ({_name_of(call)}) at {call.location}"
        if self.awaited_report is not None:
            report = self.awaited_report
            return f"waits for report #{report.index} with a checkpoint at {report.location}"
        if self.awaited_checkpoints is not None:
            where = self.awaited_checkpoints.location
            return (
                f"waits in get_all_reported_checkpoints() for report #{self.reports - 1} at {where}"
            )
        if self.is_finished:
            reports = f"{self.reports} report{'s'[: self.reports != 1]}"
            calls = f"{reports} and {self.users_collectives} collective"
            calls += "s"[: self.users_collectives != 1]
            return f"finished after {calls}" + (f", the last at {self.last}" if self.last else "")
        return "runs"


@dataclass
class ProgressOracle:
    """Progress of all ranks. Each rank's messages must be passed in order.

    Args:
        world_size: Number of ranks.
        first_index: Index of the first report.
        should_keep_all_rounds: Whether `on_report` also returns rounds without files.

    Attributes:
        ranks: Progress by rank.
    """

    world_size: int
    first_index: int
    should_keep_all_rounds: bool = False
    ranks: dict[int, RankState] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {rank: RankState(self.first_index) for rank in range(self.world_size)}
        self._rounds: dict[int, dict[int, Report]] = {}
        self._calls: dict[int, CollectiveCalled] = {}

    def on_report(self, rank: int, report: Report) -> list[ReportRound]:
        """Record a report. Return the rounds that it completes.

        Rounds without files are returned only with `should_keep_all_rounds`. Otherwise their
        reports are not kept, so that memory is bounded if only one rank reports.
        """
        # Use the index instead of counting: reports are numbered across all attempts of a run.
        self.ranks[rank].reports = report.index + 1
        self.ranks[rank].last = report.location
        if report.is_blocking:
            self.ranks[rank].awaited_report = report
        if report.offer is not None or self.should_keep_all_rounds:
            self._rounds.setdefault(report.index, {})[rank] = report
        # Fast path for a report without files.
        if not self._rounds:
            return []
        num_complete = min(progress.reports for progress in self.ranks.values())
        return [self._pop_round(index) for index in sorted(self._rounds) if index < num_complete]

    def _pop_round(self, index: int) -> ReportRound:
        reports = self._rounds.pop(index)
        return ReportRound(index, reports, _assign_files(reports))

    def on_waiting_for_checkpoint(self, rank: int, index: int) -> None:
        """Record that a rank waits for a checkpoint that it reported earlier."""
        report = self._rounds.get(index, {}).get(rank)
        if report is not None:
            self.ranks[rank].awaited_report = report

    def on_checkpoints_requested(self, rank: int, request: CheckpointListRequest) -> None:
        """Record that a rank waits until all ranks have reported as often as it has."""
        is_blocking = request.consistency_mode is not None and not request.has_timeout
        self.ranks[rank].awaited_checkpoints = request if is_blocking else None

    def on_checkpoints_reply(self, rank: int) -> None:
        """Record that a rank has received the list of checkpoints."""
        self.ranks[rank].awaited_checkpoints = None

    def has_missing_reports(self, before: int) -> bool:
        """Return whether a running rank has yet to make a report before this index."""
        return any(
            not progress.is_finished and progress.reports < before
            for progress in self.ranks.values()
        )

    def on_committed(self, index: int) -> None:
        """Record the commit of checkpoint `index`, which unblocks the ranks that wait for it."""
        for progress in self.ranks.values():
            if progress.awaited_report is not None and progress.awaited_report.index == index:
                progress.awaited_report = None

    def on_collective(
        self, rank: int, call: CollectiveCalled
    ) -> dict[int, CollectiveCalled] | None:
        """Record a collective call. Return every rank's call when this one completes it."""
        self.ranks[rank].collectives = call.sequence + 1
        self.ranks[rank].awaited_collective = call
        if call.number is not None:
            self.ranks[rank].users_collectives = call.number + 1
            self.ranks[rank].last = call.location
        self._calls[rank] = call
        same = [(c.sequence, c.kind) == (call.sequence, call.kind) for c in self._calls.values()]
        # Keep calls that differ, since they prove a divergence.
        if len(same) < self.world_size or not all(same):
            return None
        # Unblock all ranks before any result is sent. Otherwise the next call of the first rank
        # would look like a divergence from ranks that have not received the result.
        for progress in self.ranks.values():
            progress.awaited_collective = None
        calls, self._calls = self._calls, {}
        return calls

    def on_finished(self, rank: int) -> bool:
        """Record that a rank's function has returned. Return whether all have."""
        self.ranks[rank].is_finished = True
        return all(progress.is_finished for progress in self.ranks.values())

    def find_divergence(self) -> str | None:
        """Return why some rank waits forever, and the remedy on a second line; None if none does.

        The proof is one pair of ranks: one waits for a call of all ranks, and the other one has
        finished without that call, or is blocked in a different call that needs the first rank.
        """
        for waiter in self._list_waiting_ranks():
            for other in self.ranks:
                reason = self._explain_deadlock(waiter, other)
                if reason:
                    return f"{reason}\n{self._remedy(waiter, other)}"
        return None

    def _remedy(self, waiter: int, other: int) -> str:
        """Return what to change in the training function, for ranks that wait forever."""
        if not self.ranks[other].is_finished:
            return (
                "All ranks must reach both calls, in the same order. Move them out of branches "
                "that depend on the rank."
            )
        call = self.ranks[waiter].awaited_collective
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
            f"All ranks must call {_name_of(call)}() equally often. Move it out of branches that "
            "depend on the rank, and run the same number of steps on each."
        )

    def find_waiters(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are blocked until this rank acts."""
        return tuple(
            waiter
            for waiter in self.ranks
            if waiter != rank and self.is_blocked(waiter) and self._depends_on(waiter, rank)
        )

    def _list_waiting_ranks(self) -> list[int]:
        # A rank with a checkpoint in flight is not blocked yet, but will wait for it at its end.
        offering = {rank for reports in self._rounds.values() for rank in reports}
        return [rank for rank in self.ranks if self.is_blocked(rank) or rank in offering]

    def _explain_deadlock(self, waiter: int, other: int) -> str | None:
        a, b = self.ranks[waiter], self.ranks[other]
        if waiter == other:
            return None
        # Check this first, because it is the clearest case: a finished rank never calls again.
        if self._depends_on(waiter, other) and b.is_finished:
            return f"rank {other} {b.describe()}; rank {waiter} {self._describe_wait(waiter)}"
        if a.awaited_collective is not None and b.awaited_collective is not None:
            call_a, call_b = a.awaited_collective, b.awaited_collective
            if (call_a.sequence, call_a.kind) != (call_b.sequence, call_b.kind):
                return f"rank {waiter} {a.describe()}; rank {other} {b.describe()}"
        are_blocked = self.is_blocked(waiter) and self.is_blocked(other)
        if are_blocked and self._depends_on(waiter, other) and self._depends_on(other, waiter):
            return f"rank {waiter} {a.describe()}; rank {other} {b.describe()}"
        return None

    def is_blocked(self, rank: int) -> bool:
        progress = self.ranks[rank]
        waits = (progress.awaited_report, progress.awaited_collective, progress.awaited_checkpoints)
        return any(wait is not None for wait in waits)

    def _depends_on(self, waiter: int, other: int) -> bool:
        """Return whether `waiter` is blocked until `other` makes a call."""
        call = self.ranks[waiter].awaited_collective
        if call is not None:
            return self.ranks[other].collectives <= call.sequence
        other_progress, reports = self.ranks[other], self.ranks[waiter].reports
        if (
            self.ranks[waiter].awaited_checkpoints
            and not other_progress.is_finished
            and other_progress.reports < reports
        ):
            return True
        oldest = self._find_oldest_offer(waiter)
        return oldest is not None and self.ranks[other].reports <= oldest.index

    def _find_oldest_offer(self, rank: int) -> Report | None:
        for index in sorted(self._rounds):
            report = self._rounds[index].get(rank)
            if report is not None and report.offer is not None:
                return report
        return None

    def _describe_wait(self, rank: int) -> str:
        if self.is_blocked(rank):
            return self.ranks[rank].describe()
        offer = self._find_oldest_offer(rank)
        assert offer is not None  # only called for a rank that depends on another one
        return f"has a checkpoint pending in report #{offer.index} from {offer.location}"


def _name_of(call: CollectiveCalled) -> str:
    """Return the name of the function that made a collective call."""
    is_public = call.kind in ("barrier", "broadcast_from_rank_zero", "all_gather")
    return call.kind if is_public else "should_checkpoint"


def _assign_files(reports: Mapping[int, Report]) -> dict[int, tuple[FileEntry, ...]]:
    """Assign each file to the lowest rank that offers it."""
    assigned_paths: set[str] = set()
    assigned_files: dict[int, tuple[FileEntry, ...]] = {}
    for rank in sorted(reports):
        offer = reports[rank].offer
        if offer is not None:
            assigned_files[rank] = tuple(
                file for file in offer.files if file.path not in assigned_paths
            )
            assigned_paths.update(file.path for file in offer.files)
    return assigned_files
