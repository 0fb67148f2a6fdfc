"""A run as it is wanted, held, planned and ended: what the controller gets and gives back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from drawbar.train._config.backend import BackendConfig
from drawbar.train._config.data_config import DataConfig
from drawbar.train._config.function_identity import FunctionIdentity
from drawbar.train._config.run_config import RunConfig, RunContext
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._controller.decisions import UsedBudget
from drawbar.train._errors import TrainingFailedError
from drawbar.train._history.events import AttemptStarted
from drawbar.train._history.journal import Journal
from drawbar.train._history.result import Result
from drawbar.train._history.timeline import RunState
from drawbar.train._messages import Assignment, Finished, Ranks, WorkerInfo, WorkerSpec
from drawbar.train._serialization import Serialized
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker_group.validators import ValidationTask


class AssignmentPlanner(Protocol):
    """What the trainer contributes to each attempt."""

    @property
    def metadata(self) -> dict[str, object]:
        """What every worker and every checkpoint has of the trainer's metadata."""
        ...

    def make_assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[Assignment]:
        """Say what each slot is to do; datasets are sharded anew."""
        ...

    @property
    def notices(self) -> list[str]:
        """Console lines about the datasets of the most recent assignments."""
        ...

    def describe_wait(self, up: int, placed: bool) -> str:
        """Say in one line what the workers that have not started are waiting for."""
        ...

    def get_draining_nodes(self) -> dict[str, int]:
        """Give the nodes that are about to go: id to deadline (ms since the epoch, 0 unknown)."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that a trainer passes to the process that hosts the run.

    Attributes:
        payload: Serialized `Payload`: the training function and its config. Only workers
            deserialize it.
        function: Identity of the training function.
        worker: Settings of each worker.
        trainer: Content of `trainer.pkl`, which `restore()` needs.
        settings: Settings that a resumed run compares with its last start, by key.
        run_config: Always has a name.
        validation: None if the trainer has no `validation_config`.
    """

    train_loop: Serialized
    function: FunctionIdentity
    worker_spec: WorkerSpec
    trainer_state: bytes
    config_record: dict[str, object]
    scaling_config: ScalingConfig
    run_config: RunConfig
    backend_config: BackendConfig
    dataset_config: DataConfig
    datasets: Mapping[str, object]
    resume_from_checkpoint: Checkpoint | None
    validation_task: ValidationTask | None

    @property
    def name(self) -> str:
        """Name of the run."""
        assert self.run_config.name is not None  # the trainer has given it one
        return self.run_config.name

    def release(self) -> None:
        """Hold no longer what the user's functions refer to: the run is over."""
        self.train_loop.release()
        if self.validation_task is not None:
            self.validation_task.function.release()


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run that this process holds, ready for its next attempt.

    Attributes:
        spec: What the trainer wants.
        run_id: The same over restarts and resumes.
        directory: Where it lies.
        journal: Open, so that no other process writes to it.
        snapshot: How it stands.
        next_attempt: Number of the next attempt.
        spent: What earlier attempts have taken of the run's budget of failures.
        warning: For the user; may be empty.
    """

    spec: RunSpec
    run_id: str
    directory: RunDirectory
    journal: Journal
    state: RunState
    next_attempt: int
    used_budget: UsedBudget
    warning: str

    @property
    def context(self) -> RunContext:
        """The run as callbacks see it."""
        return RunContext(
            name=self.spec.name,
            run_id=self.run_id,
            path=self.directory.uri,
            scaling_config=self.spec.scaling_config,
            run_config=self.spec.run_config,
        )


@dataclass(frozen=True)
class ControllerOutcome:
    """How the run ended: each rank's return value, or the error; neither if the user stopped it."""

    finished: dict[int, Finished] = field(default_factory=dict)
    error: TrainingFailedError | None = None


SerializedT = TypeVar("SerializedT", Serialized, bytes)


@dataclass(frozen=True)
class RunOutcome:
    """A run that is over. It has a result unless it failed."""

    outcome: ControllerOutcome
    snapshot: RunState
    result: Result | None

    def get_result(self) -> Result:
        """Give the result with the return values, or raise why the run failed."""
        if self.outcome.error is not None:
            raise self.outcome.error
        assert self.result is not None  # it has not failed
        values = self.outcome.finished
        # Here and not before: the classes need not exist in the process that hosts the run.
        self.result.return_values = [
            _load_return_value(rank, values[rank]) for rank in sorted(values)
        ]
        return self.result

    def serialize(self, serializer: Callable[[object], SerializedT]) -> SerializedT:
        """Pack it for a process or a file; of what users made, only what their workers packed."""
        try:
            packed = serializer(self)
        except Exception:  # an error whose cause does not pickle
            error = self.outcome.error
            plain = TrainingFailedError(str(error), path=getattr(error, "path", ""))
            packed = serializer(replace(self, outcome=ControllerOutcome(error=plain)))
        return packed


def _load_return_value(rank: int, finished: Finished) -> object:
    """Give a rank's return value; one that cannot be had is told, and does not fail the run."""
    if finished.value is None:
        return None  # the console has said why
    try:
        return finished.value.deserialize()
    except Exception as error:
        why = f"it does not unpickle here: {error!r}"
        warnings.warn(f"the return value of rank {rank} is lost: {why}", stacklevel=5)
        return None
