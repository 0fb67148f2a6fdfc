"""Tests of run modes, such as the one in docs/writing-an-integration.md."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import runs
from drawbar.train.backend import DataSource
from drawbar.train.run_modes import ProgramMode, RunMode, RunSpec, RunView, TrainLoop

PAGE = Path(__file__).parents[2] / "docs" / "writing-an-integration.md"


@pytest.fixture
def process_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the page's module, which the child processes import."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [code for code in blocks if "class ProcessMode" in code]
    directory = tmp_path / "modules"
    directory.mkdir()
    (directory / "process_mode.py").write_text(code)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, "process_mode", raising=False)
    return importlib.import_module("process_mode")


def test_docs_run_mode_runs_one_process_per_rank_until_stop(
    process_mode: Any, run_config: train.RunConfig, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)

    def function() -> list[int]:
        rank = train.get_context().get_world_rank()
        train.report({"rank": rank})
        print("rank", rank)
        if rank == 0:
            started.write_text("")  # blocks until the driver reads
        while not train.should_checkpoint():  # until the driver calls `stop`
            pass
        return [rank, os.getpid()]

    run = process_mode.ProcessTrainer(function, num_processes=2, run_config=run_config).start()
    try:
        started.read_text()
        assert run.status == "running"
        run.stop()
        result = run.wait(timeout=60)
        assert [rank for rank, _ in result.return_values] == [0, 1]
        assert len({os.getpid(), *(pid for _, pid in result.return_values)}) == 3
        assert [run.get_logs(rank) for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]
    finally:
        run._run.kill()  # otherwise, the functions might never end


def test_docs_run_mode_raises_error_of_start(
    process_mode: Any, run_config: train.RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file where the run directory should be")
    with pytest.raises(FileExistsError):
        process_mode.ProcessTrainer(print, num_processes=2, run_config=run_config).fit()


def test_launcher_run_of_killed_rank_0_has_failed(
    process_mode: Any, run_config: train.RunConfig
) -> None:
    def function() -> None:
        train.report({})  # the run has started
        if train.get_context().get_world_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        train.collective.barrier()

    run = process_mode.ProcessTrainer(function, num_processes=2, run_config=run_config).start()
    with pytest.raises(train.ControllerError, match="its journal contains no end"):
        run.wait()
    assert run.is_done
    assert run.status == "failed"
    assert runs.find_run(run.path).status == "interrupted"


def test_launcher_run_with_max_failures_names_launcher(
    process_mode: Any, run_config: train.RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        raise RuntimeError("failed")

    failures = train.FailureConfig(max_failures=2)
    run_config = replace(run_config, failure_config=failures)
    with pytest.raises(train.WorkerGroupError, match="restarts are left to your launcher"):
        process_mode.ProcessTrainer(function, num_processes=2, run_config=run_config).fit()
    assert "max_failures=2 is ignored, because your launcher" in capfd.readouterr().err


def test_launcher_run_with_in_place_recovery_raises(
    process_mode: Any, run_config: train.RunConfig
) -> None:
    failures = train.FailureConfig(max_failures=1, recovery="in_place")
    run_config = replace(run_config, failure_config=failures)
    trainer = process_mode.ProcessTrainer(print, num_processes=2, run_config=run_config)
    with pytest.raises(ValueError, match="2 processes that a launcher has started"):
        trainer.fit()


class Numbers(DataSource):
    """Distribute the numbers below 10."""

    def assign(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> list[Callable[[], dict[str, Any]]]:
        return [
            partial(lambda part: {"train": part}, range(rank, 10, len(node_ids)))
            for rank in range(len(node_ids))
        ]


def read_numbers() -> list[int]:
    return list(train.get_dataset_shard("train"))


def test_launcher_run_distributes_data_source(
    process_mode: Any, run_config: train.RunConfig
) -> None:
    trainer = process_mode.ProcessTrainer(
        read_numbers, num_processes=2, run_config=run_config, datasets=Numbers()
    )
    assert trainer.fit().return_values == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


class CountedMode:
    """Add the number of calls to the result of the training function."""

    def __init__(self, mode: RunMode) -> None:
        self.mode = mode

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        return self.mode.start(spec, train_loop.with_function(lambda: (train_loop.function(), 1)))


def test_mode_wraps_program_mode_and_changes_function(run_config: train.RunConfig) -> None:
    class Trainer(train.DataParallelTrainer):
        def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
            return CountedMode(ProgramMode(use_caller_thread=use_caller_thread))

    scaling = train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1})
    trainer = Trainer(
        read_numbers, scaling_config=scaling, run_config=run_config, datasets=Numbers()
    )
    assert trainer.fit().return_values == [([0, 2, 4, 6, 8], 1), ([1, 3, 5, 7, 9], 1)]
