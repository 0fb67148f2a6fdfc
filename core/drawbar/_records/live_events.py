"""Events of an active run that are not in the journal.

A `ReportLog` stores `ReportsReceived`. All others are only for watchers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from drawbar._base.metrics import Metrics
from drawbar._process.output_lines import OutputLine
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.events import AttemptEndCause, JournaledEvent
from drawbar._records.run_progress import RunProgress
from drawbar._records.verdict import Verdict
from drawbar._storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class ReportsReceived:
    """A rank called `report()` once, or several times in a row. Stored in a `ReportLog`.

    Attributes:
        attempt: Number of the attempt.
        rank: Rank that made the reports.
        indices: Number of each report.
        times: Time of each report, in seconds since the epoch.
        metrics: Metrics of each report.

    Example: `print(event.rank, event.indices[-1], event.metrics[-1])`
    """

    attempt: int
    rank: int
    indices: Sequence[int]
    times: Sequence[float]
    metrics: Sequence[Metrics]

    def select_last(self) -> ReportsReceived:
        """Return an event with only the last of the reports."""
        return replace(
            self, indices=self.indices[-1:], times=self.times[-1:], metrics=self.metrics[-1:]
        )


@dataclass(frozen=True)
class ProgressReceived:
    """Rank 0 has set its progress, at most once per second.

    Attributes:
        progress: Progress, with percent, rate, and ETA.

    Example: `print(event.progress.percent)`
    """

    progress: RunProgress


@dataclass(frozen=True)
class Notice:
    """A message for the user.

    Attributes:
        text: One or more sentences.

    Example: `print(event.text)`
    """

    text: str


@dataclass(frozen=True)
class LinePrinted:
    """The function of a rank printed a line or logged an error."""

    rank: int
    line: OutputLine


@dataclass(frozen=True)
class BytesWritten:
    """The script of rank 0 wrote bytes to its standard output or standard error."""

    data: bytes
    stream: Literal["stdout", "stderr"] = "stdout"


@dataclass(frozen=True)
class RankImported:
    """A rank has imported the training function, and sets up the backend next."""

    rank: int


@dataclass(frozen=True)
class ObservationReceived:
    """A rank has observed something.

    Attributes:
        attempt: Number of the attempt.
        rank: Rank that has sent it.
        kind: "resources", "rank_times", "progress", or another kind.
        payload: JSON values. For these three kinds: attributes of a `ResourceSample`,
            `RankTimesOfRank`, or `RunProgress` of `drawbar.train.runs`.

    Example: `print(event.payload["cpu_percent"] if event.kind == "resources" else "")`
    """

    attempt: int
    rank: int
    kind: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class AttemptEnding:
    """The attempt is about to end. Watchers can emit their last events about it."""

    attempt: int


@dataclass(frozen=True)
class RoundCompleted:
    """All ranks have made report `index`, and its checkpoint, if any, is committed.

    `metrics` are in rank order. Emitted only for runs with callbacks.
    """

    index: int
    metrics: list[Metrics]
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class WorkersFailed:
    """Failures of an attempt, the root cause first.

    Attributes:
        cause: Cause of the end of the attempt.
        failures: Failures of workers; empty if no worker caused the end.
        is_final: Whether the run ends, so that `fit()` raises the failure.
        budget: Remaining failure budget if the run restarts, such as "max_failures: 2 of 3 left".
        verdict: Why the run restarts or ends; None if the failure is none of the ranks.
    """

    cause: AttemptEndCause
    failures: Sequence[WorkerFailure]
    is_final: bool
    budget: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class ValidationsPending:
    """All functions have returned, but validations are running; `description` shows progress."""

    description: str


@dataclass(frozen=True)
class ControllerFailed:
    """The controller failed, so the run has ended without an event in the journal."""

    error: str = ""


Event = (
    JournaledEvent
    | ReportsReceived
    | ProgressReceived
    | Notice
    | LinePrinted
    | BytesWritten
    | RankImported
    | ObservationReceived
    | AttemptEnding
    | RoundCompleted
    | WorkersFailed
    | ValidationsPending
    | ControllerFailed
)
