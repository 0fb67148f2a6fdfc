"""Shared implementation of drawbar.xgboost and drawbar.lightgbm. Not public.

Data flow: the trainer splits each dataset. `load_shards` reads a worker's part once (`ColumnRoles`
maps columns to roles), and all ranks agree on one `Schema`. The resulting `Shard` yields `Block`s
of numbers, repeatedly if needed, from which the library builds its dataset.

A library adds a subclass of `TrainingSpec` (checks in the driver, trains on the workers), a
subclass of `BoostingTrainer`, and a callback that calls `RoundReporter` after each round and stores
`BoostingProgress` in checkpoints. This package imports no boosting library.
"""

from drawbar._boosting._backend import BoostingConfig
from drawbar._boosting._block import Block
from drawbar._boosting._checkpoint import BoosterCheckpoint, load_model
from drawbar._boosting._columns import ColumnRoles
from drawbar._boosting._estimators import (
    RayEstimator,
    add_drawbar_parameters,
    drop_drawbar_parameters,
    make_predictor_factory,
)
from drawbar._boosting._load import load_shards
from drawbar._boosting._metric import allreduce_metric
from drawbar._boosting._predict import Predictor, predict_dataset
from drawbar._boosting._progress import BoostingProgress, EvaluationHistory
from drawbar._boosting._reader import ColumnFormat
from drawbar._boosting._report_callback import MetricSelection, RoundReporter
from drawbar._boosting._schema import Feature, Schema
from drawbar._boosting._shard import Shard
from drawbar._boosting._threads import warn_oversubscribed_threads, worker_threads
from drawbar._boosting._trainer import BoostingTrainer
from drawbar._boosting._training_spec import TrainingSpec, validate_labels
from drawbar._boosting._user_data import (
    ColumnData,
    EncodedDataset,
    FeatureData,
    UserData,
    feature_names,
    fill_missing_columns,
    has_feature_names,
    is_ray_dataset,
    single_output_data,
    unique_labels,
)

__all__ = [
    "Block",
    "BoosterCheckpoint",
    "BoostingConfig",
    "BoostingProgress",
    "BoostingTrainer",
    "ColumnData",
    "ColumnFormat",
    "ColumnRoles",
    "EncodedDataset",
    "EvaluationHistory",
    "Feature",
    "FeatureData",
    "MetricSelection",
    "Predictor",
    "RayEstimator",
    "RoundReporter",
    "Schema",
    "Shard",
    "TrainingSpec",
    "UserData",
    "add_drawbar_parameters",
    "allreduce_metric",
    "drop_drawbar_parameters",
    "feature_names",
    "fill_missing_columns",
    "has_feature_names",
    "is_ray_dataset",
    "load_model",
    "load_shards",
    "make_predictor_factory",
    "predict_dataset",
    "single_output_data",
    "unique_labels",
    "validate_labels",
    "warn_oversubscribed_threads",
    "worker_threads",
]
