"""Tests that the backend of every integration must pass."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from drawbar._base.train_function import TrainFunction
from drawbar._handle.result import Result
from drawbar._process.errors import WorkerGroupError
from drawbar._recovery.failure_config import FailureConfig
from drawbar.train import collective
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._trainer import DataParallelTrainer
from drawbar.train._worker.context import get_checkpoint, get_context, report
from drawbar.train.backend import BackendConfig


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
