"""What `drawbar.xgboost` and `drawbar.lightgbm` share. Users import those, not this.

The way of the data: the trainer splits each dataset exactly, `load` reads a worker's part in one
pass (`Columns` says which column is what) and has all ranks agree on one `Schema`, and the `Shard`
that comes of it gives `Block`s of numbers, pass after pass, to the library's incremental
construction.

A library plugs in with a subclass of `Fit` (checks in the driver, trains on the workers), a
`BoostingTrainer` around it, and a callback that tells `RoundReporter` of each round and keeps
`Progress` in the checkpoints. No boosting library is imported here.
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
from drawbar._boosting._table import Table
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
    "Table",
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
