"""XGBoostTrainer: train XGBoost on Ray workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xgboost import Booster
from xgboost.callback import TrainingCallback

from drawbar._boosting.trainer import BoostingTrainer
from drawbar.train import Checkpoint, DataConfig, RunConfig, ScalingConfig, ValidationConfig
from drawbar.train.backend import TrainFunction, resolve_config
from drawbar.xgboost._backend import XGBoostConfig
from drawbar.xgboost._report_callback import RayTrainReportCallback
from drawbar.xgboost._training_spec import XGBoostTrainingSpec


class XGBoostTrainer(BoostingTrainer):
    """Train XGBoost on Ray workers, from parameters or with a training function.

    With `params`, no function is needed. Each dataset is split between the workers, every row is
    used, and each column without another role is a feature. XGBoost trains on the dataset "train"
    and evaluates all datasets every round, over all workers. If the objective is
    `reg:absoluteerror` or `reg:quantileerror`, the rows of "train" are shuffled before the split,
    because XGBoost averages percentiles of each worker's rows. Rows are not shuffled with a
    `group_column`.

    With a training function, the function runs on every worker with XGBoost's communicator
    initialized. Create a matrix of the worker's rows, and call `drawbar.xgboost.train` or
    `xgboost.train`. The datasets are split in the same way, but never shuffled.

    A `dataset_config` replaces this split and shuffle.

    Args:
        train_loop_per_worker: Training function; takes `train_loop_config` or nothing. Cannot be
            combined with the arguments from `params` to `external_memory`.
        train_loop_config: Argument of the training function.
        xgboost_config: Configuration of the communicator; see `XGBoostConfig`.
        scaling_config: Number of workers and their resources.
        run_config: Run configuration: storage, restarts, callbacks.
        datasets: Datasets by name: Ray Datasets, pandas DataFrames, or Arrow tables.
        dataset_config: Distribution of the datasets to the workers.
        metadata: User data, for `drawbar.train.get_context().get_metadata()`.
        resume_from_checkpoint: Checkpoint from which the first attempt starts.
        validation_config: Validation of checkpoints. See `drawbar.train.report()`.
        params: XGBoost's parameters. Defaults: `nthread` is the worker's number of CPUs, and
            `seed_per_iteration` is True; see `drawbar.xgboost.train`. `n_estimators` is the same as
            `num_boost_round`, and `feature_weights` are the weights of the features in order.
        label_column: Target column, or several columns for several outputs. Must be numeric
            without missing values.
        num_boost_round: Total number of rounds. Default: 10.
        weight_column: Weight of each row. For ranking, the weight of a query's first row is used.
        group_column: Query of each row, for ranking. All rows of a query go to one worker.
        base_margin_column: Column with initial margins, or one column for each class.
        categorical_features: Categorical features of strings, or of integers from 0. Columns with
            Arrow's dictionary type (`category` in pandas) are always categorical.
        early_stopping_rounds: Stop when the last metric on the last dataset has not improved for
            this number of rounds.
        callbacks: XGBoost callbacks, pickled to each worker. A `RayTrainReportCallback` replaces
            the default one.
        obj: Custom objective; see `xgboost.train`.
        custom_metric: Custom metric; see `xgboost.train`. It receives the rows of one worker. Its
            values are averaged over the workers, weighted by their rows. For metrics that are not
            a mean over rows, use `allreduce_metric`.
        external_memory: True stores each worker's bins on disk instead of in memory. A path does
            the same in this directory on the workers.

    Raises:
        TypeError, ValueError: An argument is invalid; see `drawbar.train.DataParallelTrainer`.

    Example:
        ```python
        trainer = XGBoostTrainer(
            params={"objective": "binary:logistic"},
            label_column="target",
            datasets={"train": train_dataset, "validation": validation_dataset},
            num_boost_round=100,
            early_stopping_rounds=10,
            scaling_config=ScalingConfig(num_workers=4),
        )
        booster = XGBoostTrainer.get_model(trainer.fit().checkpoint)
        ```
    """

    _spec_class = XGBoostTrainingSpec

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
        super().__init__(
            train_loop_per_worker,
            params=params,
            label_column=label_column,
            num_boost_round=num_boost_round,
            weight_column=weight_column,
            group_column=group_column,
            base_margin_column=base_margin_column,
            categorical_features=categorical_features,
            early_stopping_rounds=early_stopping_rounds,
            callbacks=callbacks,
            obj=obj,
            custom_metric=custom_metric,
            external_memory=external_memory,
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
        """Load the booster of a checkpoint that a `RayTrainReportCallback` saved.

        Raises:
            FileNotFoundError: The checkpoint has no model file.
        """
        return RayTrainReportCallback.get_model(checkpoint)
