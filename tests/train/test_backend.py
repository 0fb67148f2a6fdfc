"""Tests of backend hooks and of the contract for the backend without a framework."""

from __future__ import annotations

import fcntl
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawbar.train import (
    Backend,
    BackendConfig,
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_context,
)
from drawbar.train.backend import BackendWorkerGroup
from drawbar.train.testing import BackendContract

pytestmark = pytest.mark.usefixtures("ray_cluster")


class TestPlainBackend(BackendContract):
    backend_config = BackendConfig()


def _set_tracker(value: str) -> None:
    os.environ["TRACKER"] = value


class _Tracker(Backend):
    def on_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        pids = worker_group.execute(os.getpid)
        assert len(pids) == len(worker_group) == 2
        assert worker_group.execute_single(1, os.getpid) == pids[1]
        for rank in range(2):
            worker_group.execute_single(rank, _set_tracker, f"{rank} of 2")

    def on_training_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        assert len(worker_group.execute_async(os.getpid)) == 2
        assert worker_group.execute(os.getenv, "TRACKER") == ["0 of 2", "1 of 2"]

    def on_shutdown(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        backend_config.path.append(worker_group.execute(os.getenv, "TRACKER"))


@dataclass(frozen=True)
class _TrackerConfig(BackendConfig):
    path: list[Any]

    @property
    def backend_cls(self) -> type[Backend]:
        return _Tracker


def test_backend_hooks_run_on_workers_in_rank_order(run_config: RunConfig) -> None:
    shutdowns: list[Any] = []
    result = DataParallelTrainer(
        lambda: os.environ["TRACKER"],
        backend_config=_TrackerConfig(shutdowns),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config,
    ).fit()
    assert result.return_values == ["0 of 2", "1 of 2"]
    assert shutdowns == [["0 of 2", "1 of 2"]]


_setups: list[int] = []  # of this process


@dataclass(frozen=True)
class _PreparedConfig(BackendConfig):
    @property
    def process_setup_hook(self) -> Callable[[], object]:
        return partial(_prepare, os.getpid())


def _prepare(driver: int) -> None:
    with pytest.raises(RuntimeError):
        get_context()
    assert os.getpid() != driver
    _setups.append(os.getpid())


def test_process_setup_hook_runs_once_per_process(run_config: RunConfig, tmp_path: Path) -> None:
    def function() -> int:
        assert importlib.import_module(__name__)._setups == [os.getpid()]
        if get_context().get_world_rank() == 0 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            os._exit(1)
        if not (tmp_path / "kept").exists():
            (tmp_path / "kept").write_text(str(os.getpid()))
            raise ValueError
        return os.getpid()

    result = DataParallelTrainer(
        function,
        backend_config=_PreparedConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=replace(
            run_config,
            failure_config=FailureConfig(max_failures=3, stop_when_deterministic=False),
        ),
    ).fit()
    assert result.return_values is not None
    assert int((tmp_path / "kept").read_text()) in result.return_values


@dataclass(frozen=True)
class _UnpreparedConfig(BackendConfig):
    @property
    def process_setup_hook(self) -> Callable[[], object]:
        return partial(importlib.import_module, "there_is_no_such_module")


def test_process_setup_hook_that_raises_fails_the_start(run_config: RunConfig) -> None:
    trainer = DataParallelTrainer(
        lambda: None, backend_config=_UnpreparedConfig(), run_config=run_config
    )
    with pytest.raises(ControllerError, match="No module named 'there_is_no_such_module'"):
        trainer.fit()


class _Broken(Backend):
    def on_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        raise ValueError("the tracker has no address")


class _BrokenConfig(BackendConfig):
    backend_cls = _Broken


def test_backend_on_start_that_raises_fails_the_start(run_config: RunConfig) -> None:
    trainer = DataParallelTrainer(
        lambda: None,
        backend_config=_BrokenConfig(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    with pytest.raises(ControllerError, match="the tracker has no address"):
        trainer.fit()


def _pass(gate: Path) -> None:
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


@dataclass(frozen=True)
class _SlowConfig(BackendConfig):
    gate: Path
    """A file; no process is up while it is locked."""

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        return partial(_pass, self.gate)


def test_console_during_worker_startup_shows_number_of_started_processes(
    run_config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        run = DataParallelTrainer(
            lambda: None,
            backend_config=_SlowConfig(tmp_path / "gate"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=run_config,
        ).start()
        output = ""
        while "starting 2 workers, 0 of them are ready" not in output:
            output += capfd.readouterr().err
    run.wait()
    assert "waiting for" not in output
