"""A node is lost, and its rank continues on the node of another rank."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawbar.train import runs
from tests._ray_compat import start_nodes_without_time_limits, wait_for_nodes

DriversFixture = Callable[..., Any]
NUM_WORKERS = 3
NUM_SAMPLES = 48


def train_until_node_is_lost(config: dict[str, Any]) -> None:
    """Train, and let the rank that is alone on its node wait for the loss of this node."""
    import threading

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from drawbar import train
    from drawbar.torch import prepare_data_loader, prepare_model, prepare_optimizer

    context = train.get_context()
    file = Path(config["folder"]) / f"samples_{context.get_world_rank()}"
    model: Any = prepare_model(torch.nn.Linear(1, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.arange(NUM_SAMPLES, dtype=torch.float32)[:, None]
    loader = prepare_data_loader(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
    for (samples,) in loader:
        is_second = file.exists() and len(file.read_text().splitlines()) == 1
        if is_second and context.get_local_world_size() == 1:
            marker = Path(config["folder"]) / "is_waiting"
            if not marker.exists():
                marker.touch()
                Path(config["pipe"]).write_text("waiting\n")
                threading.Event().wait()
        loss = model(samples).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with file.open("a") as stream:
            print(json.dumps(samples[:, 0].int().tolist()), file=stream)


def lose_node(folder: Path) -> None:
    """Run on two nodes, and remove one of them during a step."""
    import ray
    from ray.cluster_utils import Cluster

    from drawbar.torch import TorchTrainer
    from drawbar.train import FailureConfig, RunConfig, ScalingConfig

    start_nodes_without_time_limits()
    options = {"include_dashboard": False, "no_monitor": True, "wait": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **options})
    wait_for_nodes(cluster)
    node = cluster.add_node(num_cpus=1, wait=False)
    wait_for_nodes(cluster)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    run = TorchTrainer(
        train_until_node_is_lost,
        train_loop_config={"folder": str(folder), "pipe": str(pipe)},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(recovery="in_place", max_failures=3),
        ),
    ).start()
    assert pipe.read_text() == "waiting\n"
    cluster.remove_node(node, allow_graceful=False)
    run.wait()
    ray.shutdown()
    # Also deletes the file with its address, which other programs would use.
    cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here


def test_in_place_recovery_after_loss_of_node_continues_on_other_node(
    drivers: DriversFixture, tmp_path: Path
) -> None:
    with drivers(
        lambda: lose_node(tmp_path), RAY_ADDRESS="", RAY_gcs_server_port_wait_time_s="600"
    ) as driver:
        _, err = driver.communicate()
    assert driver.returncode == 0, err
    files = tmp_path.glob("samples_*")
    samples = [
        sample
        for file in files
        for line in file.read_text().splitlines()
        for sample in json.loads(line)
    ]
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), 1)
    kinds = Counter(event["event"] for event in runs.find_run(tmp_path / "run").list_events())
    assert (kinds["attempt_started"], kinds["recovered_in_place"]) == (1, 1), err
