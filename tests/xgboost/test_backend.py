"""XGBoost's tracker and communicator."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from xgboost import collective

from drawbar.train import RunConfig, get_context
from drawbar.train.testing import BackendContract, run_in_threads
from drawbar.xgboost import XGBoostConfig


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
class TestContract(BackendContract):
    backend_config = XGBoostConfig()


def ranks() -> tuple[int, int, float]:
    total = collective.allreduce(np.array([get_context().get_world_rank()]), collective.Op.SUM)
    return collective.get_rank(), collective.get_world_size(), float(total[0])


def test_xgboosts_ranks_are_those_of_the_run(run_config: RunConfig) -> None:
    result = run_in_threads(
        ranks, num_workers=4, backend_config=XGBoostConfig(), run_config=run_config
    )
    assert result.return_values == [(rank, 4, 6.0) for rank in range(4)]


class Group:
    """Two workers, as the backend sees them."""

    def __init__(self) -> None:
        self.tracker_args: dict[str, Any] = {}

    def __len__(self) -> int:
        return 2

    def execute(self, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
        self.tracker_args = arguments
        return []


def test_concurrent_trackers_use_distinct_ports() -> None:
    def meet(number: int) -> list[float]:
        group, config = Group(), XGBoostConfig()
        backend: Any = config.backend_cls()
        backend.on_start(group, config)

        def join(rank: int) -> float:
            with collective.CommunicatorContext(**group.tracker_args, dmlc_task_id=f"{rank:08d}"):
                own = np.array([float(number)])
                return float(collective.allreduce(own, collective.Op.SUM)[0])

        with ThreadPoolExecutor(2) as workers:
            sums = list(workers.map(join, range(2)))
        backend.on_shutdown(group, config)
        return sums

    with ThreadPoolExecutor(20) as trainers:
        met = list(trainers.map(meet, range(20)))
    assert met == [[2.0 * number] * 2 for number in range(20)]


def test_config_with_invalid_arguments_raises() -> None:
    with pytest.raises(ValueError, match="'federated'"):
        XGBoostConfig(xgboost_communicator="federated")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive and finite, found 0"):
        XGBoostConfig(timeout_s=0)
    with pytest.raises(TypeError, match="timeout_s must be seconds or a timedelta"):
        XGBoostConfig(timeout_s="1")  # type: ignore[arg-type]


def test_communicator_does_not_log_the_rank_of_each_task(
    capfd: pytest.CaptureFixture[str], run_config: RunConfig
) -> None:
    run_in_threads(ranks, num_workers=2, backend_config=XGBoostConfig(), run_config=run_config)
    output = capfd.readouterr()
    assert "got rank" not in output.out + output.err
