"""Shared by the tests of drawbar.xgboost: a declared training in threads, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pytest
from xgboost import Booster

from drawbar.train import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    get_context,
)
from drawbar.xgboost import XGBoostConfig, XGBoostTrainer
from tests.boosting.shards import train_in_threads

Parts = Mapping[str, Sequence[pd.DataFrame]]
"""Each rank's rows of each dataset."""


class FitInThreads(Protocol):
    """Trains on ranks in threads."""

    def __call__(
        self, parts: Parts, params: dict[str, Any], name: str | None = None, **arguments: Any
    ) -> tuple[Booster, Result]:
        """Return the booster and the result. `arguments` are passed to `XGBoostTrainer`."""
        ...


def _unread() -> Any:
    raise AssertionError("the ranks read their tables themselves")


@pytest.fixture
def fit_in_threads(tmp_path: Path) -> FitInThreads:
    """Train as `XGBoostTrainer` does, on given parts and in threads: a run takes milliseconds."""

    def train(
        parts: Parts, params: dict[str, Any], name: str | None = None, **arguments: Any
    ) -> tuple[Booster, Result]:
        trainer = XGBoostTrainer(
            params={"nthread": 1, **params},
            datasets=dict.fromkeys(parts, _unread),
            scaling_config=ScalingConfig(num_workers=len(parts["train"])),
            run_config=RunConfig(
                name=name,
                storage_path=tmp_path,
                checkpoint_config=CheckpointConfig(num_to_keep=1),
                failure_config=FailureConfig(max_failures=1),
            ),
            **{"label_column": "target", **arguments},
        )

        def get_tables() -> dict[str, list[pa.Table]]:
            rank = get_context().get_world_rank()
            return {name: [pa.Table.from_pandas(frames[rank])] for name, frames in parts.items()}

        result = train_in_threads(trainer, XGBoostConfig(), get_tables)
        assert result.checkpoint is not None
        return XGBoostTrainer.get_model(result.checkpoint), result

    return train


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_boosting: None) -> None:
    """Use the fork server in all modules."""
