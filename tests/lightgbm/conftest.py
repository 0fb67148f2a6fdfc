"""Train with LightGBM on ranks in threads, or on Ray where a process or Ray Data plays a part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray

from drawbar.lightgbm import LightGBMConfig, LightGBMTrainer
from drawbar.train import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    get_context,
)
from drawbar.train.testing import run_in_threads
from tests.boosting.shards import train_in_threads

Frames = dict[str, pd.DataFrame]


@pytest.fixture(autouse=True)
def no_rank_left_behind() -> Iterator[None]:
    """A rank that trained on with a dead one would never end, and hold a core for all that time."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("rank-"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """`fit(function, num_workers=2, max_failures=0, name="fit")`, in threads, in milliseconds."""

    def fit(
        function: Any, num_workers: int = 2, max_failures: int = 0, name: str = "fit"
    ) -> Result:
        return run_in_threads(
            function,
            num_workers=num_workers,
            backend_config=LightGBMConfig(),
            run_config=RunConfig(
                name=name,
                storage_path=tmp_path,
                failure_config=FailureConfig(max_failures=max_failures),
            ),
        )

    return fit


@pytest.fixture
def fit_on_ray(run_config: RunConfig, ray_cluster: None) -> Callable[..., Result]:
    """`fit_on_ray(function, num_workers=2, max_failures=0, **options)`, which are the trainer's."""

    def fit(function: Any, num_workers: int = 2, max_failures: int = 0, **options: Any) -> Result:
        config = RunConfig(
            name=run_config.name,
            storage_path=run_config.storage_path,
            failure_config=FailureConfig(max_failures=max_failures),
        )
        workers = {"scaling_config": ScalingConfig(num_workers=num_workers)}
        return LightGBMTrainer(function, **{"run_config": config, **workers, **options}).fit()

    return fit


def _unread() -> Any:
    raise AssertionError("the ranks read their tables themselves")


@pytest.fixture
def declare(tmp_path: Path) -> Callable[..., Result]:
    """`declare(params, train, validation=None, **options)`: train like the trainer, in threads.

    The frames are cut into consecutive parts that differ by one row, as the trainer cuts datasets.
    """

    def declare(
        params: dict[str, Any],
        train: pd.DataFrame,
        validation: pd.DataFrame | None = None,
        *,
        num_workers: int = 2,
        name: str = "declared",
        max_failures: int = 0,
        validation_config: ValidationConfig | None = None,
        **declared: Any,
    ) -> Result:
        datasets = frames(train, validation)
        trainer = LightGBMTrainer(
            params={"num_threads": 1, **params},
            label_column="y",
            datasets=dict.fromkeys(datasets, _unread),
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name=name,
                storage_path=tmp_path,
                failure_config=FailureConfig(max_failures=max_failures),
            ),
            validation_config=validation_config,
            **{"num_boost_round": 15, **declared},
        )

        def get_tables() -> dict[str, list[pa.Table]]:
            rank, size = get_context().get_world_rank(), get_context().get_world_size()
            return {name: [table(part(frame, rank, size))] for name, frame in datasets.items()}

        return train_in_threads(trainer, LightGBMConfig(), get_tables)

    return declare


@pytest.fixture
def declare_on_ray(run_config: RunConfig, ray_cluster: None) -> Callable[..., Result]:
    """`declare_on_ray(params, train, validation=None, num_workers=2, **options)`."""

    def declare(
        params: dict[str, Any],
        train: pd.DataFrame,
        validation: pd.DataFrame | None = None,
        num_workers: int = 2,
        **options: Any,
    ) -> Result:
        data = {
            name: ray.data.from_pandas(each) for name, each in frames(train, validation).items()
        }
        defaults = {"label_column": "y", "num_boost_round": 15, "run_config": run_config}
        return LightGBMTrainer(
            params={"num_threads": 1, **params},
            datasets=data,
            scaling_config=ScalingConfig(num_workers=num_workers),
            **{**defaults, **options},
        ).fit()

    return declare


def frames(train: pd.DataFrame, validation: pd.DataFrame | None) -> Frames:
    return {"train": train} if validation is None else {"train": train, "valid": validation}


def part(frame: pd.DataFrame, rank: int, size: int) -> pd.DataFrame:
    rows = np.array_split(np.arange(len(frame)), size)[rank]
    return frame.iloc[rows]


def table(frame: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(frame, preserve_index=False)


@pytest.fixture(scope="session")
def binary() -> tuple[Any, Any]:
    """Create 2000 rows of 6 features with 21 values each, and noisy labels."""
    random = np.random.default_rng(0)
    x = random.integers(0, 21, (2000, 6)).astype(np.float32)
    y = (x[:, 0] + 2 * x[:, 1] + random.normal(0, 6, 2000) > 30).astype(np.float32)
    return x, y


@pytest.fixture(scope="session")
def ndcg_at_3() -> Callable[..., float]:
    """LightGBM's own value of given scores, for one process: of a round that changes no score."""

    def nothing(predicted: Any, data: Any) -> tuple[Any, Any]:
        return np.zeros_like(predicted), np.ones_like(predicted)

    def ndcg(scores: Any, x: Any, y: Any, sizes: Any) -> float:
        params = {"objective": nothing, "metric": "ndcg", "ndcg_eval_at": [3], "verbosity": -1}
        data = lightgbm.Dataset(x, y, group=sizes, init_score=scores)
        booster = lightgbm.train(params, data, 1, valid_sets=[data], valid_names=["all"])
        return float(booster.best_score["all"]["ndcg@3"])

    return ndcg


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_boosting: None) -> None:
    """Use the fork server in all modules."""
