"""Shared by the tests of drawbar.xgboost: a declared training in threads, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pytest
from xgboost import Booster

from drawbar._boosting import ColumnRoles, load_shards
from drawbar.train import CheckpointConfig, FailureConfig, Result, RunConfig, get_context
from drawbar.train.testing import run_in_threads
from drawbar.xgboost import XGBoostConfig, XGBoostTrainer
from drawbar.xgboost._training_spec import XGBoostTrainingSpec

Parts = Mapping[str, Sequence[pd.DataFrame]]
"""Each rank's rows of each dataset."""


class FitInThreads(Protocol):
    """Trains on ranks in threads."""

    def __call__(
        self, parts: Parts, columns: ColumnRoles, params: dict[str, Any], **declared: Any
    ) -> tuple[Booster, Result]:
        """Return the booster and the result."""
        ...


@pytest.fixture
def fit_in_threads(tmp_path: Path) -> FitInThreads:
    """Train as `XGBoostTrainer` does, on given parts and in threads: a run takes milliseconds."""

    def train(
        parts: Parts, columns: ColumnRoles, params: dict[str, Any], **declared: Any
    ) -> tuple[Booster, Result]:
        params = {"nthread": 1, **params}
        fit = XGBoostTrainingSpec(params=params, columns=columns, datasets=tuple(parts), **declared)

        def function() -> None:
            rank = get_context().get_world_rank()
            tables = {name: pa.Table.from_pandas(parts[name][rank]) for name in parts}
            fit.train(
                load_shards(fit.datasets, columns, source=lambda name: [tables[name]], on_disk=True)
            )

        result = run_in_threads(
            function,
            num_workers=len(parts["train"]),
            backend_config=XGBoostConfig(),
            run_config=RunConfig(
                storage_path=tmp_path,
                checkpoint_config=CheckpointConfig(num_to_keep=1),
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        assert result.checkpoint is not None
        return XGBoostTrainer.get_model(result.checkpoint), result

    return train
