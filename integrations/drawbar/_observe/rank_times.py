"""Times of each rank: the file `rank_times.jsonl`, and ranks that are slower than the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import msgspec

from drawbar._observe.sample_log import SampleFile

STRAGGLER_RATIO = 1.3
"""A rank is slow if it needs this many times the median of all ranks."""

MIN_STRAGGLER_STEPS = 50
"""Number of steps before ranks are compared."""

_MIN_SHARE_OF_STEP = 0.05
_WAITING = ("data_wait", "checkpoint_save", "checkpoint_blocked", "collective")


@dataclass(frozen=True, kw_only=True)
class RankTimesSample:
    """Times of all ranks from the start of their training functions to a point in time.

    Attributes:
        time: Time of the sample, in seconds since the epoch.
        attempt: Number of the attempt.
        ranks: Times of each rank that has sent some.

    Example:
        Print how long each rank has waited for data so far:

            sample = runs.find_run("experiment").read_rank_times()[-1]
            for rank, times in sample.ranks.items():
                print(rank, times.seconds.get("data_wait", 0.0))
    """

    time: float
    attempt: int
    ranks: dict[int, RankTimesOfRank]


@dataclass(frozen=True)
class RankTimesOfRank:
    """Times of one rank since the start of its training function.

    Attributes:
        steps: Number of steps: calls of `drawbar.train.step()`, or else reports.
        seconds: Seconds by key. "function" is the time since the start. "data_wait",
            "checkpoint_save", "checkpoint_blocked", "collective", and "phase:NAME" are parts of it,
            as are "warmup" (excess of the first step) and "forward" (forward passes).

    Example:
        Print the seconds per step of rank 3:

            times = runs.find_run("experiment").read_rank_times()[-1].ranks[3]
            print(times.seconds["function"] / times.steps)
    """

    steps: int
    seconds: Mapping[str, float]

    @property
    def step_seconds(self) -> float:
        """Mean seconds per step, without the excess of the first step."""
        seconds = self.seconds.get("function", 0.0) - self.seconds.get("warmup", 0.0)
        return seconds / max(self.steps, 1)

    def split_step(self) -> dict[str, float]:
        """Return the mean seconds per step by part, without the excess of the first step.

        Returns:
            The parts for which this rank alone is responsible: "data loader", "checkpoint",
            "forward pass" or, without measured forward passes, "computation", and each phase.
        """
        steps = max(self.steps, 1)
        parts = {
            "data loader": self.seconds.get("data_wait", 0.0),
            "checkpoint": self.seconds.get("checkpoint_save", 0.0),
        }
        phases = {key: value for key, value in self.seconds.items() if key.startswith("phase:")}
        parts |= {f"phase {key.removeprefix('phase:')}": value for key, value in phases.items()}
        if "forward" in self.seconds:
            parts["forward pass"] = self.seconds["forward"]
        else:
            waiting = sum(self.seconds.get(key, 0.0) for key in _WAITING) + sum(phases.values())
            busy = self.seconds.get("function", 0.0) - self.seconds.get("warmup", 0.0) - waiting
            parts["computation"] = max(busy, 0.0)
        return {part: seconds / steps for part, seconds in parts.items()}


class RankTimesLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `rank_times.jsonl`: a `RankTimesSample` in columns."""

    time: float
    attempt: int
    ranks: list[int]
    steps: list[int]
    seconds: dict[str, list[float]]

    def __post_init__(self) -> None:
        if {len(self.ranks)} != {len(self.steps), *map(len, self.seconds.values())}:
            raise ValueError("columns of different lengths")

    @classmethod
    def from_ranks(cls, time: float, attempt: int, ranks: Mapping[int, RankTimesOfRank]) -> Self:
        """Return the line for the times of all ranks."""
        keys = dict.fromkeys(key for times in ranks.values() for key in times.seconds)
        return cls(
            time=time,
            attempt=attempt,
            ranks=list(ranks),
            steps=[times.steps for times in ranks.values()],
            seconds={
                key: [round(times.seconds.get(key, 0.0), 3) for times in ranks.values()]
                for key in keys
            },
        )

    def to_sample(self) -> RankTimesSample:
        """Return the times by rank."""
        ranks = {
            rank: RankTimesOfRank(
                self.steps[number], {key: values[number] for key, values in self.seconds.items()}
            )
            for number, rank in enumerate(self.ranks)
        }
        return RankTimesSample(time=self.time, attempt=self.attempt, ranks=ranks)


RANK_TIMES = SampleFile("rank_times.jsonl", msgspec.json.Decoder(RankTimesLine), lambda line: None)
"""File in the run directory with the times of all ranks, about every ten seconds."""


@dataclass(frozen=True)
class Straggler:
    """A rank that needs longer than the others in a part of its steps.

    Attributes:
        rank: Rank of the worker.
        part: Part of the step: "data loader", "forward pass", "computation", "checkpoint", or
            "phase NAME".
        ratio: Time of this rank divided by the median of all ranks.
        seconds_per_step: Time of this rank in seconds per step.

    Example:
        Print the slow ranks of a run:

            for straggler in runs.find_run("experiment").stragglers:
                print(straggler.describe())
    """

    rank: int
    part: str
    ratio: float
    seconds_per_step: float

    def describe(self) -> str:
        """Return a sentence for users."""
        return (
            f"rank {self.rank} is slow in its {self.part}: {1000 * self.seconds_per_step:.0f} ms "
            f"per step, {self.ratio:.1f} times the median of all ranks"
        )


def find_stragglers(ranks: Mapping[int, RankTimesOfRank]) -> list[Straggler]:
    """Return the ranks that are slower than the others, the slowest first.

    Args:
        ranks: Times of each rank over the same period.

    Returns:
        The ranks that need at least `STRAGGLER_RATIO` times the median in a part of their steps,
        if the excess is at least 5 % of a step, without the excess of the first step. Empty with
        fewer than `MIN_STRAGGLER_STEPS` steps.
        A part that most ranks do not have is no difference in speed: rank 0 may save for all.
    """
    if len(ranks) < 2 or min(times.steps for times in ranks.values()) < MIN_STRAGGLER_STEPS:
        return []
    split = {rank: times.split_step() for rank, times in ranks.items()}
    step = statistics.median(times.step_seconds for times in ranks.values())
    found: list[Straggler] = []
    for part in dict.fromkeys(part for parts in split.values() for part in parts):
        values = {rank: parts.get(part, 0.0) for rank, parts in split.items()}
        # The lower median: with two ranks, the slow one is compared with the other.
        median = statistics.median_low(values.values())
        found += [
            Straggler(rank, part, value / median, value)
            for rank, value in values.items()
            if median > 0
            and value >= STRAGGLER_RATIO * median
            and value - median >= _MIN_SHARE_OF_STEP * step
        ]
    return sorted(found, key=lambda straggler: -straggler.seconds_per_step)


def subtract(
    later: Mapping[int, RankTimesOfRank], earlier: Mapping[int, RankTimesOfRank]
) -> dict[int, RankTimesOfRank]:
    """Return the times of the ranks between two samples of the same attempt."""
    changes = {}
    for rank, times in later.items():
        before = earlier.get(rank, RankTimesOfRank(0, {}))
        seconds = {
            key: max(value - before.seconds.get(key, 0.0), 0.0)
            for key, value in times.seconds.items()
        }
        changes[rank] = RankTimesOfRank(max(times.steps - before.steps, 0), seconds)
    return changes
