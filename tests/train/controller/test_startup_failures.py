"""Workers that fail to start: the error names the cause."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import cloudpickle
import pytest

from drawbar.train import (
    BackendConfig,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


@dataclass(frozen=True)
class DyingConfig(BackendConfig):
    """End each worker process before the training function starts."""

    end: Callable[[], object]

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        return self.end


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (partial(os._exit, 3), "exited with code 3"),
        (partial(ctypes.string_at, 0), "killed by SIGSEGV"),
    ],
)
def test_worker_that_dies_at_start_raises_error_with_cause(
    run_config: RunConfig, end: Callable[[], object], cause: str
) -> None:
    trainer = DataParallelTrainer(
        lambda: None,
        backend_config=DyingConfig(end),
        run_config=replace(run_config, failure_config=FailureConfig(max_startup_failures=0)),
    )
    message = f"the workers could not start: a worker process died while it started: {cause}"
    with pytest.raises(ControllerError, match=message):
        trainer.fit()
