"""Runs that save numbers in checkpoints, and functions that validate them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConsistencyMode,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

COMMITTED = CheckpointConsistencyMode.COMMITTED
PENDING = "PENDING_VALIDATION"


def fit(
    function: Callable[[], Any],
    storage_path: Path,
    validation_config: ValidationConfig | None,
    num_workers: int = 0,
    **run_config: Any,
) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="run", storage_path=storage_path, **run_config),
        validation_config=validation_config,
    ).fit()


def save(number: int, validation: Any = True, **options: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "number").write_text(str(number))
        train.report({"number": number}, checkpoint=path, validation=validation, **options)


def save_with(*fn_kwargs: dict[str, Any]) -> Callable[[], list[str]]:
    """Return a function that saves once with each of these arguments and returns the statuses."""

    def function() -> list[str]:
        for number, kwargs in enumerate(fn_kwargs):
            save(number, ValidationTaskConfig(kwargs))
        return statuses()

    return function


def statuses(*arguments: Any) -> list[str]:
    checkpoints = train.get_all_reported_checkpoints(*arguments)
    return [checkpoint.status.name for checkpoint in checkpoints]


def number_in(checkpoint: Checkpoint) -> int:
    return int((Path(checkpoint) / "number").read_text())


def squared(checkpoint: Checkpoint, plus: float = 0) -> dict[str, Any]:
    return {"square": number_in(checkpoint) ** 2 + plus}


def wait_forever() -> NoReturn:
    while True:
        threading.Event().wait(0.01)


def manifests(storage_path: Path) -> list[train.Manifest]:
    best_checkpoints = Result.from_path(storage_path / "run").best_checkpoints
    optional = [checkpoint.manifest for checkpoint, _ in best_checkpoints]
    return [manifest for manifest in optional if manifest is not None]


class Gate:
    """Block any process that waits for it until another process opens it."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path

    def wait(self) -> None:
        self._path.read_text()

    def open(self) -> None:
        self._path.write_text("")  # blocks until a process waits
