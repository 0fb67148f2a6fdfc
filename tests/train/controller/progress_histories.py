"""Random histories of messages, on which `AttemptProgress` must agree with an oracle.

The oracle is simple code that compares each rank with all others. It does not share the decisions
and texts of the product, because the tests compare them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, get_args

from drawbar._storage.contents import FileEntry
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode
from drawbar.train._controller.progress import AttemptProgress, ReportRound
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CheckpointOffer,
    CollectiveCalled,
    CollectiveKind,
    Report,
)

Step = Literal["metrics", "async", "save", "list", "timed list", "wait"] | CollectiveKind

USER_COLLECTIVES = ("barrier", "broadcast_from_rank_zero", "all_gather")
STEPS: tuple[Step, ...] = (
    *("metrics", "async", "async", "save", "save", "list", "timed list", "wait"),
    *get_args(CollectiveKind),
)
MAX_EVENTS = 80


# -- oracle


@dataclass
class RankState:
    """Progress of one rank: its calls, the call that blocks it, and whether it has finished."""

    reports: int  # number of the next report
    collectives: int = 0  # number of calls, including those that Drawbar makes
    users_collectives: int = 0  # number of calls of the user's code
    last: str = ""  # line of the last report or collective call of the user's code
    awaited_report: Report | None = None  # report whose checkpoint the rank waits for
    awaited_collective: CollectiveCalled | None = None
    awaited_checkpoints: CheckpointListRequest | None = None
    is_finished: bool = False

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
    """Progress of all ranks. Each rank's messages must be passed in order."""

    world_size: int
    first_index: int  # index of the first report
    should_keep_all_rounds: bool = False  # whether `on_report` also returns rounds without files
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
            f"All ranks must call {call.kind}() equally often. Move it out of branches that "
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


def _assign_files(reports: Mapping[int, Report]) -> dict[int, tuple[FileEntry, ...]]:
    """Assign each file to the lowest rank that offers it."""
    assigned: set[str] = set()
    files: dict[int, tuple[FileEntry, ...]] = {}
    for rank in sorted(reports):
        offer = reports[rank].offer
        if offer is not None:
            files[rank] = tuple(file for file in offer.files if file.path not in assigned)
            assigned.update(file.path for file in offer.files)
    return files


# -- histories


class ComparedProgress:
    """Progress and its oracle, which receive the same messages and must give the same results.

    Args:
        world_size: Number of ranks.
        first_index: Index of the first report.
        should_keep_all: Whether rounds without files are kept.
        has_errors: Whether ranks also send messages that they should not send.

    Attributes:
        oracle: Progress as the oracle computes it.
        counts: Number of messages and results, by kind.
        is_diverged: Whether the last verdict was a divergence.
    """

    def __init__(
        self, world_size: int, first_index: int, *, should_keep_all: bool, has_errors: bool
    ) -> None:
        self._has_errors = has_errors
        self._progress = AttemptProgress(
            world_size, first_index, should_keep_all_rounds=should_keep_all
        )
        self.oracle = ProgressOracle(world_size, first_index, should_keep_all)
        self.counts: Counter[str] = Counter()
        self.is_diverged = False

    def call(self, method: str, *args: object) -> Any:
        """Call a method on both, compare the results and all verdicts, and return the result."""
        result = getattr(self._progress, method)(*args)
        expected = getattr(self.oracle, method)(*args)
        assert result == expected
        self.counts[method] += 1
        self._compare_verdicts()
        return result

    def _compare_verdicts(self) -> None:
        divergence = self._progress.find_divergence()
        assert divergence == self.oracle.find_divergence()
        self.is_diverged = divergence is not None
        # Otherwise ranks would be compared at each message although they have not diverged.
        assert self._has_errors or self._progress._divergence.is_suspected == self.is_diverged
        if divergence is not None:
            self.counts[_classify(divergence)] += 1
        for reports in {rank.reports for rank in self.oracle.ranks.values()}:
            has_missing = self._progress.next_running_report < reports
            assert has_missing == self.oracle.has_missing_reports(reports)

    def compare_ranks(self) -> None:
        """Compare the state of each rank, and which ranks wait for it."""
        ranks = self.oracle.ranks
        running = {rank for rank, progress in ranks.items() if not progress.is_finished}
        activity = self._progress.get_activity(dict.fromkeys(ranks, 0.0), {})
        assert activity.keys() == running
        for rank, progress in ranks.items():
            assert self._progress.ranks[rank].describe() == progress.describe()
            if rank in running:
                waiters = [w for w in self.oracle.find_waiters(rank) if w in running]
                assert list(activity[rank].waiters) == waiters
                assert bool(activity[rank].waiting_in) == self.oracle.is_blocked(rank)


class History:
    """One random history.

    All ranks run a random script, in a random order of their messages. In most histories, some
    ranks leave out, add, or change steps. In some, ranks also send messages while they are blocked
    or after they have finished, and skip report or sequence numbers.

    Args:
        seed: Seed of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        world_size = min(random.randint(2, 12), random.randint(2, 12))  # small ones are faster
        first_index = random.choice((0, 0, 7))
        self._error_rate = random.choice((0, 0, 0.02, 0.1))
        self._stops_at_divergence = random.random() < 0.5
        self.progress = ComparedProgress(
            world_size,
            first_index,
            should_keep_all=random.random() < 0.2,
            has_errors=self._error_rate > 0,
        )
        script = [self._choose_step() for _ in range(random.randint(1, 6))]
        mutation_rate = random.choice((0, 0, 0.03, 0.2))
        self._steps = {rank: self._mutate(script, mutation_rate) for rank in range(world_size)}
        self._next_numbers = dict.fromkeys(range(world_size), 0)  # of collectives in user code
        self._offered: dict[int, list[int]] = {rank: [] for rank in range(world_size)}
        self._uncommitted: list[int] = []

    def _choose_step(self) -> Step:
        return self._random.choice(STEPS)

    def _mutate(self, script: list[Step], rate: float) -> list[Step]:
        steps: list[Step] = []
        for step in script:
            if self._random.random() >= rate:
                steps.append(step)
            elif self._random.random() < 0.7:
                steps += [self._choose_step() for _ in range(self._random.randint(1, 2))]
        return steps

    def run(self) -> Counter[str]:
        """Run the history. Return the number of messages and results, by kind."""
        for _ in range(MAX_EVENTS):
            if not self._run_event():
                break
            if self.progress.is_diverged and self._stops_at_divergence:
                break
        self.progress.compare_ranks()
        return self.progress.counts

    def _run_event(self) -> bool:
        """Run a random event. Return False if there is none."""
        random, oracle = self._random, self.progress.oracle
        replies = [rank for rank, r in oracle.ranks.items() if r.awaited_checkpoints is not None]
        replies = [rank for rank in replies if self._is_list_ready(rank)]
        if replies and random.random() < 0.5:
            self.progress.call("on_checkpoints_reply", random.choice(replies))
        elif self._uncommitted and random.random() < 0.2:
            index = self._uncommitted.pop(random.randrange(len(self._uncommitted)))
            self.progress.call("on_committed", index)
        elif random.random() < self._error_rate:
            self._run_step(random.choice(list(self._steps)))
        else:
            runnable = [
                rank
                for rank, r in oracle.ranks.items()
                if not r.is_finished and not oracle.is_blocked(rank)
            ]
            if not runnable:
                return bool(replies or self._uncommitted)
            self._run_step(random.choice(runnable))
        return True

    def _is_list_ready(self, rank: int) -> bool:
        oracle = self.progress.oracle
        is_ready = not oracle.has_missing_reports(oracle.ranks[rank].reports)
        return is_ready or self._random.random() < self._error_rate  # after an interrupt

    def _run_step(self, rank: int) -> None:
        steps = self._steps[rank]
        if not steps:
            self.progress.call("on_finished", rank)
            steps.append(self._choose_step())  # in case that a message follows
            return
        step = steps.pop(0)
        match step:
            case "metrics" | "async" | "save":
                self._report(rank, step)
            case "list" | "timed list":
                self._request_list(rank, is_timed=step == "timed list")
            case "wait":
                if self._offered[rank]:
                    index = self._random.choice(self._offered[rank])
                    self.progress.call("on_waiting_for_checkpoint", rank, index)
            case _:
                self._call_collective(rank, step)

    def _skip(self) -> int:
        return int(self._random.random() < self._error_rate)

    def _report(self, rank: int, step: str) -> None:
        index = self.progress.oracle.ranks[rank].reports + self._skip()
        offer = None
        if step != "metrics":
            self._offered[rank].append(index)
            names = self._random.sample(("a", "b", "c", f"rank_{rank}"), self._random.randint(0, 3))
            files = tuple(FileEntry(name, 1) for name in names)
            offer = CheckpointOffer(directory=f"/{rank}", files=files, checkpoint_name="checkpoint")
        where = f"train.py:{10 + len(self._steps[rank])} in f"
        waits = step == "save"
        report = Report(
            index=index, metrics={}, time=0, location=where, offer=offer, is_blocking=waits
        )
        for complete in self.progress.call("on_report", rank, report):
            self.progress.counts["rounds"] += 1
            if complete.offers:
                self._uncommitted.append(complete.index)

    def _request_list(self, rank: int, *, is_timed: bool) -> None:
        is_cancelled = self._random.random() < self._error_rate
        until = None if is_cancelled else CheckpointConsistencyMode.COMMITTED
        where = f"train.py:{30 + len(self._steps[rank])} in f"
        request = CheckpointListRequest(
            request_id=0, consistency_mode=until, has_timeout=is_timed, location=where
        )
        self.progress.call("on_checkpoints_requested", rank, request)

    def _call_collective(self, rank: int, kind: CollectiveKind) -> None:
        number = None
        # Integrations call all kinds, too.
        if kind in USER_COLLECTIVES and self._random.random() < 0.8:
            number = self._next_numbers[rank]
            self._next_numbers[rank] += 1
        call = CollectiveCalled(
            sequence=self.progress.oracle.ranks[rank].collectives + self._skip(),
            number=number,
            kind=kind,
            payload=None,
            location=f"train.py:{50 + len(self._steps[rank])} in f",
        )
        if self.progress.call("on_collective", rank, call) is not None:
            self.progress.counts["collectives"] += 1


def _classify(divergence: str) -> str:
    first_line = divergence.splitlines()[0]
    if " finished after " in first_line:
        return "divergence: finished rank"
    if first_line.count("collective") == 2:
        return "divergence: two collectives"
    return "divergence: collective and checkpoint"
