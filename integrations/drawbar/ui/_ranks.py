"""Times of each rank: lateness over time, totals, and slow ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from drawbar.train.runs import RankTimesOfRank, RankTimesSample
from drawbar.ui._catalog import IndexedRun

_MAX_COLUMNS = 400
_MAX_RANKS = 256


def describe_ranks(run: IndexedRun) -> dict[str, Any]:
    """Return how much later than the median each rank was, per step, and its total times."""
    result: dict[str, Any] = run.compute_once("ranks", lambda: _describe(run))
    return result


def _describe(run: IndexedRun) -> dict[str, Any]:
    samples = [sample for sample in run.record.read_rank_times() if sample.ranks]
    stragglers = [
        {
            "rank": straggler.rank,
            "phase": straggler.part,
            "ratio": straggler.ratio,
            "text": straggler.describe(),
        }
        for straggler in run.record.stragglers
    ]
    if not samples:
        return {"ranks": [], "columns": [], "late": [], "totals": [], "stragglers": stragglers}
    intervals = [_get_busy_seconds(samples, number) for number in range(len(samples))]
    step = -(-len(intervals) // _MAX_COLUMNS)
    columns = [_average(intervals[start : start + step]) for start in range(0, len(samples), step)]
    late = [_subtract_median(column) for column in columns]
    last = samples[-1].ranks
    worst = {rank: max((column.get(rank) or 0.0 for column in late), default=0.0) for rank in last}
    ranks = sorted(sorted(last, key=lambda rank: -worst[rank])[:_MAX_RANKS])
    return {
        "ranks": ranks,
        "columns": [_get_start(samples, number) for number in range(0, len(samples), step)],
        "end": samples[-1].time,
        "step_seconds": statistics.median(times.step_seconds for times in last.values()),
        "late": [[column.get(rank) for column in late] for rank in ranks],
        "totals": _list_totals(last, ranks, stragglers),
        "stragglers": stragglers,
    }


def _get_start(samples: Sequence[RankTimesSample], number: int) -> float:
    """Return the start of the interval of a sample."""
    sample = samples[number]
    if number and samples[number - 1].attempt == sample.attempt:
        return float(samples[number - 1].time)
    seconds = [times.seconds.get("function", 0.0) for times in sample.ranks.values()]
    return float(sample.time) - max(seconds, default=0.0)


def _get_busy_seconds(samples: Sequence[RankTimesSample], number: int) -> dict[int, float]:
    """Return the seconds per step of each rank since the sample before."""
    sample = samples[number]
    earlier = samples[number - 1] if number else None
    busy = {}
    for rank, times in sample.ranks.items():
        steps, seconds = times.steps, sum_own_seconds(times)
        if earlier is not None and earlier.attempt == sample.attempt and rank in earlier.ranks:
            steps -= earlier.ranks[rank].steps
            seconds -= sum_own_seconds(earlier.ranks[rank])
        if steps > 0:
            busy[rank] = max(0.0, seconds) / steps
    return busy


def sum_own_seconds(times: RankTimesOfRank) -> float:
    """Return the seconds for which a rank alone is responsible."""
    return float(sum(times.split_step().values()) * max(times.steps, 1))


def _average(intervals: Sequence[Mapping[int, float]]) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for interval in intervals:
        for rank, seconds in interval.items():
            values.setdefault(rank, []).append(seconds)
    return {rank: statistics.fmean(each) for rank, each in values.items()}


def _subtract_median(column: Mapping[int, float]) -> dict[int, float]:
    if not column:
        return {}
    median = statistics.median_low(column.values())
    return {rank: max(0.0, seconds - median) for rank, seconds in column.items()}


def _list_totals(
    last: Mapping[int, RankTimesOfRank],
    ranks: Sequence[int],
    stragglers: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    busy = {rank: sum_own_seconds(last[rank]) / max(last[rank].steps, 1) for rank in last}
    median = statistics.median_low(busy.values())
    slow = {straggler["rank"]: straggler["phase"] for straggler in stragglers}
    return [
        {
            "rank": rank,
            "steps": last[rank].steps,
            "step_seconds": last[rank].step_seconds,
            **{
                name: last[rank].seconds.get(name, 0.0)
                for name in ("data_wait", "checkpoint_blocked", "collective")
            },
            "busy": sum_own_seconds(last[rank]),
            "ratio": busy[rank] / median if median else None,
            "slow_phase": slow.get(rank),
        }
        for rank in ranks
    ]
