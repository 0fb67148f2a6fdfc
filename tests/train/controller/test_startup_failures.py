"""Workers that fail to start: the cause, and the wait before the next start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import pytest

from drawbar.train import (
    Backend,
    BackendConfig,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from drawbar.train._controller import decisions
from drawbar.train.backend import BackendWorkerGroup

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


@dataclass(frozen=True)
class DyingConfig(BackendConfig):
    """End each worker process before the training function starts."""

    end: Callable[[], object]

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        return self.end


def kill_with(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (partial(os._exit, 3), "exited with code 3"),
        (partial(kill_with, signal.SIGKILL), "killed by SIGKILL"),
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


class Broken(Backend):
    """Fail each start and count them."""

    starts: ClassVar[list[int]] = []

    def on_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        self.starts.append(len(self.starts))
        raise OSError("the registry does not respond")


class BrokenConfig(BackendConfig):
    backend_cls = Broken


def test_stop_while_waiting_for_next_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # If stop() did not end the wait, the test would not end either.
    monkeypatch.setattr(decisions, "STARTUP_DELAY_SECONDS", 36_000.0)
    monkeypatch.setattr(decisions, "MAX_STARTUP_DELAY_SECONDS", 36_000.0)
    monkeypatch.setattr(Broken, "starts", [])
    run = DataParallelTrainer(
        lambda: None,
        backend_config=BrokenConfig(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    output = ""
    while "Starting them again in 36000 s (startup failure 1)" not in output:
        output += capfd.readouterr().err
    assert "The workers did not start (OSError: the registry does not respond)" in output
    run.stop()
    assert run.wait().return_values == []
    assert run.status == "stopped"
    assert Broken.starts == [0]
