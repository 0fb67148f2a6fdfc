"""LightGBMTrainer: train LightGBM on Ray workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightgbm import Booster

from drawbar._boosting.trainer import BoostingTrainer
from drawbar.lightgbm._backend import LightGBMConfig
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.lightgbm._training_spec import LightGBMTrainingSpec
from drawbar.train import Checkpoint, DataConfig, RunConfig, ScalingConfig, ValidationConfig
from drawbar.train.backend import TrainFunction, resolve_config


class LightGBMTrainer(BoostingTrainer):
    """Train LightGBM on Ray workers, from parameters or with a training function.

    With `params`, no function is needed; training resumes automatically with the remaining rounds.
    With a training function, call `drawbar.lightgbm.train` or `lightgbm.train` in it. LightGBM's
    network is connected before it starts.

    All datasets are split and every row is used. With `params`, if the objective is `l1`,
    `quantile`, or `mape`, the rows of "train" are shuffled before the split, because LightGBM
    averages percentiles of each worker's rows. Rows are not shuffled with a `group_column`. A
    `dataset_config` replaces this split and shuffle.

    Args:
        train_loop_per_worker: Training function; takes `train_loop_config` or nothing. Cannot be
            combined with the arguments from `params` to `external_memory`.
        train_loop_config: Argument of the training function.
        params: Parameters of `lightgbm.train`. `objective` may be a function. Defaults:
            `num_threads` is the worker's number of CPUs, and `tree_learner` is "data". Aliases of
            `num_boost_round` and `early_stopping_rounds` replace these arguments.
        label_column: Target column.
        num_boost_round: Total number of rounds, including those before a resume. Default: 100.
        weight_column: Weight of each row.
        group_column: Query of each row, for ranking. All rows of a query go to one worker.
        base_margin_column: Column with initial raw scores (LightGBM's `init_score`), or one column
            for each class.
        categorical_features: Categorical features of strings, or of integers from 0. Columns of a
            categorical type of pandas or Arrow are always categorical. Categories of all workers
            are merged.
        early_stopping_rounds: Stop all workers when one metric of one dataset other than "train"
            has not improved for this number of rounds. `params` may have `first_metric_only`.
        callbacks: Callbacks of `lightgbm.train`. A `RayTrainReportCallback` controls reports and
            checkpoints. Default: report all metrics and save at the end.
        feval: Custom metric of `lightgbm.train`, or a list of them; see `allreduce_metric`, and
            `GlobalEvaluation` for the global values.
        external_memory: Directory on the workers for a temporary file of rows, from which LightGBM
            creates bins in memory. Default, and with True: the system's temporary directory.
        lightgbm_config: Configuration of LightGBM's network; see `LightGBMConfig`.
        scaling_config: Number of workers and their resources.
        run_config: Run configuration: storage, restarts, callbacks.
        datasets: Datasets by name: Ray Datasets, pandas DataFrames, or Arrow tables. With `params`,
            "train" is the training data, and all others are evaluated every round.
        dataset_config: Distribution of the datasets to the workers.
        metadata: User data, for `drawbar.train.get_context().get_metadata()`.
        resume_from_checkpoint: Checkpoint from which the first attempt starts.
        validation_config: Validation of checkpoints. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An argument or a column is invalid; see
            `drawbar.train.DataParallelTrainer`.

    Example:
        ```python
        result = LightGBMTrainer(
            params={"objective": "binary", "metric": ["binary_logloss", "auc"]},
            label_column="target",
            datasets={"train": train, "validation": validation},
            num_boost_round=200,
            early_stopping_rounds=10,
            scaling_config=ScalingConfig(num_workers=4),
        ).fit()
        booster = LightGBMTrainer.get_model(result.checkpoint)
        ```
    """

    _spec_class = LightGBMTrainingSpec

    def __init__(
        self,
        train_loop_per_worker: TrainFunction | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        params: Mapping[str, object] | None = None,
        label_column: str | None = None,
        num_boost_round: int | None = None,
        weight_column: str | None = None,
        group_column: str | None = None,
        base_margin_column: str | Sequence[str] | None = None,
        categorical_features: Sequence[str] | None = None,
        early_stopping_rounds: int | None = None,
        callbacks: Sequence[object] | None = None,
        feval: object = None,
        external_memory: bool | str | os.PathLike[str] | None = None,
        lightgbm_config: LightGBMConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
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
            feval=feval,
            external_memory=external_memory,
            train_loop_config=train_loop_config,
            backend_config=resolve_config("lightgbm_config", lightgbm_config, LightGBMConfig),
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
