"""Random histories of messages, on which `AttemptProgress` must agree with its oracle.

The tests run some of them. `python -m tests.train.controller.progress_histories NUMBER [SEED]` runs
more, and prints how often each kind of message and verdict occurred.
"""

from __future__ import annotations

import sys
from collections import Counter
from random import Random
from typing import Any, Literal, get_args

from drawbar.train._config.validation_config import CheckpointConsistencyMode
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CheckpointOffer,
    CollectiveCalled,
    CollectiveKind,
    Report,
)
from drawbar.train._storage.contents import FileEntry
from tests.train.controller.progress_oracle import ProgressOracle

Step = Literal["metrics", "async", "save", "list", "timed list", "wait"] | CollectiveKind

COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
USER_COLLECTIVES = ("barrier", "broadcast_from_rank_zero", "all_gather")
STEPS: tuple[Step, ...] = (
    *("metrics", "async", "async", "save", "save", "list", "timed list", "wait"),
    *COLLECTIVES,
)
MAX_EVENTS = 80


class ComparedProgress:
    """Progress and its oracle, which receive the same messages and must give the same results.

    Args:
        world_size: Number of ranks.
        first_index: Index of the first report.
        should_keep_all: Whether rounds without files are kept.
        has_errors: Whether ranks also send messages that they should not send.

    Attributes:
        oracle: The oracle.
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
            offer = CheckpointOffer(
                directory=f"/{rank}", files=files, is_staged=False, checkpoint_name="checkpoint"
            )
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


def main() -> None:
    """Run the number of histories that the command line requests."""
    number, first_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + number):
        try:
            counts += History(seed).run()
        except AssertionError:
            print(f"history {seed} differs")
            raise
    print(f"{number} histories agree:")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:40} {count:,}")


if __name__ == "__main__":
    main()
