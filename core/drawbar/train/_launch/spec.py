"""What a trainer wants to have run, in a form that any process can host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drawbar.train._carry import Carried
from drawbar.train._group.validators import ValidationWork
from drawbar.train._settings.backend import BackendConfig
from drawbar.train._settings.data_config import DataConfig
from drawbar.train._settings.run_config import RunConfig
from drawbar.train._settings.scaling_config import ScalingConfig
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.manifest import Validation
from drawbar.train._surroundings import Surroundings

if TYPE_CHECKING:
    from ray.data import Dataset

Datasets = Mapping[str, "Dataset | Callable[[], Dataset]"]


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """All that is needed to host a run. The training function and its config are packed.

    Attributes:
        payload: A packed `Payload`, unpacked by workers only.
        trainer: The content of `trainer.pkl`, which `restore()` needs.
        settings: What a resumed run compares with its last start, key by key.
        environment: The driver's variables that the workers get.
        surroundings: The driver's.
        run_config: Has a name.
        validation, validation_defaults: If the trainer has a `validation_config`.
    """

    payload: Carried
    trainer: bytes
    settings: dict[str, Any]
    environment: dict[str, str]
    surroundings: Surroundings
    scaling_config: ScalingConfig
    run_config: RunConfig
    backend_config: BackendConfig
    dataset_config: DataConfig
    metadata: dict[str, Any]
    resume_from_checkpoint: Checkpoint | None
    validation: ValidationWork | None = None
    validation_defaults: Validation | None = None
    datasets: Datasets = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run."""
        assert self.run_config.name is not None  # the trainer has given it one
        return self.run_config.name

    def let_go(self) -> None:
        """Hold no longer what the user's functions refer to: the run is over."""
        self.payload.let_go()
        if self.validation is not None:
            self.validation.function.let_go()
