"""LightGBMTrainer: the trainer for LightGBM, with a training function or without one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightgbm import Booster

from drawbar._boosting import BoostingTrainer
from drawbar.lightgbm._backend import LightGBMConfig
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.lightgbm._training_spec import LightGBMTrainingSpec
from drawbar.train import Checkpoint, DataConfig, RunConfig, ScalingConfig, ValidationConfig
from drawbar.train.backend import TrainFunction, resolve_config


class LightGBMTrainer(BoostingTrainer):
    """Train with LightGBM on every worker, with its network up.

    Declared, without a training function:

        result = LightGBMTrainer(
            params={"objective": "binary", "metric": ["binary_logloss", "auc"]},
            label_column="target",
            datasets={"train": train, "validation": validation},
            num_boost_round=200,
            early_stopping_rounds=10,
            scaling_config=ScalingConfig(num_workers=4),
        ).fit()
        booster = RayTrainReportCallback.get_model(result.checkpoint)

    Or with a function that calls `drawbar.lightgbm.train`, or `lightgbm.train` itself:

        def train_loop(config):
            data = lightgbm.Dataset(...)     # of this worker's rows
            drawbar.lightgbm.train(config, data, callbacks=[RayTrainReportCallback(frequency=10)])

        LightGBMTrainer(train_loop, train_loop_config={"objective": "binary"}, ...).fit()

    Without a `dataset_config`, all datasets are split and every row is used. If the objective is
    `l1`, `quantile`, or `mape`, the rows of "train" are shuffled before the split, because LightGBM
    averages percentiles of each worker's rows. The declared form resumes automatically and trains
    only the remaining rounds.

    Args:
        train_loop_per_worker: The training function; takes `train_loop_config` or nothing.
        params: Parameters of `lightgbm.train`. `objective` may be a function. `num_threads` is the
            worker's share of CPUs unless it is set, and `tree_learner` "data". LightGBM's names
            of the number of rounds and of early stopping mean what they mean there.
        label_column: The column to learn.
        num_boost_round: Rounds in total, those before a resume included. Default: 100.
        weight_column: Weight of each row.
        group_column: Query of each row, for ranking. All rows of a query go to one worker.
        base_margin_column: Where each row's raw score starts (LightGBM's `init_score`); for several
            classes, a column for each.
        categorical_features: Columns of categories: strings, or integers from 0. A column of
            pandas' or Arrow's categorical type needs no mention. Categories are those of all
            workers together.
        early_stopping_rounds: Stop all workers when no metric of any dataset besides "train" has
            improved for so many rounds; `params` may have `first_metric_only`.
        callbacks: Callbacks of `lightgbm.train`. A `RayTrainReportCallback` among them says what is
            reported and when it is saved; without one, everything, and at the end.
        feval: A custom metric, or a list of them, as `lightgbm.train` takes them; see
            `allreduce_metric`, and `GlobalEvaluation` for how they become global.
        external_memory: The folder on the workers in which rows wait, in files, until LightGBM has
            their bins, which stay in memory. Default, and with True: the system's folder for such.
        lightgbm_config: How the workers' network is made.
        datasets: For the declared form: "train", and any others, which are evaluated every round.

    All other arguments, and what is raised, are those of `drawbar.train.DataParallelTrainer`.

    Raises:
        TypeError, ValueError: An argument is wrong, or a column is missing or cannot be used.
    """

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
            "feval": feval,
            "external_memory": external_memory,
        }
        super().__init__(
            train_loop_per_worker,
            spec_class=LightGBMTrainingSpec,
            spec_arguments=declared,
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
        """Load the booster of a checkpoint that a `RayTrainReportCallback` has saved.

        Raises:
            FileNotFoundError: The checkpoint has no such model.
        """
        return RayTrainReportCallback.get_model(checkpoint)
