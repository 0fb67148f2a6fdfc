"""Tests of the diagnosis of hangs, which names the collective of torch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from drawbar.torch import TorchTrainer, prepare_model
from drawbar.train import (
    FailureConfig,
    HangError,
    Result,
    RunConfig,
    ScalingConfig,
    get_context,
    runs,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

TIMEOUT_S = 5
"""Timeout that a rank which waits for a core on a busy machine does not reach."""


def wait_without_end() -> None:
    threading.Event().wait()


def skip_all_reduce() -> None:
    """Rank 1 skips the third all-reduce."""
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            wait_without_end()
        dist.all_reduce(torch.ones(2))


def skip_backward() -> None:
    """Rank 1 skips a backward pass of DDP, which calls its collectives in C++."""
    model = prepare_model(torch.nn.Linear(1, 1))
    if dist.get_rank() == 1:
        wait_without_end()
    model(torch.ones(1, 1)).sum().backward()


def call_broadcast() -> None:
    """Rank 1 calls broadcast in place of all_reduce."""
    dist.barrier()
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.all_reduce(torch.ones(2))


def skip_in_subgroup() -> None:
    """Rank 2 skips a collective of the group of ranks 0 and 2; rank 1 waits for all."""
    group = dist.new_group([0, 2], group_desc="pair")
    if dist.get_rank() == 2:
        wait_without_end()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


def recreate_group() -> None:
    """Rank 1 never enters the first collective of a group with the name of a destroyed one."""
    group = dist.new_group([0, 1])
    for _ in range(4):
        dist.barrier(group=group)
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    if dist.get_rank() == 1:
        wait_without_end()
    dist.barrier(group=group)


HANGS = [
    (
        skip_all_reduce,
        2,
        "rank 1 never entered all_reduce #3, in which rank 0 waits "
        "(process group 0 (default_pg, gloo))",
    ),
    (skip_backward, 2, "rank 1 never entered all_reduce #"),
    (call_broadcast, 2, "rank 0 entered all_reduce #2, but rank 1 entered broadcast #2 "),
    pytest.param(
        skip_in_subgroup,
        3,
        "rank 2 never entered all_reduce #1, in which rank 0 waits (process group 1 (pair, gloo))",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        *(recreate_group, 2, "rank 1 never entered barrier #2, in which rank 0 waits "),
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("function", "num_workers", "text"), HANGS)
def test_hang_error_names_collective_and_ranks_that_never_entered_it(
    fit: Callable[..., Result], run_config: RunConfig, function: Any, num_workers: int, text: str
) -> None:
    config = replace(run_config, failure_config=FailureConfig(hang_timeout=TIMEOUT_S))
    with pytest.raises(HangError) as raised:
        fit(function, num_workers, run_config=config)
    assert text in str(raised.value)


def test_hang_error_ignores_collectives_of_earlier_attempts(
    fit: Callable[..., Result], run_config: RunConfig
) -> None:
    def function() -> None:
        is_first = get_context().get_attempt() == 0
        if is_first:
            for _ in range(3):
                dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 1:
            if is_first:
                raise ValueError("fails")
            wait_without_end()
        dist.all_reduce(torch.ones(2))

    failure_config = FailureConfig(hang_timeout=TIMEOUT_S, max_failures=1)
    with pytest.raises(HangError) as raised:
        fit(function, 2, run_config=replace(run_config, failure_config=failure_config))
    assert "rank 1 never entered all_reduce #1, in which rank 0 waits" in str(raised.value)


def test_stall_warning_names_only_the_rank_that_never_entered_the_collective(
    run_config: RunConfig, tmp_path: Path
) -> None:
    os.mkfifo(gate := tmp_path / "gate")

    def function() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            gate.read_text()
        dist.all_reduce(torch.ones(2))

    run = TorchTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=replace(run_config, failure_config=FailureConfig(stall_warning_after=TIMEOUT_S)),
    ).start()
    while not (stalled := run.stalled_ranks):
        assert not run.is_done
        threading.Event().wait(0.01)
    gate.write_text("")
    run.wait()
    text = "; rank 1 never entered all_reduce #2, in which rank 0 waits (process group 0 "
    assert list(stalled) == [1]
    assert text in stalled[1]
    events = runs.find_run(run.path).list_events()
    assert any(text in str(event) for event in events if event["event"] == "ranks_quiet")
