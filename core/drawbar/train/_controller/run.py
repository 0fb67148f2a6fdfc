"""A run as the controller gets it and gives it back: the plan, the outcome, the ending."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from drawbar.train._carry import Carried
from drawbar.train._controller.decisions import Spent
from drawbar.train._errors import TrainingFailedError
from drawbar.train._group.validators import Validator
from drawbar.train._history.events import AttemptStarted
from drawbar.train._history.result import Result
from drawbar.train._history.timeline import Snapshot
from drawbar.train._messages import Assignment, Finished, Ranks, WorkerInfo
from drawbar.train._settings.backend import BackendConfig
from drawbar.train._settings.run_config import RunConfig
from drawbar.train._storage.run_directory import RunDirectory


class Plan(Protocol):
    """What the trainer contributes to each attempt."""

    def assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[Assignment]:
        """Say what each slot is to do; datasets are sharded anew."""
        ...

    def waiting_for(self, up: int, placed: bool) -> str:
        """Say in one line what the workers that have not started are waiting for."""
        ...

    def draining(self) -> dict[str, int]:
        """Give the nodes that are about to go: id to deadline (ms since the epoch, 0 unknown)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """What does not change while a run goes on."""

    run_id: str
    directory: RunDirectory
    config: RunConfig
    backend_config: BackendConfig
    metadata: dict[str, Any]
    first_attempt: int
    checkpoint: str | None
    spent: Spent = field(default_factory=Spent)
    validator: Validator | None = None


@dataclass(frozen=True)
class Outcome:
    """How the run ended: each rank's return value, or the error; neither if the user stopped it."""

    values: dict[int, Finished] = field(default_factory=dict)
    error: TrainingFailedError | None = None


Packed = TypeVar("Packed", Carried, bytes)


@dataclass(frozen=True)
class Ending:
    """A run that is over. It has a result unless it failed."""

    outcome: Outcome
    snapshot: Snapshot
    result: Result | None

    def settle(self) -> Result:
        """Give the result with the return values, or raise why the run failed."""
        if self.outcome.error is not None:
            raise self.outcome.error
        assert self.result is not None  # it has not failed
        values = self.outcome.values
        self.result.return_values = [_unpickled(rank, values[rank]) for rank in sorted(values)]
        return self.result

    def packed(self, pack: Callable[[object], Packed]) -> Packed:
        """Pack it for a process or a file; of what users made, only what their workers packed."""
        try:
            packed = pack(self)
        except Exception:  # an error whose cause does not pickle
            error = self.outcome.error
            plain = TrainingFailedError(str(error), path=getattr(error, "path", ""))
            packed = pack(replace(self, outcome=Outcome(error=plain)))
        return packed


def _unpickled(rank: int, finished: Finished) -> Any:
    """Give a rank's return value; one that cannot be had is told, and does not fail the run."""
    if finished.value is None:
        return None  # the console has said why
    try:
        return finished.value.unpack()
    except Exception as error:
        why = f"it does not unpickle here: {error!r}"
        warnings.warn(f"the return value of rank {rank} is lost: {why}", stacklevel=5)
        return None
