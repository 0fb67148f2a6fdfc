"""Tests of restarts that read a checkpoint of save_async from memory."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import psutil
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from drawbar import train
from drawbar.torch import TorchTrainer, load_state, save_async
from drawbar.train import FailureConfig, Result, RunConfig, WorkerGroupError, runs

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

Fit = Callable[..., Result]


def with_restart(run_config: RunConfig, max_failures: int = 1) -> RunConfig:
    return replace(run_config, failure_config=FailureConfig(max_failures=max_failures))


def find_writers() -> list[psutil.Process]:
    """Return the writer processes of this user's tests on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(part.endswith("writer_process.py") for part in command):
            found.append(process)
    return found


def list_reads(result: Result) -> list[tuple[int, int, str, str]]:
    """Return attempt, rank, checkpoint, and source of each read."""
    events: list[dict[str, Any]] = runs.find_run(result.path).list_events()
    return [
        (event["attempt"], event["rank"], event["name"], event["source"])
        for event in events
        if event["event"] == "checkpoint_read"
    ]


def make_state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((500_000,), float(step))}


def save(step: int) -> None:
    save_async(make_state(step), {"step": step})
    train.get_all_reported_checkpoints()  # waits for the commit


def load_step() -> int | None:
    """Load the state and check its values."""
    state = load_state()
    if state is None:
        return None
    assert torch.equal(state["weights"], make_state(state["step"])["weights"])
    return int(state["step"])


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_new_writers() -> Iterator[None]:
    """Check that each test leaves no writer process, and so no memory."""
    before = {process.pid for process in find_writers()}
    yield
    new = [process for process in find_writers() if process.pid not in before]
    assert not psutil.wait_procs(new, timeout=30)[1]  # less than `KEEP_S`


def test_tensor_mapped_from_memory_keeps_its_values_during_later_saves(
    ray_cluster: None, fit: Fit, run_config: RunConfig, patient_restarts: None
) -> None:
    def function() -> str:
        checkpoint = train.get_checkpoint()
        if checkpoint is None:
            save(0)
            if train.get_context().get_world_rank() == 1:
                kill_this_process()
            train.collective.barrier()
        assert checkpoint is not None
        with checkpoint.as_directory() as directory:
            weights = torch.load(Path(directory, "state.pt"), mmap=True)["weights"]
        for step in range(1, 4):
            save(step)
        assert torch.equal(weights, make_state(0)["weights"])
        return str(directory)

    result = fit(function, 2, run_config=with_restart(run_config))
    assert "memory" in result.return_value
    assert {source for *_, source in list_reads(result)} == {"memory"}


def test_run_and_copy_of_its_directory_do_not_read_each_others_memory(
    ray_cluster: None, run_config: RunConfig, tmp_path: Path
) -> None:
    pipes = [str(tmp_path / name) for name in ("copy_saved", "run_saved", "end")]
    for pipe in pipes:
        os.mkfifo(pipe)

    def make_trainer(
        function: Callable[[], object], name: str, resume: Literal["auto", "must"] = "must"
    ) -> TorchTrainer:
        config = with_restart(replace(run_config, name=name, resume=resume))
        return TorchTrainer(
            function, scaling_config=train.ScalingConfig(num_workers=1), run_config=config
        )

    def function() -> None:
        save(0)

    def train_in_copy() -> int:
        step = load_step()
        assert step is not None
        if step == 0:
            save(1)
            open(pipes[0], "w").close()
            open(pipes[1]).close()
            kill_this_process()
        return step

    def train_in_run() -> None:
        save(2)
        open(pipes[1], "w").close()
        open(pipes[2]).close()

    make_trainer(function, "run", "auto").fit()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = make_trainer(train_in_copy, "copy").start()
    open(pipes[0]).close()
    run = make_trainer(train_in_run, "run").start()
    result = copy.wait()
    open(pipes[2], "w").close()
    run.wait()
    assert result.return_value == 1
    assert list_reads(result)[-1] == (2, 0, "checkpoint_000001", "memory")


@pytest.mark.parametrize("killed_rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_restart_after_sigkill_reads_checkpoint_from_memory(
    ray_cluster: None, fit: Fit, tmp_path: Path, killed_rank: int
) -> None:
    def function() -> int:
        rank = train.get_context().get_world_rank()
        step = load_step()
        if step is not None:
            save(step + 1)
            return step
        save(0)
        save(1)
        train.collective.barrier()
        if rank == 0:
            checkpoint = train.get_checkpoint()
            assert checkpoint is not None
            path = Path(checkpoint.path, "state.pt")
            path.write_bytes(bytes(path.stat().st_size))  # only memory has the state
        train.collective.barrier()
        if rank == killed_rank:
            kill_this_process()
        train.collective.barrier()
        return -1

    # Of a local checkpoint, the driver also checks the content before a restart.
    filesystem = LocalFileSystem(auto_mkdir=True)
    config = RunConfig(name="run", storage_path=str(tmp_path), storage_filesystem=filesystem)
    result = fit(function, 2, run_config=with_restart(config))
    assert result.return_value == 1
    reads = sorted(list_reads(result))
    assert reads == [(1, rank, "checkpoint_000001", "memory") for rank in (0, 1)]


def test_restart_with_checkpoint_in_flight_reads_the_committed_one_from_memory(
    ray_cluster: None, fit: Fit, run_config: RunConfig
) -> None:
    def function() -> int:
        if train.get_context().get_attempt() == 0:
            save(0)
            (writer,) = psutil.Process().children()
            writer.suspend()
            save_async(make_state(1))
            kill_this_process()
        for writer in find_writers():
            writer.resume()
        step = load_step()
        assert step is not None
        return step

    result = fit(function, 1, run_config=with_restart(run_config))
    assert result.return_value == 0
    assert list_reads(result) == [(1, 0, "checkpoint_000000", "memory")]


def test_restart_never_reads_uncommitted_copy_with_the_same_report_number(
    ray_cluster: None, fit: Fit, run_config: RunConfig, patient_restarts: None
) -> None:
    def function() -> int:
        context = train.get_context()
        attempt, rank = context.get_attempt(), context.get_world_rank()
        step = load_step()
        if attempt == 0:
            save(0)
            if rank == 0:
                save_async(make_state(11))  # rank 1 does not report, so there is no commit
                save_async(make_state(12))  # waits for the files of the previous one
                kill_this_process()
            train.collective.barrier()
        assert step is not None
        if attempt == 1:
            save(1)
            train.collective.barrier()
            if rank == 1:
                kill_this_process()
            train.collective.barrier()
        return step

    result = fit(function, 2, run_config=with_restart(run_config, max_failures=2))
    assert result.return_value == 1
    assert sorted(list_reads(result)) == [
        *((1, rank, "checkpoint_000000", "storage") for rank in (0, 1)),
        *((2, rank, "checkpoint_000001", "memory") for rank in (0, 1)),
    ]


def test_restart_after_death_of_writer_reads_storage(
    ray_cluster: None, fit: Fit, run_config: RunConfig
) -> None:
    def function() -> int:
        step = load_step()
        if step is None:
            save(0)
            (writer,) = psutil.Process().children()
            writer.kill()
            writer.wait()
            kill_this_process()
        assert step is not None
        return step

    result = fit(function, 1, run_config=with_restart(run_config))
    assert result.return_value == 0
    assert list_reads(result) == [(1, 0, "checkpoint_000000", "storage")]


def test_run_in_this_process_frees_memory_at_its_end(fit: Fit, run_config: RunConfig) -> None:
    def function() -> int:
        step = load_step()
        save(0 if step is None else step + 1)
        return -1 if step is None else step

    gc.disable()  # the memory must not depend on it
    try:
        fit(function)
        assert not [each for each in find_writers() if each.ppid() == os.getpid()]
        result = fit(function)
    finally:
        gc.enable()
    assert result.return_value == 0
    assert list_reads(result) == [(1, 0, "checkpoint_000000", "storage")]


def test_failed_run_leaves_no_writer_of_killed_rank(
    ray_cluster: None, fit: Fit, run_config: RunConfig
) -> None:
    def function() -> None:
        if load_step() is not None:
            raise ValueError("after the restart")
        save(0)
        kill_this_process()

    with pytest.raises(WorkerGroupError, match="after the restart"):
        fit(function, 1, run_config=with_restart(run_config))
