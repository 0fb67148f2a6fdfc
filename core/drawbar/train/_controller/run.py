"""Specification, open state, and outcome of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from drawbar._base.train_function import FunctionIdentity
from drawbar._process.errors import TrainingFailedError
from drawbar._process.serialization import Serialized
from drawbar._records.event_stream import Emit, Watcher
from drawbar._records.events import AttemptEndCause
from drawbar._records.journal import Journal
from drawbar._records.report_log import ReportLog
from drawbar._records.rollback import Rollback
from drawbar._records.timeline import RunState
from drawbar._records.verdict import FailedAttempt
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._config.backend import BackendConfig
from drawbar.train._config.data_source import DataSource
from drawbar.train._config.run_config import RunConfig, RunContext
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._protocol.assignment import WorkerSpec
from drawbar.train._protocol.messages import RankFinished
from drawbar.train._worker_group.validator import ValidationTask


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that a trainer passes to the process that hosts the run.

    A `RunMode` may read `name`, `scaling_config`, and `run_config`. The other attributes are
    internal.

    Attributes:
        train_loop: Serialized training function and its config. Only workers deserialize it.
        function: Identity of the training function.
        worker_spec: Settings of each worker.
        trainer_state: Content of `trainer.pkl`, which `restore()` needs.
        config_record: Settings that a resumed run compares with its last start, by key.
        scaling_config: Number and resources of the workers.
        run_config: Settings of the run. Always has a name.
        backend_config: Backend that sets up the workers.
        data_source: Data of the workers; None if the trainer has no datasets.
        resume_from_checkpoint: Checkpoint from which a new run starts.
        validation_task: None if the trainer has no `validation_config`.
        is_restarted_by_launcher: Whether an external launcher has started the ranks. It restarts
            them after a failure, and `FailureConfig.max_failures` is ignored.

    Example:
        ```python
        print("starting", spec.name, "with", spec.scaling_config.num_workers, "workers")
        ```
    """

    train_loop: Serialized
    function: FunctionIdentity
    worker_spec: WorkerSpec
    trainer_state: bytes
    config_record: dict[str, object]
    scaling_config: ScalingConfig
    run_config: RunConfig
    backend_config: BackendConfig
    data_source: DataSource | None
    resume_from_checkpoint: Checkpoint | None
    validation_task: ValidationTask | None
    is_restarted_by_launcher: bool = False

    @property
    def name(self) -> str:
        """Name of the run."""
        assert self.run_config.name is not None  # the trainer has set it
        return self.run_config.name

    def release(self) -> None:
        """Release the objects that the user's functions refer to. Call this after the run."""
        self.train_loop.release()
        if self.validation_task is not None:
            self.validation_task.function.release()


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """Run that this process has locked, ready for its next attempt.

    Attributes:
        spec: Specification of the run.
        run_id: ID of the run, which restarts and resumes keep.
        directory: Run directory.
        journal: Open journal. Its lock keeps other processes from writing to the run.
        reports: Stores the reports of the next attempts.
        state: Current state of the run.
        next_attempt: Number of the next attempt.
        failure_counts: Number of failures of earlier attempts by cause.
        failed_attempts: Failed attempts with the same settings, also of earlier starts.
        warning: Warning for the user; may be empty.
        rollbacks: Rollbacks of the run, oldest first.
        had_finished: Whether an earlier start of the run had finished.
    """

    spec: RunSpec
    run_id: str
    directory: RunDirectory
    journal: Journal
    reports: ReportLog
    state: RunState
    next_attempt: int
    failure_counts: Counter[AttemptEndCause]
    failed_attempts: list[FailedAttempt]
    warning: str
    had_finished: bool
    rollbacks: list[Rollback]

    @property
    def context(self) -> RunContext:
        """Description of the run for callbacks."""
        return RunContext(
            name=self.spec.name,
            run_id=self.run_id,
            path=self.directory.uri,
            scaling_config=self.spec.scaling_config,
            run_config=self.spec.run_config,
        )


@dataclass(frozen=True)
class ControllerOutcome:
    """Return values or error of a run; neither if the user stopped it.

    Attributes:
        finished: Last message of each rank, with its return value.
        error: Error that `fit()` raises.
    """

    finished: dict[int, RankFinished] = field(default_factory=dict)
    error: TrainingFailedError | None = None

    def get_final_notices(self) -> list[str]:
        """Return the distinct notices that ranks sent when their functions returned."""
        notices = (
            notice for _, value in sorted(self.finished.items()) for notice in value.final_notices
        )
        return list(dict.fromkeys(notices))


MakeWatcher = Callable[[OpenRun, Emit], Watcher]
"""Creates a watcher of a run. It may emit events, which the watchers before it receive at once."""
