"""Nodes are lost, and their ranks continue on the node of another rank."""

from __future__ import annotations

import json
import logging
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from drawbar.train import runs
from tests._ray_compat import start_nodes_without_time_limits, wait_for_nodes

DriversFixture = Callable[..., Any]
NUM_SAMPLES = 48
LEARNING_RATE = 1e-4


def train_until_nodes_are_lost(config: dict[str, Any]) -> None:
    """Train, and let the ranks on nodes that will be lost wait for this in their second step."""
    import threading

    import ray
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from drawbar import train
    from drawbar.torch import prepare_data_loader, prepare_model, prepare_optimizer

    context = train.get_context()
    file = Path(config["folder"]) / f"samples_{context.get_world_rank()}"
    model: Any = prepare_model(torch.nn.Linear(1, 1))
    torch.nn.init.constant_(model.module.weight, 1.0)
    torch.nn.init.constant_(model.module.bias, 0.0)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    x = torch.arange(NUM_SAMPLES, dtype=torch.float32)[:, None]
    loader = prepare_data_loader(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
    is_first_node = ray.get_runtime_context().get_node_id() == config["first_node"]
    for (samples,) in loader:
        if not is_first_node and file.exists():
            with open(config["pipe"], "a") as pipe:
                print("waiting", file=pipe)
            threading.Event().wait()
        loss = model(samples).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with file.open("a") as stream:
            print(json.dumps(samples[:, 0].int().tolist()), file=stream)
    train.report({"weight": model.module.weight.item(), "bias": model.module.bias.item()})


def lose_nodes(folder: Path, workers_by_node: Sequence[int]) -> None:
    """Run on several nodes, and remove all but the first one at the same time during a step."""
    import ray
    from ray.cluster_utils import Cluster

    from drawbar.torch import TorchTrainer
    from drawbar.train import FailureConfig, RunConfig, ScalingConfig

    start_nodes_without_time_limits()
    options = {"include_dashboard": False, "no_monitor": True, "wait": False}
    first, *others = workers_by_node
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": first, **options})
    wait_for_nodes(cluster)
    nodes = [cluster.add_node(num_cpus=num_workers, wait=False) for num_workers in others]
    wait_for_nodes(cluster)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    run = TorchTrainer(
        train_until_nodes_are_lost,
        train_loop_config={
            "folder": str(folder),
            "pipe": str(pipe),
            "first_node": ray.get_runtime_context().get_node_id(),
        },
        scaling_config=ScalingConfig(num_workers=sum(workers_by_node)),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            # Lost nodes do not count in it.
            failure_config=FailureConfig(recovery="in_place", max_failures=1),
        ),
    ).start()
    with os.fdopen(os.open(pipe, os.O_RDWR)) as stream:  # does not end between two writers
        assert [stream.readline() for _ in range(sum(others))] == ["waiting\n"] * sum(others)
    for node in nodes:
        for raylet in node.all_processes["raylet"]:
            raylet.process.kill()
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)
    run.wait()
    ray.shutdown()
    # Also deletes the file with its address, which other programs would use.
    cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here


@pytest.mark.parametrize(
    "workers_by_node",
    [
        pytest.param((2, 1), marks=pytest.mark.nightly, id="one_of_two"),
        pytest.param((1, 2, 1), id="all_but_one"),
    ],
)
def test_in_place_recovery_after_loss_of_nodes_continues_on_other_node(
    drivers: DriversFixture, tmp_path: Path, workers_by_node: tuple[int, ...]
) -> None:
    with drivers(
        lambda: lose_nodes(tmp_path, workers_by_node),
        RAY_ADDRESS="",
        RAY_gcs_server_port_wait_time_s="600",
    ) as driver:
        _, err = driver.communicate()
    assert driver.returncode == 0, err
    steps = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in tmp_path.glob("samples_*")
    ]
    samples = [sample for rank in steps for step in rank for sample in step]
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), 1)
    run = runs.find_run(tmp_path / "run")
    events: list[dict[str, Any]] = run.list_events()
    assert [event["event"] for event in events].count("attempt_started") == 1, err
    recovered: list[dict[str, Any]] = [
        event for event in events if event["event"] == "recovered_in_place"
    ]
    assert len({rank for event in recovered for rank in event["ranks"]}) == sum(workers_by_node[1:])
    weight, bias = train_in_one_process(zip(*steps, strict=True))
    assert run.metrics == pytest.approx({"weight": weight, "bias": bias}, rel=1e-5)


def train_in_one_process(steps: Iterable[Sequence[Sequence[int]]]) -> tuple[float, float]:
    """Return the weight and bias after steps with these samples of all ranks."""
    weight, bias = 1.0, 0.0
    for step in steps:
        samples = [sample for rank in step for sample in rank]
        slopes = [2 * (weight * sample + bias) / len(samples) for sample in samples]
        weight -= LEARNING_RATE * sum(map(operator.mul, slopes, samples))
        bias -= LEARNING_RATE * sum(slopes)
    return weight, bias
