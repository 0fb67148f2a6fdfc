"""Factories of events for tests of watchers."""

from __future__ import annotations

from typing import Any

from drawbar._process.rank_assignment import rank_workers
from drawbar._process.ranks import WorkerInfo
from drawbar._records.events import (
    AttemptStarted,
    CheckpointCommitted,
    UserFunctionStarted,
    WorkersStarted,
)
from drawbar._records.live_events import Event, RankImported, ReportsReceived


def attempt_started(number: int, checkpoint: str | None = None) -> AttemptStarted:
    return AttemptStarted(
        time=0, attempt=number, first_report_index=0, resume_checkpoint=checkpoint
    )


def workers_started(count: int) -> WorkersStarted:
    info = WorkerInfo(node_id="n", node_ip="127.0.0.1", hostname="h", pid=1)
    return WorkersStarted(time=0, attempt=0, workers=rank_workers([info] * count))


def functions_started(count: int) -> list[Event]:
    """Return the events of a start from its processes to the training functions."""
    return [
        workers_started(count),
        *map(RankImported, range(count)),
        *(UserFunctionStarted(time=0, attempt=0, rank=rank) for rank in range(count)),
    ]


def reported(rank: int, index: int, metrics: dict[str, Any]) -> ReportsReceived:
    return ReportsReceived(attempt=0, rank=rank, indices=[index], times=[0.0], metrics=[metrics])


def committed(name: str, nbytes: int = 10, seconds: float = 0.1) -> CheckpointCommitted:
    return CheckpointCommitted(
        time=0, attempt=0, index=0, name=name, nbytes=nbytes, seconds=seconds, metrics={}
    )
