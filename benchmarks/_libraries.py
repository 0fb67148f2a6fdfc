"""The two libraries that share an API, so that one training function can run on either.

A `Library` is only names until a property is read: it travels to the workers inside the training
function, and must not make a plain worker import torch, or Drawbar's worker import `ray.train`.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks._scenario import Side


@dataclass(frozen=True)
class Library:
    """Drawbar or `ray.train`, by the names of its modules."""

    side: Side
    train_module: str
    trainer_module: str
    torch_module: str

    @property
    def train(self) -> ModuleType:
        """`drawbar.train` or `ray.train`."""
        return importlib.import_module(self.train_module)

    @property
    def collective(self) -> ModuleType:
        """`drawbar.train.collective` or `ray.train.collective`."""
        return importlib.import_module(f"{self.train_module}.collective")

    @property
    def torch(self) -> ModuleType:
        """`drawbar.torch` or `ray.train.torch`."""
        return importlib.import_module(self.torch_module)

    def trainer(
        self,
        function: Callable[[], object],
        *,
        storage: Path,
        filesystem: object = None,
        workers: int | tuple[int, int] = 2,
        torch: bool = False,
        max_failures: int = 0,
        callbacks: Sequence[object] = (),
        datasets: Mapping[str, object] | None = None,
        **run_settings: object,
    ) -> Any:
        """Build a trainer that is ready for `fit()`, with a unique run name.

        All settings that are not named here stay at the library's defaults. `run_settings` are more
        settings of its `RunConfig`.
        """
        train = self.train
        home = self.torch if torch else importlib.import_module(self.trainer_module)
        trainer_class = home.TorchTrainer if torch else home.DataParallelTrainer
        return trainer_class(
            function,
            datasets=dict(datasets or {}),
            scaling_config=train.ScalingConfig(num_workers=workers),
            run_config=train.RunConfig(
                name=f"benchmark-{uuid.uuid4().hex[:8]}",
                storage_path=str(storage),
                storage_filesystem=filesystem,
                failure_config=train.FailureConfig(max_failures=max_failures),
                callbacks=list(callbacks),
                **run_settings,
            ),
        )


DRAWBAR = Library("drawbar", "drawbar.train", "drawbar.train", "drawbar.torch")
# `ray.train.data_parallel_trainer` still holds the V1 class, whose constructor raises.
RAY_TRAIN = Library(
    "ray.train", "ray.train", "ray.train.v2.api.data_parallel_trainer", "ray.train.torch"
)
