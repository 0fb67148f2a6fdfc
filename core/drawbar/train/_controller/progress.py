"""Track the progress of each rank in an attempt. Pure state: no Ray, no I/O, no clock.

The k-th reports of all ranks form a round. A round is complete when every rank has reported it; if
any rank offered files, they become a checkpoint. The number of reports, the blocking call, and the
end of each rank are known here, which is sufficient to prove that some waits can never end
(`find_divergence`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from drawbar._base.indexed_heap import IndexedHeap
from drawbar._process.stalled_ranks import RankActivity
from drawbar._storage.contents import FileEntry
from drawbar.train._controller.rank_progress import (
    CollectiveCalls,
    DivergenceDetector,
    RankProgress,
)
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CheckpointOffer,
    CollectiveCalled,
    Report,
)


class AttemptProgress:
    """Progress of all ranks. Each rank's messages must be passed in order.

    The report indexes of a rank increase. A message takes amortized O(log n) for n ranks: a rank is
    compared with all others only after they have diverged.

    Args:
        world_size: Number of ranks.
        first_index: Index of the first report.
        should_keep_all_rounds: Whether `on_report` also returns rounds without files.

    Attributes:
        first_index: Index of the first report.
        ranks: Progress by rank.
    """

    def __init__(
        self, world_size: int, first_index: int, *, should_keep_all_rounds: bool = False
    ) -> None:
        self.first_index = first_index
        self.ranks = {rank: RankProgress(first_index) for rank in range(world_size)}
        self._rounds = ReportRounds(world_size, first_index, should_keep_all=should_keep_all_rounds)
        self._collectives = CollectiveCalls(world_size)
        self._divergence = DivergenceDetector(self.ranks, self._collectives)
        # Index of the next report of each running rank.
        self._running_reports = IndexedHeap[int]()
        for rank in self.ranks:
            self._running_reports.set(rank, first_index)
        self._waiting_ranks: dict[int, set[int]] = {}  # by the report whose commit they wait for

    def on_report(self, rank: int, report: Report) -> list[ReportRound]:
        """Record a report. Return the rounds that it completes.

        Without `should_keep_all_rounds`, reports without files are not stored, and rounds without
        files are not returned. This limits the memory that is used if only one rank reports.
        """
        progress = self.ranks[rank]
        # Use the index instead of counting: reports are numbered across all attempts of a run.
        progress.reports = report.index + 1
        progress.last = report.location
        if not progress.is_finished:
            self._running_reports.set(rank, progress.reports)
        if report.offer is not None:
            progress.pending_offers[report.index] = report
        if report.is_blocking:
            self._set_awaited_report(rank, report)
        completed = self._rounds.add(rank, report)
        self._divergence.update(rank)
        for report_round in completed:
            for offering_rank in report_round.offers:
                del self.ranks[offering_rank].pending_offers[report_round.index]
                self._divergence.update(offering_rank)
        return completed

    def on_waiting_for_checkpoint(self, rank: int, index: int) -> None:
        """Record that a rank waits for a checkpoint that it reported earlier."""
        report = self._rounds.get_report(index, rank)
        if report is not None:
            self._set_awaited_report(rank, report)
            self._divergence.update(rank)

    def _set_awaited_report(self, rank: int, report: Report) -> None:
        self.ranks[rank].awaited_report = report
        self._waiting_ranks.setdefault(report.index, set()).add(rank)

    def on_checkpoints_requested(self, rank: int, request: CheckpointListRequest) -> None:
        """Record that a rank waits until all ranks have reported as often as it has."""
        is_blocking = request.consistency_mode is not None and not request.has_timeout
        self.ranks[rank].awaited_checkpoints = request if is_blocking else None
        self._divergence.update(rank)

    def on_checkpoints_reply(self, rank: int) -> None:
        """Record that a rank has received the list of checkpoints."""
        self.ranks[rank].awaited_checkpoints = None
        self._divergence.update(rank)

    @property
    def next_running_report(self) -> float:
        """Index of the first report that a running rank has not made; infinity if no rank runs."""
        return self._running_reports.smallest

    def on_committed(self, index: int) -> None:
        """Record the commit of checkpoint `index`, which unblocks the ranks that wait for it."""
        for rank in self._waiting_ranks.pop(index, set()):
            progress = self.ranks[rank]
            if progress.awaited_report is not None and progress.awaited_report.index == index:
                progress.awaited_report = None
                self._divergence.update(rank)

    def on_collective(
        self, rank: int, call: CollectiveCalled
    ) -> dict[int, CollectiveCalled] | None:
        """Record a collective call. Return every rank's call when this one completes it."""
        progress = self.ranks[rank]
        progress.collectives = call.sequence + 1
        progress.awaited_collective = call
        if call.number is not None:
            progress.users_collectives = call.number + 1
            progress.last = call.location
        calls = self._collectives.add(rank, call)
        if calls is None:
            self._divergence.update(rank)
            return None
        # Unblock all ranks before any result is sent. Otherwise the next call of the first rank
        # would look like a divergence from ranks that have not received the result.
        for caller in calls:
            self.ranks[caller].awaited_collective = None
        self._divergence.on_collective_completed()
        return calls

    def has_left_collective(self, rank: int, sequence: int) -> bool:
        """Return whether a rank has called this collective and received its result."""
        progress = self.ranks[rank]
        return sequence < progress.collectives - (progress.awaited_collective is not None)

    def on_finished(self, rank: int) -> bool:
        """Record that a rank's function has returned. Return whether all have."""
        self.ranks[rank].is_finished = True
        self._running_reports.discard(rank)
        self._divergence.update(rank)
        return not self._running_reports

    def find_divergence(self) -> str | None:
        """Return why a rank waits forever, and the remedy on a second line; None if none does."""
        return self._divergence.find()

    def get_activity(
        self, idle_seconds: Mapping[int, float], last_locations: Mapping[int, str]
    ) -> dict[int, RankActivity]:
        """Return the last activity of each rank that has not finished.

        Args:
            idle_seconds: Time since the last message of each rank.
            last_locations: Line of the last report or collective, for the ranks that made one.
        """
        running = {rank: p for rank, p in self.ranks.items() if not p.is_finished}
        waiters = find_waiters(running)
        first = max(self.ranks, key=lambda rank: self.ranks[rank].reports)
        return {
            rank: RankActivity(
                idle_seconds[rank],
                progress.describe() if progress.is_blocked else "",
                waiters[rank],
                last_locations.get(rank, ""),
                self._describe_lag(progress, first),
            )
            for rank, progress in running.items()
        }

    def _describe_lag(self, progress: RankProgress, first: int) -> str:
        lacking = self.ranks[first].reports - progress.reports
        # A rank without a report may never report: often only rank 0 does.
        has_lag = lacking > 1 and progress.reports > self.first_index
        return f"{lacking} reports behind rank {first}" if has_lag else ""


def find_waiters(running: Mapping[int, RankProgress]) -> dict[int, tuple[int, ...]]:
    """Return, for each running rank, the running ranks that are blocked until it acts."""
    # Group the blocked ranks by the call that they wait for. Most of them wait for the same call,
    # so most running ranks have the same waiters and can share one tuple.
    needs: dict[tuple[int, int], list[int]] = {}  # by number of collectives and of reports
    for rank, progress in running.items():
        if progress.awaited_collective is not None:
            needs.setdefault((progress.awaited_collective.sequence + 1, 0), []).append(rank)
        elif progress.is_blocked:
            needs.setdefault((0, progress.needed_report + 1), []).append(rank)
    waiters: dict[int, tuple[int, ...]] = {}
    shared: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
    for rank, progress in running.items():
        lacking = tuple(
            need for need in needs if progress.collectives < need[0] or progress.reports < need[1]
        )
        if lacking not in shared:
            shared[lacking] = tuple(sorted(waiter for need in lacking for waiter in needs[need]))
        waiters[rank] = shared[lacking]
    return waiters


@dataclass(frozen=True)
class ReportRound:
    """Complete round of reports.

    Attributes:
        index: Report index.
        reports: Reports by rank.
        assigned_files: Files that each rank must upload, for the ranks with an offer.
    """

    index: int
    reports: Mapping[int, Report]
    assigned_files: Mapping[int, tuple[FileEntry, ...]]

    @property
    def offers(self) -> dict[int, CheckpointOffer]:
        """Checkpoint offers by rank."""
        return {
            rank: report.offer
            for rank, report in sorted(self.reports.items())
            if report.offer is not None
        }

    def find_conflict(self) -> str | None:
        """Return why the offers cannot form one checkpoint; None if they can."""
        offers = self.offers
        if len(offers) < 2:
            return None
        lowest = min(offers)
        first_kinds: dict[str, tuple[str, int]] = {}  # by path: kind of entry, and its rank
        for rank, offer in offers.items():
            if offer.checkpoint_name != offers[lowest].checkpoint_name:
                return (
                    f"{self._format_rank(lowest)} names the checkpoint "
                    f"{offers[lowest].checkpoint_name!r}, "
                    f"{self._format_rank(rank)} names it {offer.checkpoint_name!r}"
                )
            for path, kind in _iter_paths(offer):
                first_kind, first_rank = first_kinds.setdefault(path, (kind, rank))
                if kind != first_kind:
                    return (
                        f"the checkpoint has {path!r} as a {first_kind} from "
                        f"{self._format_rank(first_rank)} and as a {kind} from "
                        f"{self._format_rank(rank)}"
                    )
        return None

    def _format_rank(self, rank: int) -> str:
        return f"rank {rank} (report #{self.index} at {self.reports[rank].location})"


class ReportRounds:
    """Reports of the rounds that are not complete. A round is complete when all ranks reported it.

    Args:
        world_size: Number of ranks.
        first_index: Index of the first report.
        should_keep_all: Whether rounds without files are kept and returned, too.
    """

    def __init__(self, world_size: int, first_index: int, *, should_keep_all: bool) -> None:
        self._should_keep_all = should_keep_all
        self._next_reports = IndexedHeap[int]()  # by rank
        for rank in range(world_size):
            self._next_reports.set(rank, first_index)
        self._reports: dict[int, dict[int, Report]] = {}  # by index and rank
        self._indexes: list[int] = []  # heap of the keys of `_reports`

    def add(self, rank: int, report: Report) -> list[ReportRound]:
        """Add a report. Return the rounds that it completes, in order."""
        self._next_reports.set(rank, report.index + 1)
        if report.offer is not None or self._should_keep_all:
            if report.index not in self._reports:
                self._reports[report.index] = {}
                heapq.heappush(self._indexes, report.index)
            self._reports[report.index][rank] = report
        complete: list[ReportRound] = []
        while self._indexes and self._indexes[0] < self._next_reports.smallest:
            index = heapq.heappop(self._indexes)
            reports = self._reports.pop(index)
            complete.append(ReportRound(index, reports, _assign_files(reports)))
        return complete

    def get_report(self, index: int, rank: int) -> Report | None:
        """Return a rank's report; None if it is not kept, or its round is complete."""
        return self._reports.get(index, {}).get(rank)


def _iter_paths(offer: CheckpointOffer) -> Iterator[tuple[str, str]]:
    """Iterate over the files of an offer and the directories that contain them."""
    for file in offer.files:
        yield file.path, "file"
        for directory in PurePosixPath(file.path).parents[:-1]:
            yield str(directory), "directory"


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
