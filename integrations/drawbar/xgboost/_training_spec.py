"""XGBoostTrainingSpec: train from parameters on each worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xgboost import DMatrix

from drawbar._boosting.shard import Shard
from drawbar._boosting.training_spec import TrainingSpec
from drawbar.train import ScalingConfig
from drawbar.xgboost._compat import filter_log
from drawbar.xgboost._data import build_quantile_matrix
from drawbar.xgboost._parameters import (
    PARAMETER_ALIASES,
    PERCENTILE_OBJECTIVES,
    set_num_threads,
    validate_objective_labels,
    validate_parameters,
)
from drawbar.xgboost._train import train


@dataclass(frozen=True, kw_only=True)
class XGBoostTrainingSpec(TrainingSpec):
    """Training with XGBoost that is described by parameters.

    Args:
        obj: Custom objective; see `xgboost.train`.
        custom_metric: Custom metric; see `xgboost.train`.
    """

    obj: Callable[..., Any] | None = None
    custom_metric: Callable[..., tuple[str, float]] | None = None

    @classmethod
    def get_parameter_aliases(cls) -> Mapping[str, Sequence[str]]:
        """Return names in `params` that stand for an argument: argument to names."""
        return PARAMETER_ALIASES

    @property
    def runs_user_code(self) -> bool:
        """Whether user code runs on the workers."""
        return super().runs_user_code or callable(self.obj) or callable(self.custom_metric)

    @property
    def needs_random_rows(self) -> bool:
        """True if leaf values are percentiles of a worker's rows, which XGBoost averages."""
        return self.params.get("objective") in PERCENTILE_OBJECTIVES

    def validate(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters and dataset names in the driver."""
        validate_parameters(self.params, scaling_config, has_groups=self.columns.group is not None)
        for name in self.datasets:
            if "-" in name:
                raise ValueError(
                    f"XGBoost does not support dataset names with '-', found {name!r}. Rename it."
                )

    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round."""
        params = set_num_threads({"seed_per_iteration": True, **self.params})
        feature_weights = params.pop("feature_weights", None)
        for shard in shards.values():
            validate_objective_labels(shard, self.params)
        matrices = self._matrices(shards, params)
        shards.clear()  # the matrices contain all data
        if feature_weights is not None:
            matrices["train"].set_info(feature_weights=feature_weights)
        with filter_log(_is_not_empty_message):
            train(
                params,
                matrices["train"],
                self.num_boost_round,
                evals=[(matrix, name) for name, matrix in matrices.items()],
                obj=self.obj,
                early_stopping_rounds=self.early_stopping_rounds,
                callbacks=copy.deepcopy(self.callbacks),  # callbacks have state
                custom_metric=self.custom_metric,
            )

    def _matrices(self, shards: dict[str, Shard], params: dict[str, Any]) -> dict[str, DMatrix]:
        matrices: dict[str, DMatrix] = {}
        for name, shard in shards.items():
            matrices[name] = build_quantile_matrix(
                shard,
                drop_zero_weights=name == "train" and self.needs_random_rows,
                reference=matrices.get("train"),
                max_bin=params.get("max_bin"),
                nthread=params["nthread"],
                external_memory=bool(self.external_memory),
                folder=self.storage_directory,
            )
        return matrices


def _is_not_empty_message(message: bytes) -> bool:
    """Return False for "Empty dataset at worker: 0", since a rank may have no queries."""
    return b"Empty dataset" not in message
