"""Tests of save_async and load_state."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from drawbar import train
from drawbar.torch import load_state, prepare_model, save_async
from drawbar.train import (
    Checkpoint,
    CheckpointError,
    FailureConfig,
    Result,
    RunConfig,
    StorageError,
    WorkerGroupError,
)
from drawbar.train.testing import check_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

Fit = Callable[..., Result]


def read(checkpoint: Checkpoint | None) -> dict[str, Any]:
    assert checkpoint is not None
    checkpoint.verify()
    state: dict[str, Any] = torch.load(Path(checkpoint, "state.pt"))
    return state


def list_steps(result: Result) -> list[int]:
    return [read(checkpoint)["step"] for checkpoint, _ in result.best_checkpoints]


def with_restart(run_config: RunConfig) -> RunConfig:
    return replace(run_config, failure_config=FailureConfig(max_failures=1))


def find_writer() -> psutil.Process:
    """Return the process that writes the checkpoints of this rank."""
    children = psutil.Process().children()
    (writer,) = [each for each in children if is_writer(each)]
    return writer


def is_writer(process: psutil.Process) -> bool:
    return any(part.endswith("writer_process.py") for part in process.cmdline())


def save(step: int) -> float:
    """Save a state, and change it immediately."""
    weights = torch.full((500_000,), float(step))
    stall = save_async({"step": step, "weights": weights}, {"step": step})
    weights.fill_(-1)
    return stall


@pytest.mark.parametrize("num_workers", [0, 2])
def test_save_async_keeps_values_of_the_call(ray_cluster: None, fit: Fit, num_workers: int) -> None:
    def function() -> list[float]:
        return [save(step) for step in range(5)]

    result = fit(function, num_workers)
    states = [read(checkpoint) for checkpoint, _ in result.best_checkpoints]
    assert [state["step"] for state in states] == [0, 1, 2, 3, 4]
    for state in states:
        assert torch.equal(state["weights"], torch.full((500_000,), float(state["step"])))
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0, 1, 2, 3, 4]
    assert all(stall > 0 for stall in result.return_value)
    assert result.goodput.parts["checkpoint_blocked"] > 0


def test_save_async_of_ddp_model_resumes(ray_cluster: None, fit: Fit) -> None:
    def function() -> tuple[int, list[torch.Tensor]]:
        model = prepare_model(nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        start, state = 0, load_state()
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start = state["step"] + 1
        saved = [value.detach().clone() for value in model.parameters()]
        for step in range(start, start + 2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            save_async(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                },
                {"step": step},
            )
        return start, saved

    first = fit(function, 2)
    weights = read(first.checkpoint)["model"].values()
    start, loaded = fit(function, 2).return_value
    assert start == 2
    for value, expected in zip(loaded, weights, strict=True):
        assert torch.equal(value, expected)


def test_save_async_of_fsdp_model_resumes_with_other_number_of_workers(
    ray_cluster: None, fit: Fit
) -> None:
    def function() -> tuple[int, Any, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters())

        def get_state(step: int = -1) -> dict[str, Any]:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            return {"model": model_state, "optimizer": optimizer_state, "step": step}

        def get_values() -> list[torch.Tensor]:
            return [value.full_tensor().clone() for value in get_state(0)["model"].values()]

        state, start = load_state(get_state), 0
        assert bool(optimizer.state) == (state is not None)  # otherwise, Adam would count a step
        if state is not None:
            start = state["step"] + 1
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        loaded = get_values()
        for step in range(start, start + 2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            save_async(get_state(step), {"step": step})
            saved = get_values()
            with torch.no_grad():
                for value in model.parameters():
                    value.zero_()
        return start, loaded, saved

    _, _, saved = fit(function, 2).return_value
    start, loaded, _ = fit(function, 1).return_value
    assert start > 0
    for value, expected in zip(loaded, saved, strict=True):
        assert torch.equal(value, expected)


def test_save_async_with_killed_writer_raises_and_restarts_from_commit(
    ray_cluster: None, fit: Fit, run_config: RunConfig
) -> None:
    def function() -> int:
        state = load_state()
        start = 0 if state is None else state["step"] + 1
        for step in range(start, 4):
            save(step)
            if start == 0:
                train.get_all_reported_checkpoints()  # waits for the commit of this step
                writer = find_writer()
                writer.suspend()
                save(step + 1)
                writer.kill()
        return start

    result = fit(function, 1, run_config=with_restart(run_config))
    assert result.return_value == 1
    assert list_steps(result) == [0, 1, 2, 3]
    check_run(Path(result.path))


def test_save_async_with_killed_writer_fails_at_end_of_function(
    ray_cluster: None, fit: Fit
) -> None:
    def function() -> None:
        save(0)
        train.get_all_reported_checkpoints()
        writer = find_writer()
        writer.suspend()
        save(1)
        writer.kill()

    with pytest.raises(WorkerGroupError, match="killed by SIGKILL") as caught:
        fit(function, 1)
    assert isinstance(caught.value.worker_failures[0], CheckpointError)


def test_save_async_with_full_disk_fails_at_next_save(
    ray_cluster: None, fit: Fit, run_config: RunConfig
) -> None:
    def function() -> None:
        save(0)
        train.get_all_reported_checkpoints()
        # Every write beyond 100 kB fails, like on a full disk or with a quota.
        resource.prlimit(find_writer().pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
        save(1)
        save(2)

    with pytest.raises(WorkerGroupError, match="File too large") as caught:
        fit(function, 1)
    assert isinstance(caught.value.worker_failures[0], StorageError)


def test_report_after_failed_save_async_raises(ray_cluster: None, fit: Fit) -> None:
    def report_until_error() -> None:
        while True:
            train.report({})
            train.get_all_reported_checkpoints(timeout_s=0.1)  # there is no second commit

    def function() -> None:
        save(0)
        train.get_all_reported_checkpoints()
        resource.prlimit(find_writer().pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
        save(1)
        with pytest.raises(StorageError, match="File too large"):
            report_until_error()

    result = fit(function, 1)
    assert list_steps(result) == [0]


def test_save_async_uploads_to_remote_storage(fit: Fit, tmp_path: Path) -> None:
    def function() -> None:
        for step in range(3):
            save(step)

    filesystem = LocalFileSystem(auto_mkdir=True)
    config = RunConfig(name="run", storage_path=str(tmp_path), storage_filesystem=filesystem)
    result = fit(function, run_config=config)
    for number, (checkpoint, _) in enumerate(result.best_checkpoints):
        checkpoint.verify()
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        assert torch.equal(state["weights"], torch.full((500_000,), float(number)))


def test_save_async_with_killed_rank_leaves_only_committed_checkpoints(
    ray_cluster: None, fit: Fit, run_config: RunConfig
) -> None:
    def function() -> tuple[int, int]:
        state = load_state()
        if state is not None:
            save(state["step"] + 1)
            return state["step"], os.getpid()
        save(0)
        train.get_all_reported_checkpoints()
        if train.get_context().get_world_rank() == 0:
            writer = find_writer()
            writer.suspend()
            save(1)
            os.kill(os.getpid(), signal.SIGKILL)
        save(1)
        train.collective.barrier()  # until rank 0 is dead
        return -1, 0

    result = fit(function, 2, run_config=with_restart(run_config))
    assert result.return_value[0] == 0
    assert list_steps(result) == [0, 1]
    check_run(Path(result.path))


def test_save_async_after_restart_reuses_writer_of_survivor(
    ray_cluster: None, fit: Fit, run_config: RunConfig, patient_restarts: None
) -> None:
    def function() -> tuple[int, int] | None:
        context = train.get_context()
        save(0)
        train.get_all_reported_checkpoints()  # then the writer runs
        if context.get_world_rank() == 0:
            context.cache.setdefault("writer", find_writer().pid)
        if context.get_attempt() == 0:
            train.collective.barrier()
            if context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            train.collective.barrier()
        if context.get_world_rank() > 0:
            return None
        return context.cache["writer"], find_writer().pid

    first, second = fit(function, 2, run_config=with_restart(run_config)).return_value
    assert first == second


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (nn.Linear(1, 1), "must be a dict, found Linear"),
        ({"model": nn.Linear(1, 1)}, r"state\['model'\], a Linear. Pass its state_dict\(\)"),
    ],
)
def test_save_async_rejects_modules(fit: Fit, state: Any, message: str) -> None:
    def function() -> None:
        with pytest.raises(TypeError, match=message):
            save_async(state)

    fit(function)


def test_load_state_of_other_checkpoint_raises(fit: Fit) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("x")
            train.report({}, checkpoint=path)
        with pytest.raises(FileNotFoundError, match="save_async"):
            load_state()

    fit(function)


def test_train_save_async_is_the_function_of_the_integration() -> None:
    assert train.save_async is save_async


def test_save_async_with_metrics_that_are_no_dict_names_its_argument() -> None:
    metrics: Any = 5
    with pytest.raises(TypeError, match=r"save_async\(state, metrics\) takes a dict .*, found 5"):
        save_async({"step": 1}, metrics)
