"""What happens in a run: typed events, told once, in order, by the controller.

The journal keeps those that make up the run's history, one JSON line each. The others are for who
watches the run while it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from drawbar.train._config.function_identity import FunctionIdentity
from drawbar.train._errors import WorkerFailure
from drawbar.train._messages import PassEnded, PreemptionInfo, Printed, Ranks, WorkerInfo
from drawbar.train._metrics import Metrics
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.contents import check_checkpoint_name
from drawbar.train._storage.manifest import Manifest, ReportedCheckpointStatus, Validation

AttemptEndCause = Literal[
    "worker", "hang", "preemption", "resize", "startup", "configuration", "divergence", "storage"
]


JOURNAL_FORMAT = 1
"""Format version of the journal.

New event types and optional fields do not change it. Everything else does, also a new value of a
`Literal` in an event.
"""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What the journal keeps. `time`: in seconds since the epoch."""

    time: float


class RunStarted(JournalEntry, frozen=True, kw_only=True, tag="run_started"):
    """`fit()` was called on this directory.

    Attributes:
        run_id: Identifier of the run, the same for all its starts.
        name: Name of the run.
        config: Configuration as JSON values and reprs.
        detached: Whether the run may outlive its driver.
        function: Identity of the training function.
        format_version: Format version of the events from here on.
    """

    run_id: str
    name: str
    config: dict[str, object]
    detached: bool = False
    function: FunctionIdentity | None = None
    format_version: int = JOURNAL_FORMAT


class AttemptStarted(JournalEntry, frozen=True, kw_only=True, tag="attempt_started"):
    """The workers are about to start. Reports are numbered from `first_index` on.

    Reports of earlier attempts with that number or a higher one are no longer part of the history.
    """

    attempt: int
    first_report_index: int
    resume_checkpoint: str | None


class WorkersStarted(JournalEntry, frozen=True, kw_only=True, tag="workers_started"):
    """Every worker process is up and has its ranks."""

    attempt: int
    workers: list[tuple[WorkerInfo, Ranks]]


class UserFunctionStarted(JournalEntry, frozen=True, kw_only=True, tag="function_started"):
    """The first line of the training function ran on this rank."""

    attempt: int
    rank: int


class ReportReceived(JournalEntry, frozen=True, kw_only=True, tag="report"):
    """One rank's `report()`."""

    attempt: int
    rank: int
    index: int
    metrics: Metrics


class DatasetEpochEnded(JournalEntry, frozen=True, kw_only=True, tag="dataset_pass"):
    """A rank has gone through its part of a dataset, or has left it before the end."""

    attempt: int
    rank: int
    shard_epoch: PassEnded


class ReportsLost(JournalEntry, frozen=True, kw_only=True, tag="reports_lost"):
    """Reports `first` to `until` - 1 are missing from the journal, although the run made them.

    A start that finds `checkpoint` newer than the journal records this.
    """

    first: int
    until: int
    checkpoint: str


class CheckpointCommitted(JournalEntry, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is committed. `seconds`: from the last rank's report to the commit."""

    attempt: int
    index: int
    name: str
    nbytes: int
    seconds: float
    metrics: Metrics

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)

    @staticmethod
    def of(manifest: Manifest, *, seconds: float) -> CheckpointCommitted:
        """Give the event of this checkpoint's commit."""
        return CheckpointCommitted(
            # Of the commit, since a resumed driver tells it once more where a kill came in between.
            time=manifest.time,
            attempt=manifest.attempt,
            index=manifest.index,
            name=manifest.name,
            nbytes=manifest.nbytes,
            seconds=seconds,
            metrics=manifest.metrics,
        )


class CheckpointValidated(JournalEntry, frozen=True, kw_only=True, tag="checkpoint_validated"):
    """A checkpoint's validation has ended; what it says is as in `Validation`."""

    index: int
    name: str
    status: ReportedCheckpointStatus
    metrics: Metrics
    error: str
    seconds: float

    @staticmethod
    def from_manifest(manifest: Manifest, validation: Validation) -> CheckpointValidated:
        """Give the event of the end of this checkpoint's validation."""
        return CheckpointValidated(
            time=time.time(),
            index=manifest.index,
            name=manifest.name,
            status=validation.status,
            metrics=validation.metrics,
            error=validation.error,
            seconds=validation.seconds,
        )


class CheckpointDeleted(JournalEntry, frozen=True, kw_only=True, tag="checkpoint_deleted"):
    """Retention let go of a checkpoint."""

    name: str

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)


class AttemptEnded(JournalEntry, frozen=True, kw_only=True, tag="attempt_ended"):
    """The attempt ended early. `failures` are headlines, the root cause first."""

    attempt: int
    cause: AttemptEndCause
    failure_headlines: list[str]


class RanksStalled(JournalEntry, frozen=True, kw_only=True, tag="ranks_quiet"):
    """Which ranks give no sign of life now, and what is said of each; none: all do again."""

    attempt: int
    descriptions: dict[int, str]


class RunEnded(JournalEntry, frozen=True, kw_only=True, tag="run_ended"):
    """The run is over: "finished", "failed" or "stopped"."""

    outcome: str
    error: str = ""


JournaledEvent = (
    RunStarted
    | AttemptStarted
    | WorkersStarted
    | UserFunctionStarted
    | ReportReceived
    | DatasetEpochEnded
    | ReportsLost
    | CheckpointCommitted
    | CheckpointValidated
    | CheckpointDeleted
    | AttemptEnded
    | RanksStalled
    | RunEnded
)


@dataclass(frozen=True)
class Notice:
    """Something that the user should know or do, in words."""

    text: str


@dataclass(frozen=True)
class LinePrinted:
    """A rank's function has printed a line, or logged an error."""

    rank: int
    line: Printed


@dataclass(frozen=True)
class BytesWritten:
    """Bytes that the script of rank 0 has written to its standard output or standard error."""

    data: bytes
    stream: Literal["stdout", "stderr"] = "stdout"


@dataclass(frozen=True)
class RoundCompleted:
    """Every rank has reported `index`; the checkpoint that came with it is committed.

    `metrics` are in rank order. Such rounds are only told where there are callbacks.
    """

    index: int
    metrics: list[Metrics]
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class WorkersFailed:
    """Failures of an attempt, the root cause first.

    Attributes:
        end: Kind of failure.
        failures: Empty if no worker is to blame.
        is_raised: Whether the run ends, so that `fit()` raises the failure.
        budget: Remaining failure budget if the run restarts, such as "max_failures: 2 of 3 left".
    """

    cause: AttemptEndCause
    failures: Sequence[WorkerFailure]
    is_final: bool
    budget: str = ""


@dataclass(frozen=True)
class PreemptionAnnounced:
    """Nodes of the run are about to be taken away."""

    info: PreemptionInfo


@dataclass(frozen=True)
class ValidationsPending:
    """Every function has returned, and validations go on; `which` says where they stand."""

    description: str


@dataclass(frozen=True)
class ControllerFailed:
    """The controller itself has failed: the run is over, and its journal does not say so."""


Event = (
    JournaledEvent
    | Notice
    | LinePrinted
    | BytesWritten
    | RoundCompleted
    | WorkersFailed
    | PreemptionAnnounced
    | ValidationsPending
    | ControllerFailed
)
