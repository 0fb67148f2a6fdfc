"""Table of the ranks of a run for `drawbar show --ranks`."""

from __future__ import annotations

from typing import Any

from drawbar.cli._output import escape_control_chars, format_duration, write_json, write_table
from drawbar.train.runs import RankTimesSample, RunRecord


def format_part(part: str) -> str:
    """Return the text for a part of the goodput."""
    if part == "unsaved":
        return "since the last checkpoint"
    return part.replace("phase:", "phase ").replace("_", " ")


def show_ranks(record: RunRecord, *, as_json: bool) -> None:
    """Print where the time of each rank in the last attempt went.

    Args:
        record: The run.
        as_json: Whether to print JSON.
    """
    samples = record.read_rank_times()
    if as_json:
        write_json(_to_dict(record, samples[-1] if samples else None))
        return
    if not samples:
        print("No times of the ranks are recorded yet. The first ones follow after a second.")
        return
    last = samples[-1]
    slow = {
        (straggler.rank, straggler.part): f" ({min(straggler.ratio, 99):.1f}x)"
        for straggler in record.stragglers
    }
    split = {rank: times.split_step() for rank, times in last.ranks.items()}
    parts = list(dict.fromkeys(part for values in split.values() for part in values))
    rows: list[tuple[str, ...]] = [("rank", "steps", "per step", *parts)]
    for rank, times in sorted(last.ranks.items()):
        function = times.seconds.get("function", 0.0)
        per_step = format_duration(function / times.steps) if times.steps else "-"
        cells = [
            f"{1000 * split[rank].get(part, 0.0):.1f} ms" + slow.get((rank, part), "")
            for part in parts
        ]
        rows.append((str(rank), str(times.steps), per_step, *cells))
    print(f"Attempt {last.attempt}, mean per step")
    write_table([tuple(map(escape_control_chars, row)) for row in rows], "  ")
    for straggler in record.stragglers:
        print(escape_control_chars(straggler.describe()))


def _to_dict(record: RunRecord, sample: RankTimesSample | None) -> dict[str, Any]:
    ranks = {} if sample is None else sample.ranks
    return {
        "attempt": None if sample is None else sample.attempt,
        "time": None if sample is None else sample.time,
        "ranks": [
            {
                "rank": rank,
                "steps": times.steps,
                "seconds": dict(times.seconds),
                "seconds_per_step": times.split_step(),
            }
            for rank, times in sorted(ranks.items())
        ],
        "stragglers": record.stragglers,
    }
