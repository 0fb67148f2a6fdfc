"""Where every rank of an attempt stands: pure bookkeeping, no Ray, no files, no clock.

The k-th report of each rank belongs together: a round. A round is complete when every rank has
reported it; if some rank offered files, a checkpoint is made of them. Since the controller knows
for each rank how often it reported, what it waits in and whether it has finished, some waits can be
proved never to end: `divergence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from drawbar.train._messages import CheckpointsAsked, CollectiveCalled, Offer, Reported
from drawbar.train._storage.contents import FileEntry


@dataclass(frozen=True)
class ReportRound:
    """The `index`-th report of every rank, complete. `shares`: which files each rank is to give."""

    index: int
    reports: Mapping[int, Reported]
    assigned_files: Mapping[int, tuple[FileEntry, ...]]

    @property
    def offers(self) -> dict[int, Offer]:
        """The ranks' offers, by rank."""
        return {
            rank: report.offer
            for rank, report in sorted(self.reports.items())
            if report.offer is not None
        }

    def find_conflict(self) -> str | None:
        """Say why the offers do not make one checkpoint, or return None."""
        offers = self.offers
        if len(offers) < 2:
            return None
        lowest = min(offers)
        found: dict[str, tuple[str, int]] = {}  # of each path: whether a file or folder, and whose
        for rank, offer in offers.items():
            if offer.name != offers[lowest].name:
                return (
                    f"{self._format_rank(lowest)} names the checkpoint {offers[lowest].name!r}, "
                    f"{self._format_rank(rank)} names it {offer.name!r}"
                )
            for path, kind in _iter_paths(offer):
                before, whose = found.setdefault(path, (kind, rank))
                if kind != before:
                    return (
                        f"in the checkpoint {path!r} is a {before} of {self._format_rank(whose)} "
                        f"and a {kind} of {self._format_rank(rank)}"
                    )
        return None

    def _format_rank(self, rank: int) -> str:
        return f"rank {rank} (report #{self.index} at {self.reports[rank].where})"


@dataclass(frozen=True)
class RankActivity:
    """The last sign of life of one rank that has not finished.

    `silent` is in seconds. `waits`: where it waits inside Drawbar, "" if it does not; `waiters`:
    who waits for it there. `last`: the line of its last report or collective.
    """

    idle_seconds: float
    waiting_in: str = ""
    waiters: tuple[int, ...] = ()
    last_location: str = ""


@dataclass
class RankProgress:
    """Progress of one rank: its calls, the call that blocks it, and whether it has finished.

    Attributes:
        reports: Number of the next report.
        collectives: Number of collective calls, including those that Drawbar makes.
        users_collectives: Number of collective calls of the user's code.
        last: Line of the last report or collective call of the user's code, "" if there is none.
    """

    reports: int
    collectives: int = 0
    users_collectives: int = 0
    last: str = ""
    awaited_report: Reported | None = None
    awaited_collective: CollectiveCalled | None = None
    awaited_checkpoints: CheckpointsAsked | None = None
    is_finished: bool = False

    def describe(self) -> str:
        """Describe in words where the rank is."""
        if self.awaited_collective is not None:
            call = self.awaited_collective
            which = "internal collective" if call.number is None else f"collective #{call.number}"
            return f"waits in {which} ({_name_of(call)}) at {call.where}"
        if self.awaited_report is not None:
            report = self.awaited_report
            return f"waits for report #{report.index} with a checkpoint at {report.where}"
        if self.awaited_checkpoints is not None:
            where = self.awaited_checkpoints.where
            return (
                f"waits in get_all_reported_checkpoints() for report #{self.reports - 1} at {where}"
            )
        if self.is_finished:
            calls = f"{self.reports} reports and {self.users_collectives} collectives"
            return f"finished after {calls}" + (f", the last at {self.last}" if self.last else "")
        return "runs"


@dataclass
class AttemptProgress:
    """Where every rank stands. Feed it what ranks say, in the order of each rank."""

    world_size: int
    first_index: int
    should_keep_all_rounds: bool = False
    ranks: dict[int, RankProgress] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {rank: RankProgress(self.first_index) for rank in range(self.world_size)}
        self._rounds: dict[int, dict[int, Reported]] = {}
        self._calls: dict[int, CollectiveCalled] = {}

    def on_report(self, rank: int, report: Reported) -> list[ReportRound]:
        """Take a report. Returns the rounds that it completes.

        A round nobody offered files in is returned only with `should_keep_all_rounds`: otherwise
        its
        reports are not kept, so that one rank may report for ever while others never do.
        """
        # By its number rather than by counting: reports are numbered over the whole run.
        self.ranks[rank].reports = report.index + 1
        self.ranks[rank].last = report.where
        if report.waits:
            self.ranks[rank].awaited_report = report
        if report.offer is not None or self.should_keep_all_rounds:
            self._rounds.setdefault(report.index, {})[rank] = report
        # The common case, a report of metrics alone, does not look at the other ranks.
        if not self._rounds:
            return []
        complete = min(each.reports for each in self.ranks.values())
        return [self._pop_round(index) for index in sorted(self._rounds) if index < complete]

    def _pop_round(self, index: int) -> ReportRound:
        reports = self._rounds.pop(index)
        return ReportRound(index, reports, _assign_files(reports))

    def on_waiting_for_checkpoint(self, rank: int, index: int) -> None:
        """Take note that a rank waits for a checkpoint that it reported earlier."""
        report = self._rounds.get(index, {}).get(rank)
        if report is not None:
            self.ranks[rank].awaited_report = report

    def on_checkpoints_requested(self, rank: int, question: CheckpointsAsked) -> None:
        """Take note that a rank waits until all have reported as often as it has."""
        waits = question.until is not None and not question.timed
        self.ranks[rank].awaited_checkpoints = question if waits else None

    def on_checkpoints_reply(self, rank: int) -> None:
        """Take note that it does so no more."""
        self.ranks[rank].awaited_checkpoints = None

    def has_missing_reports(self, before: int) -> bool:
        """Whether a rank that goes on has still to make a report before this one."""
        return any(not each.is_finished and each.reports < before for each in self.ranks.values())

    def on_committed(self, index: int) -> None:
        """Take note that checkpoint `index` is committed, so nobody waits for it any more."""
        for each in self.ranks.values():
            if each.awaited_report is not None and each.awaited_report.index == index:
                each.awaited_report = None

    def on_collective(
        self, rank: int, call: CollectiveCalled
    ) -> dict[int, CollectiveCalled] | None:
        """Record a collective call. Return every rank's call when this one completes it."""
        self.ranks[rank].collectives = call.sequence + 1
        self.ranks[rank].awaited_collective = call
        if call.number is not None:
            self.ranks[rank].users_collectives = call.number + 1
            self.ranks[rank].last = call.where
        self._calls[rank] = call
        same = [(c.sequence, c.kind) == (call.sequence, call.kind) for c in self._calls.values()]
        # Calls that differ stay here: they are the proof of a divergence.
        if len(same) < self.world_size or not all(same):
            return None
        # All at once, before anybody is told: else the first to go on would prove a divergence from
        # those that have not heard yet.
        for each in self.ranks.values():
            each.awaited_collective = None
        calls, self._calls = self._calls, {}
        return calls

    def on_finished(self, rank: int) -> bool:
        """Take note that a rank's function returned. Returns whether all have."""
        self.ranks[rank].is_finished = True
        return all(each.is_finished for each in self.ranks.values())

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
        """Give the ranks that stand still until this one does something."""
        return tuple(
            waiter
            for waiter in self.ranks
            if waiter != rank and self._is_blocked(waiter) and self._depends_on(waiter, rank)
        )

    def get_activity(self, rank: int, silent: float, last: str) -> RankActivity:
        """Give the last sign of life of a rank that has not finished."""
        waits = self.ranks[rank].describe() if self._is_blocked(rank) else ""
        return RankActivity(silent, waits, self.find_waiters(rank), last)

    def _list_waiting_ranks(self) -> list[int]:
        # A rank whose checkpoint is in flight goes on, but what it waits for at its end is known.
        offering = {rank for reports in self._rounds.values() for rank in reports}
        return [rank for rank in self.ranks if self._is_blocked(rank) or rank in offering]

    def _explain_deadlock(self, waiter: int, other: int) -> str | None:
        a, b = self.ranks[waiter], self.ranks[other]
        if waiter == other:
            return None
        # The surest proof: who has returned will not come any more.
        if self._depends_on(waiter, other) and b.is_finished:
            return f"rank {other} {b.describe()}; rank {waiter} {self._describe_wait(waiter)}"
        if a.awaited_collective is not None and b.awaited_collective is not None:
            mine, theirs = a.awaited_collective, b.awaited_collective
            if (mine.sequence, mine.kind) != (theirs.sequence, theirs.kind):
                return f"rank {waiter} {a.describe()}; rank {other} {b.describe()}"
        both_stand = self._is_blocked(waiter) and self._is_blocked(other)
        if both_stand and self._depends_on(waiter, other) and self._depends_on(other, waiter):
            return f"rank {waiter} {a.describe()}; rank {other} {b.describe()}"
        return None

    def _is_blocked(self, rank: int) -> bool:
        each = self.ranks[rank]
        waits = (each.awaited_report, each.awaited_collective, each.awaited_checkpoints)
        return any(wait is not None for wait in waits)

    def _depends_on(self, waiter: int, other: int) -> bool:
        """Whether what `waiter` waits for needs something that `other` has not done yet."""
        call = self.ranks[waiter].awaited_collective
        if call is not None:
            return self.ranks[other].collectives <= call.sequence
        there, reports = self.ranks[other], self.ranks[waiter].reports
        if (
            self.ranks[waiter].awaited_checkpoints
            and not there.is_finished
            and there.reports < reports
        ):
            return True
        oldest = self._find_oldest_offer(waiter)
        return oldest is not None and self.ranks[other].reports <= oldest.index

    def _find_oldest_offer(self, rank: int) -> Reported | None:
        for index in sorted(self._rounds):
            report = self._rounds[index].get(rank)
            if report is not None and report.offer is not None:
                return report
        return None

    def _describe_wait(self, rank: int) -> str:
        if self._is_blocked(rank):
            return self.ranks[rank].describe()
        offer = self._find_oldest_offer(rank)
        assert offer is not None  # only called for a rank that needs something
        return f"has a checkpoint pending in report #{offer.index} from {offer.where}"


def _name_of(call: CollectiveCalled) -> str:
    """Return the name of the function that made a collective call."""
    is_public = call.kind in ("barrier", "broadcast_from_rank_zero", "all_gather")
    return call.kind if is_public else "should_checkpoint"


def _iter_paths(offer: Offer) -> Iterator[tuple[str, str]]:
    """Give every file of an offer and every folder that they lie in."""
    for file in offer.files:
        yield file.path, "file"
        for folder in PurePosixPath(file.path).parents[:-1]:
            yield str(folder), "folder"


def _assign_files(reports: Mapping[int, Reported]) -> dict[int, tuple[FileEntry, ...]]:
    """Give each file to the lowest rank that offers it."""
    taken: set[str] = set()
    shares: dict[int, tuple[FileEntry, ...]] = {}
    for rank in sorted(reports):
        offer = reports[rank].offer
        if offer is not None:
            shares[rank] = tuple(file for file in offer.files if file.path not in taken)
            taken.update(file.path for file in offer.files)
    return shares
