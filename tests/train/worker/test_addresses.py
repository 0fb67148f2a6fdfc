"""An integration learns under which address others reach its worker and its node."""

from __future__ import annotations

import pytest
import ray

from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train.backend import get_node_address, get_worker_address


def _addresses() -> tuple[str, str]:
    return get_worker_address(), get_node_address()


@pytest.mark.usefixtures("ray_cluster")
def test_workers_of_one_node_meet_on_the_loopback(run_config: RunConfig) -> None:
    trainer = DataParallelTrainer(
        _addresses, scaling_config=ScalingConfig(num_workers=2), run_config=run_config
    )
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
    assert trainer.fit().return_value == ("127.0.0.1", node["NodeManagerAddress"])


def test_there_is_no_worker_address_outside_a_training_function() -> None:
    with pytest.raises(RuntimeError):
        get_worker_address()
