"""Test utilities for training functions, integrations, and failures.

The API is stable, like the rest of the package. `run_in_threads` runs a training function on
several ranks in threads of this process, without Ray, with real reports, checkpoints, collectives,
and restarts, in milliseconds. `kill_at` kills a process at a named step of a checkpoint commit, and
`check_run` checks the run directory after that. `find_fork_obstacle` tests whether this machine can
fork workers. `BackendContract` contains the tests that the backend of every integration must pass.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from drawbar._base.api import set_public_module
from drawbar._base.frames import without_internal_frames
from drawbar._base.train_function import TrainFunction
from drawbar._fork_server.fork_check import find_fork_obstacle
from drawbar._modes.run_modes import LocalMode
from drawbar._process.errors import WorkerGroupError
from drawbar._records.result import Result
from drawbar._runs.audit import check_run
from drawbar._storage import fault_points
from drawbar.train import collective
from drawbar.train._config.failure_config import FailureConfig
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._driver.run_view import RunMode
from drawbar.train._trainer import DataParallelTrainer
from drawbar.train._worker.context import get_checkpoint, get_context, report
from drawbar.train.backend import BackendConfig

__all__ = [
    "FAULT_POINTS",
    "BackendContract",
    "check_run",
    "find_fork_obstacle",
    "kill_at",
    "run_in_threads",
]

FAULT_POINTS = fault_points.POINTS
"""Steps of a checkpoint commit at which `kill_at` can stop a process, in their order."""


def kill_at(point: str, *, occurrence: int = 1, signal_number: int = signal.SIGKILL) -> None:
    """Kill this process when it reaches a step of a checkpoint commit.

    Call this in the training function for the steps of workers (`persist.*`), and in the driver for
    the steps of the controller (`commit.*`).

    Args:
        point: One of `FAULT_POINTS`.
        occurrence: n, to kill the process when it reaches the step for the n-th time.
        signal_number: Signal that the process sends to itself.

    Raises:
        ValueError: `point` is not in `FAULT_POINTS`.

    Example:
        ```python
        testing.kill_at("commit.renamed", occurrence=2)
        trainer.fit()
        ```
    """
    if point not in FAULT_POINTS:
        raise ValueError(f"point={point!r} must be one of {', '.join(FAULT_POINTS)}")
    remaining = occurrence

    def send_signal() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal_number)

    fault_points.armed_actions[point] = send_signal


def run_in_threads(
    train_loop_per_worker: TrainFunction,
    *,
    num_workers: int = 2,
    train_loop_config: dict[str, Any] | None = None,
    backend_config: BackendConfig | None = None,
    run_config: RunConfig | None = None,
    validation_config: ValidationConfig | None = None,
) -> Result:
    """Run a training function on several ranks in threads of this process, without Ray.

    Reports, checkpoints, collectives, divergence, restarts, and the `Result` are real. Process-wide
    state is shared by all ranks: environment variables, the working directory, and `print`.
    Process groups of PyTorch therefore cannot be used. XGBoost's communicator is per thread, so it
    can.

    Args:
        train_loop_per_worker: Training function, as in `DataParallelTrainer`.
        num_workers: Number of ranks, at least 1.
        train_loop_config: Argument of the training function.
        backend_config: As in `DataParallelTrainer`.
        run_config: As in `DataParallelTrainer`.
        validation_config: As in `DataParallelTrainer`.

    Returns:
        The result of the run.

    Raises:
        TrainingFailedError: The run failed, as in `fit()`.

    Example:
        ```python
        result = testing.run_in_threads(train_func, num_workers=2)
        assert result.metrics["loss"] < 1
        ```
    """
    try:
        return _ThreadTrainer(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=backend_config,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=run_config,
            validation_config=validation_config,
        ).fit()
    except Exception as error:
        raise without_internal_frames(error)  # noqa: B904  # the same error


class _ThreadTrainer(DataParallelTrainer):
    def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
        num_threads = self.scaling_config.max_workers
        return LocalMode(self.validation_config, use_caller_thread, num_threads)


class BackendContract:
    """Tests for pytest that every backend must pass. Create a subclass to run them.

    Example:
        ```python
        class TestTorch(BackendContract):
            backend_config = TorchConfig()
        ```
    """

    backend_config: BackendConfig

    def _fit(
        self,
        function: TrainFunction,
        path: Path,
        num_workers: int,
        max_failures: int = 0,
        **config: object,
    ) -> Result:
        failures = FailureConfig(max_failures=max_failures)
        return DataParallelTrainer(
            function,
            train_loop_config=config,
            backend_config=self.backend_config,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(name="contract", storage_path=path, failure_config=failures),
        ).fit()

    def test_fit_with_one_worker_runs_collectives(self, tmp_path: Path) -> None:
        """Check that a single worker is set up by the same calls."""
        assert self._fit(_gather_ranks, tmp_path, num_workers=1).return_values == [[0]]

    def test_fit_with_zero_workers_restores_environment(self, tmp_path: Path) -> None:
        """Check that `num_workers=0` is set up too and leaves the environment unchanged."""
        before = dict(os.environ)
        assert self._fit(_gather_ranks, tmp_path, num_workers=0).return_values == [[0]]
        assert dict(os.environ) == before

    def test_fit_after_sigkill_sets_up_backend_again(self, tmp_path: Path) -> None:
        """Check that two ranks communicate again after a SIGKILL, and that an error ends the run.

        If the backend has `can_reuse_processes`, the surviving process keeps its cache and is set
        up again. Otherwise, every process is new. An error on one rank ends the run, although the
        other waits.
        """
        import pytest

        is_kept = self.backend_config.backend_cls.can_reuse_processes
        with pytest.raises(WorkerGroupError) as raised:
            self._fit(_kill_then_fail_on_rank_1, tmp_path, 2, max_failures=1, is_kept=is_kept)
        first = raised.value.failures[0]
        assert (first.type_name, first.rank) == ("ZeroDivisionError", 1), first.message


def _gather_ranks() -> list[int]:
    return collective.all_gather(get_context().get_world_rank())


def _kill_then_fail_on_rank_1(config: dict[str, Any]) -> None:
    context = get_context()
    rank, is_first = context.get_world_rank(), context.get_attempt() == 0
    was_kept = "seen" in context.cache
    context.cache["seen"] = True
    assert get_checkpoint() is None
    assert _gather_ranks() == [0, 1]
    assert was_kept == (config["is_kept"] and rank == 0 and not is_first)
    report({"attempt": context.get_attempt()})
    collective.barrier()
    if rank == 1 and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        _ = 1 / 0
    collective.barrier()


set_public_module(globals())
