"""Rounds of reports. The k-th reports of all ranks form a round."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from drawbar.train._controller.indexed_heap import IndexedHeap
from drawbar.train._protocol.messages import CheckpointOffer, Report
from drawbar.train._storage.contents import FileEntry


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
