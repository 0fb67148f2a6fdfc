"""The declarative form for XGBoost: checks of the parameters, and the training itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xgboost import DMatrix

from drawbar._boosting import Fit, Shard, check_label, warn_of_threads, worker_threads
from drawbar.train import ScalingConfig
from drawbar.xgboost._data import quantile_matrix
from drawbar.xgboost._loop import train

_LABELS: dict[str, dict[str, Any]] = {
    "binary:logistic": {"low": 0, "high": 1},
    "binary:logitraw": {"low": 0, "high": 1},
    "binary:hinge": {"low": 0, "high": 1, "whole_numbers": True},
    "reg:logistic": {"low": 0, "high": 1},
    "count:poisson": {"low": 0},
    "reg:gamma": {"low": 0},
    "reg:tweedie": {"low": 0},
    "rank:map": {"low": 0, "high": 1, "whole_numbers": True},
}
"""What labels an objective takes, where it does not take all."""

_THREADS = ("nthread", "n_jobs")
"""XGBoost's names for the number of threads."""


@dataclass(frozen=True, kw_only=True)
class XGBoostFit(Fit):
    """A declared training with XGBoost.

    Args:
        obj: A custom objective, as for `xgboost.train`.
        custom_metric: A custom metric, as for `xgboost.train`.
    """

    waits_on_disk = True  # four passes in which bins are made would hold 1.7 times the rows at once

    obj: Callable[..., Any] | None = None
    custom_metric: Callable[..., tuple[str, float]] | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user runs on the workers."""
        return super().runs_user_code or callable(self.obj) or callable(self.custom_metric)

    def check(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver, before a process starts.

        Raises:
            ValueError: Training cannot work with them.
        """
        warn_of_threads("nthread", _threads(self.params), scaling_config)
        self._check_method()
        self._check_device(scaling_config)
        self._check_objective(str(self.params.get("objective")))
        for name in self.datasets:
            if "-" in name:
                raise ValueError(f"XGBoost takes no dataset name with '-', found {name!r}")

    def _check_method(self) -> None:
        for name, known in (("tree_method", ("auto", "hist")), ("booster", ("gbtree", "dart"))):
            found = self.params.get(name)
            if found not in (None, *known):
                raise ValueError(
                    f"params[{name!r}] is {found!r}, but a declared training bins the data as it "
                    f"arrives, which works for {' and '.join(map(repr, known))}; use one of these, "
                    "or a training function with an xgboost.DMatrix"
                )

    def _check_device(self, scaling_config: ScalingConfig) -> None:
        device = str(self.params.get("device", "cpu"))
        if device.startswith(("cuda", "gpu")) and not scaling_config.use_gpu:
            raise ValueError(
                f"params['device'] is {device!r}, but the workers have no GPU; set "
                "ScalingConfig(use_gpu=True), or leave the parameter out"
            )

    def _check_objective(self, objective: str) -> None:
        if objective.startswith("rank:") and self.columns.group is None:
            raise ValueError(f"objective {objective!r} needs group_column, the query of each row")
        if objective.startswith("multi:") and not self.params.get("num_class"):
            raise ValueError(f"objective {objective!r} needs params['num_class']")
        if objective == "survival:aft":
            raise ValueError(
                "objective 'survival:aft' needs a lower and an upper bound for each label, which "
                "a declared training does not know; use a training function"
            )

    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round."""
        given = {name: each for name, each in self.params.items() if name not in _THREADS}
        threads = max(_threads(self.params), 0) or worker_threads()
        params = {"seed_per_iteration": True, **given, "nthread": threads}
        for shard in shards.values():
            self._check_labels(shard)
        matrices = self._matrices(shards, params)
        shards.clear()  # the matrices have all
        train(
            params,
            matrices["train"],
            self.num_boost_round,
            evals=[(matrix, name) for name, matrix in matrices.items()],
            obj=self.obj,
            early_stopping_rounds=self.early_stopping_rounds,
            callbacks=copy.deepcopy(self.callbacks),  # they keep state
            custom_metric=self.custom_metric,
        )

    def _matrices(self, shards: dict[str, Shard], params: dict[str, Any]) -> dict[str, DMatrix]:
        matrices: dict[str, DMatrix] = {}
        for name, shard in shards.items():
            matrices[name] = quantile_matrix(
                shard,
                reference=matrices.get("train"),
                max_bin=params.get("max_bin"),
                nthread=params["nthread"],
                external_memory=bool(self.external_memory),
                folder=self.folder,
            )
        return matrices

    def _check_labels(self, shard: Shard) -> None:
        objective = str(self.params.get("objective", "reg:squarederror"))
        rule = _LABELS.get(objective, {})
        if objective.startswith("multi:"):
            rule = {"low": 0, "high": self.params["num_class"] - 1, "whole_numbers": True}
        if rule:
            check_label(shard, f"objective {objective!r}", **rule)


def _threads(params: Mapping[str, Any]) -> int:
    """Give the number of threads that is set; 0, or less, is the worker's own share."""
    return int(next((params[name] for name in _THREADS if params.get(name) is not None), 0))
