"""A run as the controller gets it and gives it back: what stays, the plan, the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from drawbar.train._config import RunConfig
from drawbar.train._decide import Spent
from drawbar.train._errors import TrainingFailedError
from drawbar.train._journal import AttemptStarted
from drawbar.train._messages import Finished, Ranks, WorkerInfo
from drawbar.train._session import Assignment
from drawbar.train._storage import RunDirectory
from drawbar.train._validator import Validator
from drawbar.train.backend import BackendConfig


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
