"""XGBoostTrainer: the trainer for XGBoost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xgboost import Booster
from xgboost.callback import TrainingCallback

from drawbar._boosting import BoostingTrainer
from drawbar.train import Checkpoint, DataConfig, RunConfig, ScalingConfig, ValidationConfig
from drawbar.train.backend import TrainFunction, resolve_config
from drawbar.xgboost._backend import XGBoostConfig
from drawbar.xgboost._report_callback import RayTrainReportCallback
from drawbar.xgboost._training_spec import XGBoostTrainingSpec


class XGBoostTrainer(BoostingTrainer):
    """Trains with XGBoost on several workers: what you declare, or what your function does.

    Declared, it needs no function:

        trainer = XGBoostTrainer(
            params={"objective": "binary:logistic"},
            label_column="target",
            datasets={"train": train_dataset, "validation": validation_dataset},
            num_boost_round=100,
            early_stopping_rounds=10,
            scaling_config=ScalingConfig(num_workers=4),
        )
        booster = XGBoostTrainer.get_model(trainer.fit().checkpoint)

    Each dataset is split between the workers, every row is used, and each column that has no other
    role is a feature. A worker turns its part into bins block by block. All datasets are evaluated
    every round, over all workers; "train" is what is trained on.

    With a training function, that is run on every worker with XGBoost's communicator up: make a
    matrix of the worker's rows, and call `drawbar.xgboost.train` or `xgboost.train`.

    Args:
        train_loop_per_worker: The training function; takes `train_loop_config` or nothing. It
            excludes the arguments from `params` to `external_memory`.
        xgboost_config: How the communicator is made; see `XGBoostConfig`.
        params: XGBoost's parameters. `nthread` is the worker's share of the node's cores unless it
            is set, and `seed_per_iteration` is on; see `drawbar.xgboost.train`.
            `n_estimators` is `num_boost_round`, and `feature_weights` are the
            weights of the features in their order.
        label_column: What is learned, a column or several for as many outputs; numbers without a
            gap.
        num_boost_round: Rounds in total. Default: 10.
        weight_column: Weight of each row; for ranking, that of the first row of a query is the
            query's.
        group_column: Query of each row, for ranking. The rows of a query go to one worker.
        base_margin_column: Column, or columns for as many classes, where the margins start.
        categorical_features: Features of strings, or of integers from 0, that are categories.
            Arrow's dictionaries, which is what pandas' categories are, need not be named.
        early_stopping_rounds: Stop when the last metric on the last dataset has not improved for so
            many rounds.
        callbacks: Callbacks of XGBoost, pickled to each worker. A `RayTrainReportCallback` among
            them replaces the one that is there by default.
        obj: A custom objective, as for `xgboost.train`.
        custom_metric: A custom metric, as for `xgboost.train`, which receives the rows of one
            worker. Its values are averaged over the workers, weighted by their rows; see
            `allreduce_metric` for metrics that are not a mean over rows.
        external_memory: Keep each worker's rows on disk, for more than its memory holds: True, or
            the folder on the workers that the files go to.

    A dataset may also be a pandas DataFrame or an Arrow table.

    `drawbar.train.DataParallelTrainer` describes all other arguments and the errors raised.
    Without a `dataset_config`, all datasets are split and every row is used. If the objective is
    `reg:absoluteerror` or `reg:quantileerror`, the rows of "train" are shuffled before the split,
    because XGBoost averages percentiles of each worker's rows.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        xgboost_config: XGBoostConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
        params: Mapping[str, object] | None = None,
        label_column: str | Sequence[str] | None = None,
        num_boost_round: int | None = None,
        weight_column: str | None = None,
        group_column: str | None = None,
        base_margin_column: str | Sequence[str] | None = None,
        categorical_features: Sequence[str] | None = None,
        early_stopping_rounds: int | None = None,
        callbacks: Sequence[TrainingCallback] | None = None,
        obj: Callable[..., object] | None = None,
        custom_metric: Callable[..., tuple[str, float]] | None = None,
        external_memory: bool | str | os.PathLike[str] | None = None,
    ) -> None:
        declared = {
            "params": params,
            "label_column": label_column,
            "num_boost_round": num_boost_round,
            "weight_column": weight_column,
            "group_column": group_column,
            "base_margin_column": base_margin_column,
            "categorical_features": categorical_features,
            "early_stopping_rounds": early_stopping_rounds,
            "callbacks": callbacks,
            "obj": obj,
            "custom_metric": custom_metric,
            "external_memory": external_memory,
        }
        super().__init__(
            train_loop_per_worker,
            spec_class=XGBoostTrainingSpec,
            spec_arguments=declared,
            backend_config=resolve_config("xgboost_config", xgboost_config, XGBoostConfig),
            train_loop_config=train_loop_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )

    @classmethod
    def get_model(cls, checkpoint: Checkpoint) -> Booster:
        """Load the booster of a checkpoint that a `RayTrainReportCallback` has saved.

        Raises:
            FileNotFoundError: The checkpoint has no such model.
        """
        return RayTrainReportCallback.get_model(checkpoint)
