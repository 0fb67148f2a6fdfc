"""Tests of drawbar.train._worker.context."""

from __future__ import annotations

import pytest
import ray

from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train.backend import get_node_address, get_worker_address


def _get_addresses() -> tuple[str, str]:
    return get_worker_address(), get_node_address()


@pytest.mark.usefixtures("ray_cluster")
def test_worker_address_on_one_node_is_loopback(run_config: RunConfig) -> None:
    trainer = DataParallelTrainer(
        _get_addresses, scaling_config=ScalingConfig(num_workers=2), run_config=run_config
    )
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
    assert trainer.fit().return_value == ("127.0.0.1", node["NodeManagerAddress"])


def test_worker_address_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError):
        get_worker_address()
