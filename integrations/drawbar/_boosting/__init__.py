"""What `drawbar.xgboost` and `drawbar.lightgbm` share. Users import those, not this.

The way of the data: the trainer splits each dataset exactly, `load` reads a worker's part in one
pass (`Columns` says which column is what) and has all ranks agree on one `Schema`, and the `Shard`
that comes of it gives `Block`s of numbers, pass after pass, to the library's incremental
construction.

A library plugs in with a subclass of `Fit` (checks in the driver, trains on the workers), a
`BoostingTrainer` around it, and a callback that tells `RoundReports` of each round and keeps
`Progress` in the checkpoints. No boosting library is imported here.
"""

from drawbar._boosting._backend import BoostingConfig
from drawbar._boosting._block import Block
from drawbar._boosting._checkpoint import BoosterCheckpoint, load_model
from drawbar._boosting._columns import Columns
from drawbar._boosting._estimator import (
    RayEstimator,
    predicting,
    takes_plain_arguments,
    without_own,
)
from drawbar._boosting._fit import Fit, check_label
from drawbar._boosting._load import load
from drawbar._boosting._metric import allreduce_metric
from drawbar._boosting._predict import Predictor, predict
from drawbar._boosting._progress import History, Progress
from drawbar._boosting._read import Reading
from drawbar._boosting._report import Metrics, RoundReports
from drawbar._boosting._rows import (
    Features,
    Labelled,
    Rows,
    Values,
    alike,
    classes_of,
    feature_names,
    has_names,
    is_ray_dataset,
    rows_of,
)
from drawbar._boosting._schema import Feature, Schema
from drawbar._boosting._shard import Shard
from drawbar._boosting._table import Table
from drawbar._boosting._threads import warn_of_threads, worker_threads
from drawbar._boosting._trainer import BoostingTrainer

__all__ = [
    "Block",
    "BoosterCheckpoint",
    "BoostingConfig",
    "BoostingTrainer",
    "Columns",
    "Feature",
    "Features",
    "Fit",
    "History",
    "Labelled",
    "Metrics",
    "Predictor",
    "Progress",
    "RayEstimator",
    "Reading",
    "RoundReports",
    "Rows",
    "Schema",
    "Shard",
    "Table",
    "Values",
    "alike",
    "allreduce_metric",
    "check_label",
    "classes_of",
    "feature_names",
    "has_names",
    "is_ray_dataset",
    "load",
    "load_model",
    "predict",
    "predicting",
    "rows_of",
    "takes_plain_arguments",
    "warn_of_threads",
    "without_own",
    "worker_threads",
]
