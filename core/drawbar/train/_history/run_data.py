"""Reports of a run in columns, for programs that show runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.train._history.report_blocks import ReportBlock


@dataclass(frozen=True)
class ReportColumns:
    """Consecutive reports of one rank that have the same metrics, in columns.

    Attributes:
        rank: Rank that made the reports.
        indices: Number of each report.
        times: Time of each report, in seconds since the epoch.
        metrics: Values of each metric, as they were reported.

    Example:
        Print the number of reports of rank 0::

            run = runs.find_run("experiment")
            print(sum(len(columns.times) for columns in run.iter_report_columns(rank=0)))
    """

    rank: int
    indices: Sequence[int]
    times: Sequence[float]
    metrics: Mapping[str, Sequence[Any]]


def select_columns(blocks: Iterable[ReportBlock]) -> Iterator[ReportColumns]:
    """Yield blocks of reports without the details of how they are stored."""
    for block in blocks:
        yield ReportColumns(block.rank, block.indices, block.time, block.metrics)
