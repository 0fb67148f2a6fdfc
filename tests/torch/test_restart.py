"""Tests of a restart after a rank dies while the other one is in the backward pass of DDP.

An interrupted and an uninterrupted run use the same function. Its first attempt records the
resources that the second attempt must not find.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import TorchTrainer, prepare_data_loader, prepare_model
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig

EPOCHS = 2
FATAL_EPOCH = 1


@dataclass(frozen=True)
class Process:
    """Resources of an attempt in the process of one rank."""

    pid: int
    store: int  # port at which the ranks meet
    children: frozenset[int]
    ports: frozenset[int]  # on which it listens

    @staticmethod
    def look() -> Process:
        own = psutil.Process()
        listening = [each for each in own.net_connections("tcp") if each.status == "LISTEN"]
        return Process(
            own.pid,
            int(os.environ["MASTER_PORT"]),
            frozenset(child.pid for child in own.children(recursive=True)),
            frozenset(each.laddr.port for each in listening),
        )


@dataclass(frozen=True)
class Trained:
    """Result of a rank: its last weights, and its process in the first attempt and now."""

    weights: torch.Tensor
    first: Process
    second: Process
    old_group_is_gone: bool


def training(folder: Path, *, dies: bool) -> Callable[[], Trained]:
    """Make a function that trains on loader processes; rank 1 dies in the middle of an epoch."""

    def function() -> Trained:
        context = train.get_context()
        found = Process.look()
        old_group = context.cache.get("group", lambda: None)
        model = prepare_model(network())
        loader: Any = prepare_data_loader(data())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(load(model, optimizer), EPOCHS):
            loader.sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = (model(x) - y).pow(2).mean()
                if dies and context.get_attempt() == 0 and (epoch, number) == (FATAL_EPOCH, 2):
                    context.cache["first"] = Process.look()
                    context.cache["group"] = weakref.ref(dist.group.WORLD)
                    one_dies(folder / "in_backward")
                loss.backward()
                optimizer.step()
            save(epoch, model, optimizer)
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        first = context.cache.get("first", found)
        return Trained(weights, first, found, old_group() is None)

    return function


def one_dies(meeting: Path) -> None:
    """Kill rank 1 when rank 0 is about to start its backward pass."""
    with meeting.open("w" if train.get_context().get_world_rank() == 0 else "r"):
        pass  # a FIFO opens when both ends are there
    if train.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data() -> DataLoader[Any]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True, num_workers=1
    )


def save(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with train.checkpoint_dir() as path:
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path / "state.pt")
        train.report({"epoch": epoch}, checkpoint=path)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the epoch to resume from."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    state = torch.load(Path(checkpoint, "state.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"]) + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restart")
    os.mkfifo(folder / "in_backward")
    return folder


def fit(folder: Path, name: str, *, dies: bool) -> Result:
    config = RunConfig(name=name, storage_path=folder)
    return TorchTrainer(
        training(folder, dies=dies),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=replace(config, failure_config=FailureConfig(max_failures=1)),
    ).fit()


@pytest.fixture(scope="module")
def interrupted(ray_cluster: None, patient_restarts: None, folder: Path) -> list[Trained]:
    result = fit(folder, "interrupted", dies=True)
    assert [each.world_size for each in result.timeline.attempts] == [2, 2]
    return result.return_values


def test_restart_after_sigkill_yields_same_weights(
    interrupted: list[Trained], folder: Path
) -> None:
    for with_it, without in zip(
        interrupted, fit(folder, "whole", dies=False).return_values, strict=True
    ):
        assert torch.equal(with_it.weights, without.weights)


def test_restart_during_backward_keeps_surviving_process(interrupted: list[Trained]) -> None:
    survivor, replacement = interrupted
    assert survivor.first.pid == survivor.second.pid
    assert replacement.first == replacement.second  # it knows nothing of the attempt before


def test_restart_ends_loader_processes_of_old_attempt(interrupted: list[Trained]) -> None:
    survivor, replacement = interrupted
    assert survivor.first.children
    assert not survivor.second.children
    assert not replacement.second.children


def test_restart_destroys_process_group_of_old_attempt(interrupted: list[Trained]) -> None:
    survivor, replacement = interrupted
    assert survivor.old_group_is_gone
    assert survivor.second.store == replacement.second.store != survivor.first.store


def test_restart_closes_ports_of_old_attempt(interrupted: list[Trained]) -> None:
    survivor, _ = interrupted
    assert survivor.first.store in survivor.first.ports - survivor.second.ports
    assert len(survivor.second.ports) == len(survivor.first.ports)
