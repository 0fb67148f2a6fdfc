"""Compare the stacks of all ranks, and write them to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from drawbar._base.wording import format_ranks
from drawbar._process.collective_calls import CollectiveWait, find_collective_waits
from drawbar._process.stack import Stack, format_positions

Stacks = Mapping[int, Stack | None]
"""Stack by rank; None for a rank that does not reply."""


class WrittenStacks(NamedTuple):
    """Stacks of all ranks in files, and their comparison.

    Attributes:
        directory: Directory of the files.
        difference: Text with the location of each rank in the code.
        report_index: Number of the next report of the rank that is furthest in the data.
        num_batches: Its batches since the last report; None if the position of a rank is unknown.
    """

    directory: Path
    difference: str
    report_index: int
    num_batches: int | None


def format_difference(stacks: Stacks) -> str:
    """Return one line for each location with its ranks, the smallest group of ranks first."""
    groups = _group_by_location(stacks)
    minority = find_minority_ranks(stacks)
    lines = []
    for location, ranks in groups:
        mark = "   <- differs from the others" if ranks == minority else ""
        lines.append(f"  {format_ranks(ranks)}: {location}{mark}")
    return "\n".join(lines)


def find_minority_ranks(stacks: Stacks) -> list[int]:
    """Return the ranks of the smallest group at one location; empty if two groups are smallest."""
    sizes = [len(ranks) for _, ranks in _group_by_location(stacks)]
    has_minority = len(sizes) > 1 and sizes[0] < sizes[1]
    return _group_by_location(stacks)[0][1] if has_minority else []


def find_outlier_ranks(stacks: Stacks) -> list[int]:
    """Return the minority; all ranks if they differ and there is no minority."""
    return find_minority_ranks(stacks) or (
        list(stacks) if len(_group_by_location(stacks)) > 1 else []
    )


def _group_by_location(stacks: Stacks) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        no_reply = "does not respond: in one long call that holds the interpreter lock, or dead"
        groups.setdefault(stack.location if stack else no_reply, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def find_waits(stacks: Stacks) -> list[CollectiveWait]:
    """Return the collectives of a framework in which ranks wait."""
    return find_collective_waits(
        {rank: stack.collective_calls for rank, stack in stacks.items() if stack is not None}
    )


def write_stacks(directory: Path, stacks: Stacks) -> WrittenStacks:
    """Write each rank's stacks and their difference to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    summary = format_difference(stacks)
    summary += "".join(f"\n  {wait.text}" for wait in find_waits(stacks))
    summary += format_positions(stacks)
    for rank, stack in stacks.items():
        (directory / f"rank_{rank}.txt").write_text(stack.text if stack else "no reply\n")
    (directory / "difference.txt").write_text(summary + "\n")
    return WrittenStacks(directory, summary, *_find_last_place(stacks))


def _find_last_place(stacks: Stacks) -> tuple[int, int | None]:
    """Return the number of reports and of batches of the rank that is furthest."""
    places = [
        (stack.report_index, stack.num_batches)
        for stack in stacks.values()
        if stack is not None and stack.num_batches is not None
    ]
    return max(places) if places and len(places) == len(stacks) else (0, None)
