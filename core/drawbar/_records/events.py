"""Events of a run that the journal stores, as one JSON line each.

`live_events` has the events that are not in the journal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from drawbar._base.metrics import Metrics
from drawbar._base.train_function import FunctionIdentity
from drawbar._health.decisions import Cause, Diagnose, Evict, HealthDecision, Reattempt
from drawbar._process.errors import PreemptionInfo
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.rollback import Rollback
from drawbar._records.run_progress import RunProgress
from drawbar._records.verdict import Verdict
from drawbar._storage.contents import check_checkpoint_name
from drawbar._storage.manifest import Manifest, ReportedCheckpointStatus, Validation

AttemptEndCause = Literal[
    "worker",
    "hang",
    "preemption",
    "resize",
    "startup",
    "configuration",
    "divergence",
    "storage",
    "rollback",
]

UnevenRows = Literal["drop", "pad", "keep", "error"]
"""Handling of rows that cannot be divided evenly between ranks; see `DataConfig.uneven_rows`."""

JOURNAL_FORMAT = 2
"""Format version of the journal and of the segments with reports.

New event types and optional fields do not change it. Everything else does, also a new value of a
`Literal` in an event.
"""


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base class of events that the journal stores. `time` is in seconds since the epoch."""

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
        drawbar_version: Version of Drawbar; "" in journals of earlier versions.
        environment: Command, directory, commit, host, system, and Python version of the driver.
        versions: Versions of the installed frameworks, by the names of their packages.
    """

    run_id: str
    name: str
    config: dict[str, object]
    detached: bool = False
    function: FunctionIdentity | None = None
    format_version: int = JOURNAL_FORMAT
    drawbar_version: str = ""
    environment: dict[str, str] = {}
    versions: dict[str, str] = {}


class AttemptStarted(JournalEntry, frozen=True, kw_only=True, tag="attempt_started"):
    """The workers are about to start.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        attempt: Number of the attempt.
        first_report_index: Number of the first report. Reports of earlier attempts with this number
            or a higher one are no longer part of the history.
        resume_checkpoint: Path or URI of the checkpoint from which the attempt resumes, or None.

    Example: `print(event.attempt, event.resume_checkpoint)`
    """

    attempt: int
    first_report_index: int
    resume_checkpoint: str | None


class WorkersStarted(JournalEntry, frozen=True, kw_only=True, tag="workers_started"):
    """All worker processes are running and have their ranks."""

    attempt: int
    workers: list[tuple[WorkerInfo, Ranks]]


class UserFunctionStarted(JournalEntry, frozen=True, kw_only=True, tag="function_started"):
    """The first line of the training function ran on this rank."""

    attempt: int
    rank: int


class ProgramStarted(JournalEntry, frozen=True, kw_only=True, tag="program_started"):
    """The rank runs a program, such as a script, in the process `pid` on its worker's node."""

    attempt: int
    rank: int
    pid: int


class FirstReportReceived(JournalEntry, frozen=True, kw_only=True, tag="first_report"):
    """A rank made the first report of the attempt. `time` is the time of the report."""

    attempt: int
    rank: int


class ReportLocationFound(JournalEntry, frozen=True, kw_only=True, tag="report_location"):
    """A line of the user's code, as `file:line in function`, has reported.

    Recorded once per attempt for each line, for at most 32 lines. `rank` is the first rank of them.
    """

    attempt: int
    rank: int
    location: str


class DatasetEpochEnded(JournalEntry, frozen=True, kw_only=True, tag="dataset_pass"):
    """A rank has read its shard of a dataset to the end, or stopped before the end."""

    attempt: int
    rank: int
    shard_epoch: ShardEpochEnded


class ReportsLost(JournalEntry, frozen=True, kw_only=True, tag="reports_lost"):
    """Some of the reports `first` to `until` - 1 of `ranks` are missing, although they were made.

    Recorded by a start that finds later reports, or a checkpoint that was committed after them.
    These reports are no longer part of the history. If `ranks` is empty, all ranks are concerned.
    `checkpoint` is the name of the checkpoint, or "".
    """

    first: int
    until: int
    ranks: list[int] = []
    checkpoint: str


class CheckpointCommitted(JournalEntry, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is committed.

    Attributes:
        time: Time at which its manifest was made, in seconds since the epoch.
        attempt: Number of the attempt.
        index: Number of the report.
        name: Path of the checkpoint in the run directory; an absolute path or a URI if it was
            committed in place outside of it.
        nbytes: Size of its files in bytes.
        seconds: Time since the last rank's report.
        metrics: Reported metrics of the checkpoint, as in `Manifest`.

    Example: `print(event.name, event.nbytes / event.seconds)`
    """

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
        """Return the event for the commit of a checkpoint."""
        return CheckpointCommitted(
            # Not the current time: after a kill, the next driver adds the event to the journal.
            time=manifest.time,
            attempt=manifest.attempt,
            index=manifest.index,
            name=manifest.name,
            nbytes=manifest.nbytes,
            seconds=seconds,
            metrics=manifest.metrics,
        )


class CheckpointValidated(JournalEntry, frozen=True, kw_only=True, tag="checkpoint_validated"):
    """The validation of a checkpoint has ended.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        index: Number of the report.
        name: Name of the checkpoint.
        status: Whether the validation succeeded.
        metrics: Metrics that the validation returned.
        error: Error of a failed validation, else "".
        seconds: Duration of the validation.

    Example: `print(event.name, event.metrics or event.error)`
    """

    index: int
    name: str
    status: ReportedCheckpointStatus
    metrics: Metrics
    error: str
    seconds: float

    @staticmethod
    def from_manifest(manifest: Manifest, validation: Validation) -> CheckpointValidated:
        """Return the event for the end of a checkpoint's validation."""
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
    """A checkpoint is no longer in the list of checkpoints.

    Retention or a user has deleted it, or it is damaged or missing. Its files may still exist, for
    example in quarantine.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        name: Name of the checkpoint, as in `CheckpointCommitted`.

    Example: `remove_link(event.name)`
    """

    name: str

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)


class CheckpointRead(JournalEntry, frozen=True, kw_only=True, tag="checkpoint_read"):
    """A rank reads the resume checkpoint; `source` is "memory", "peer", or "storage"."""

    attempt: int
    rank: int
    name: str
    source: str


class ProgressRecorded(JournalEntry, frozen=True, kw_only=True, tag="progress"):
    """Progress of an attempt: at commits, at its end, and at most every 30 s."""

    attempt: int
    progress: RunProgress


class AttemptEnded(JournalEntry, frozen=True, kw_only=True, tag="attempt_ended"):
    """The attempt ended early.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        attempt: Number of the attempt.
        cause: Cause of the end.
        failure_headlines: One line for each failure, the root cause first.
        num_reports: Number of reports of all ranks in the attempt; None if unknown.
        failure_time: Time of the root cause, in seconds since the epoch; None if unknown.
        verdict: Why the run restarts or ends; None if the failure is none of the ranks.
        budget: Remaining failure budget if the run restarts, such as "max_failures: 2 of 3 left".
        rollback: With the cause "rollback", the checkpoint and data with which the run continues.

    Example: `print(event.cause, event.failure_headlines[:1])`
    """

    attempt: int
    cause: AttemptEndCause
    failure_headlines: list[str]
    num_reports: int | None = None
    failure_time: float | None = None
    verdict: Verdict | None = None
    budget: str = ""
    rollback: Rollback | None = None


class RanksRecovered(JournalEntry, frozen=True, kw_only=True, tag="recovered_in_place"):
    """Ranks died, and new processes have replaced them in the same attempt.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        attempt: Number of the attempt.
        ranks: The ranks that died.
        num_deaths: Number of deaths, also of new processes. Each of them uses the failure budget.
        num_preempted: Number of them that were lost with their nodes.
        failure_headlines: One line for each of the ranks.
        failure_time: Time of the first death, in seconds since the epoch.
        stopped_seconds: Longest time in seconds in which a surviving rank waited.
        budget: Remaining part of the failure budget, in words.

    Example: `print(event.ranks, event.stopped_seconds)`
    """

    attempt: int
    ranks: list[int]
    num_deaths: int
    failure_headlines: list[str]
    failure_time: float
    stopped_seconds: float
    budget: str = ""
    num_preempted: int = 0

    @staticmethod
    def of(
        attempt: int,
        failures: Sequence[WorkerFailure],
        num_deaths: Counter[AttemptEndCause],
        stopped_seconds: float,
        budget: str,
    ) -> RanksRecovered:
        """Return the event for the deaths that were recovered."""
        return RanksRecovered(
            time=time.time(),
            attempt=attempt,
            ranks=[failure.rank for failure in failures],
            num_deaths=num_deaths.total(),
            num_preempted=num_deaths["preemption"],
            failure_headlines=[failure.headline() for failure in failures],
            failure_time=min(failure.time for failure in failures),
            stopped_seconds=stopped_seconds,
            budget=budget,
        )

    def describe(self) -> str:
        """Return a line about the recovery, for users."""
        text = (
            f"recovered in place from: {'; '.join(self.failure_headlines)}. The other ranks were "
            f"stopped for {self.stopped_seconds:.1f} s"
        )
        return f"{text} ({self.budget})" if self.budget else text


class RanksStalled(JournalEntry, frozen=True, kw_only=True, tag="ranks_quiet"):
    """The set of stalled ranks has changed.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        attempt: Number of the attempt.
        descriptions: Location of each stalled rank; empty if no rank is stalled.

    Example: `send_alert(event.descriptions)`
    """

    attempt: int
    descriptions: dict[int, str]


class RankTimesRecorded(JournalEntry, frozen=True, kw_only=True, tag="rank_times"):
    """Times of the ranks since the start of their training function, by part.

    Recorded after each commit and at the end of an attempt. `seconds` are averages over the ranks;
    see `RankTimes` for the keys. `steps` is the number of steps of the slowest rank.
    """

    attempt: int
    seconds: dict[str, float]
    steps: int


class StragglerFound(JournalEntry, frozen=True, kw_only=True, tag="straggler"):
    """A rank needs longer than the others in a part of its steps.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        attempt: Number of the attempt.
        rank: Rank of the worker.
        part: Part of the step, as in `drawbar.train.runs.Straggler`.
        ratio: Time of this rank divided by the median of all ranks.
        seconds_per_step: Time of this rank in seconds per step.

    Example: `print(event.rank, event.part, event.ratio)`
    """

    attempt: int
    rank: int
    part: str
    ratio: float
    seconds_per_step: float


class PreemptionAnnounced(JournalEntry, frozen=True, kw_only=True, tag="preemption_announced"):
    """Nodes of the attempt will be preempted."""

    attempt: int
    info: PreemptionInfo


class RunStopRequested(JournalEntry, frozen=True, kw_only=True, tag="stop_requested"):
    """A user has requested the end of the run, after the next checkpoint if `save` is true."""

    save: bool


class RunEnded(JournalEntry, frozen=True, kw_only=True, tag="run_ended"):
    """The run has ended.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        outcome: "finished", "failed", or "stopped".
        error: Error message of a failed run, else "".
        num_reports: Number of reports of all ranks in the last attempt; None if unknown.

    Example: `print(event.outcome, event.error)`
    """

    outcome: str
    error: str = ""
    num_reports: int | None = None


class HealthDecided(JournalEntry, frozen=True, kw_only=True, tag="health_decided"):
    """The health checks of a run have found a problem. Drawbar acts on it after this event.

    Attributes:
        time: Time of the event, in seconds since the epoch.
        action: "DIAGNOSE", "REATTEMPT", or "EVICT".
        cause: Name of a `drawbar.train.health.Cause`.
        reason: Evidence in one or more sentences.
        target_nodes: IDs of the nodes that are diagnosed, or that the run leaves.
        hostnames: Hosts of these nodes.
        is_preflight: True before the workers have started.

    Example: `print(event.action, event.hostnames, event.reason)`
    """

    action: str
    cause: str
    reason: str
    target_nodes: list[str] = []
    hostnames: list[str] = []
    is_preflight: bool = False

    @property
    def decision(self) -> HealthDecision:
        """The decision, without on-demand probes."""
        cause, nodes = Cause[self.cause], self.target_nodes
        match self.action:
            case "EVICT":
                return Evict(cause, self.reason, nodes)
            case "DIAGNOSE":
                return Diagnose(cause, self.reason, target_nodes=nodes)
        return Reattempt(cause, self.reason)

    def describe(self) -> str:
        """Return a line about the decision, for users."""
        named = zip(self.hostnames, self.target_nodes, strict=True)
        nodes = ", ".join(f"{host} ({node[:8]})" for host, node in named)
        where = f" {nodes}" if nodes else ""
        when = "before the start" if self.is_preflight else "during the run"
        return f"Health check {when}: {self.action.lower()}{where}: {self.reason}"


JournaledEvent = (
    RunStarted
    | AttemptStarted
    | WorkersStarted
    | UserFunctionStarted
    | ProgramStarted
    | FirstReportReceived
    | ReportLocationFound
    | DatasetEpochEnded
    | ReportsLost
    | CheckpointCommitted
    | CheckpointValidated
    | CheckpointDeleted
    | CheckpointRead
    | ProgressRecorded
    | AttemptEnded
    | RanksRecovered
    | HealthDecided
    | RanksStalled
    | RankTimesRecorded
    | StragglerFound
    | PreemptionAnnounced
    | RunStopRequested
    | RunEnded
)


class ShardEpochEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has completed an epoch of a dataset, or has left the iteration early.

    Attributes:
        dataset: Name of the dataset.
        epoch: Number of the epoch.
        previous_reads: Rows of the epoch that all ranks had read when the attempt began, as
            encoded by `row_positions.encode_reads`.
        shard_index: Index of the shard.
        num_shards: Number of shards.
        num_rows: Rows that this iteration returned; None if they cannot be counted.
        num_batches: Batches that it returned; 0 if it returned single rows.
        is_shuffled: Whether the rows were shuffled.
        is_complete: Whether the iteration was completed.
        total_rows: Rows of the dataset if it is split by row number, else None.
        uneven_rows: How the dataset is split by row number.
        missing_unit: "row" or "batch" if a complete iteration returned none.
        report_index: Index of the rank's next report.
        discarded: Rows of this epoch that were read before it restarted from its beginning, one
            entry like `previous_reads` for each of its restarts.
    """

    dataset: str
    epoch: int
    previous_reads: list[Any]
    shard_index: int
    num_shards: int
    num_rows: int | None
    num_batches: int
    is_shuffled: bool
    is_complete: bool
    total_rows: int | None
    uneven_rows: UnevenRows
    missing_unit: str = ""
    report_index: int = 0
    discarded: list[Any] = []
