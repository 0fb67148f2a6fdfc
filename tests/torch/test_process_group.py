"""Tests of the process group of one worker in this process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from drawbar.torch import TorchConfig, prepare_model
from drawbar.torch._process_group import nccl_device
from drawbar.train import Result, WorkerGroupError, checkpoint_dir, report

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "ACCELERATE_TORCH_DEVICE")


def test_process_group_is_initialized_in_training_function(fit: Callable[..., Result]) -> None:
    def function() -> list[Any]:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return [dist.get_rank(), dist.get_world_size(), dist.get_backend(), float(ones)]

    assert fit(function).return_value == [0, 1, "gloo", 1.0]


def test_nccl_is_bound_to_device_of_worker() -> None:
    gpu, cpu = torch.device("cuda", 3), torch.device("cpu")
    devices = {name: nccl_device(name, gpu) for name in ("nccl", "cpu:gloo,cuda:nccl", "gloo")}
    assert devices == {"nccl": gpu, "cpu:gloo,cuda:nccl": gpu, "gloo": None}
    assert nccl_device("cpu:gloo,cuda:nccl", cpu) is None


def test_process_group_after_return_is_destroyed(
    fit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads = torch.get_num_threads()
    sockets = len(psutil.Process().net_connections())

    def function() -> Any:
        return [os.environ.get(name) for name in VARIABLES], torch.get_num_threads()

    values, threads_inside = fit(function).return_value
    assert all(values)
    assert threads_inside == 3
    assert [os.environ.get(name) for name in VARIABLES] == [None] * 4
    assert torch.get_num_threads() == threads
    assert not dist.is_initialized()
    assert len(psutil.Process().net_connections()) <= sockets  # Ray may have closed some meanwhile


def test_process_group_after_exception_is_destroyed(fit: Callable[..., Result]) -> None:
    def function() -> None:
        raise ValueError("boom")

    with pytest.raises(WorkerGroupError, match="ValueError: boom"):
        fit(function)
    assert not dist.is_initialized()
    assert "MASTER_PORT" not in os.environ


def test_process_group_with_compiled_model_and_dead_proxy_is_destroyed(
    fit: Callable[..., Result],
) -> None:
    class ForbidsClass:
        @property  # type: ignore[misc]  # `object` allows to set it
        def __class__(self) -> Any:
            raise AssertionError("an object of the user was inspected")

    def function() -> list[Any]:
        owner = torch.nn.Linear(1, 1)
        kept = [weakref.proxy(owner), ForbidsClass()]
        compile_model: Any = functools.partial(torch.compile, backend="eager")
        for model in (
            compile_model(prepare_model(torch.nn.Linear(1, 1))),
            prepare_model(compile_model(torch.nn.Linear(1, 1))),
        ):
            model(torch.ones(1, 1)).sum().backward()
        return kept

    objects = []
    for _ in range(2):
        objects.append(fit(function).return_value)
        assert not dist.is_initialized()


FAILING_AFTER_COLLECTIVE = """
import sys, torch, torch.distributed as dist
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

def function():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    sys.setswitchinterval(10)  # only blocking calls release the GIL
    for _ in range(20):
        dist.all_gather([torch.empty(1)], torch.ones(1))
    raise RuntimeError("planned failure")

config = RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=60))
scaling_config = ScalingConfig(num_workers=0)
try:
    TorchTrainer(function, scaling_config=scaling_config, run_config=config).fit()
except TrainingFailedError:
    print("failed as planned")
"""


def test_process_group_after_exception_during_release_of_collective_does_not_hang(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", FAILING_AFTER_COLLECTIVE, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    assert "failed as planned" in done.stdout


def test_process_group_with_tcp_does_not_set_master_env(
    fit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    config = TorchConfig(init_method="tcp")
    assert fit(lambda: os.environ["MASTER_PORT"], torch_config=config).return_value == "1"


@pytest.fixture
def own_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("own_group")
def test_process_group_with_existing_group_raises(fit: Callable[..., Result]) -> None:
    with pytest.raises(WorkerGroupError, match=r"Call torch.distributed.destroy_process_group\(\)"):
        fit(lambda: None)
    assert dist.is_initialized()


def test_process_group_after_failed_creation_is_named_as_in_other_processes(
    fit: Callable[..., Result],
) -> None:
    limit = timedelta(seconds=0.01)
    with pytest.raises(dist.DistStoreError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=limit)  # type: ignore[attr-defined]  # public, not in its __all__

    assert fit(lambda: dist.group.WORLD.group_name).return_value == "0"  # type: ignore[union-attr]  # it exists here


def test_torch_checkpoint_roundtrip(fit: Callable[..., Result]) -> None:
    def function() -> None:
        with checkpoint_dir() as path:
            torch.save({"weight": torch.ones(2)}, path / "model.pt")
            report({"loss": torch.tensor(0.5)}, checkpoint=path)

    result = fit(function)
    assert result.metrics == {"loss": 0.5}
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as path:
        assert torch.equal(torch.load(f"{path}/model.pt")["weight"], torch.ones(2))
