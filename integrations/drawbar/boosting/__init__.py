"""What `drawbar.xgboost` and `drawbar.lightgbm` share. Users import those, not this.

The way of the data: the trainer splits each dataset exactly, `load` reads a worker's part in one
pass (`Columns` says which column is what) and has all ranks agree on one `Schema`, and the `Shard`
that comes of it gives `Block`s of numbers, pass after pass, to the library's incremental
construction.

A library plugs in with a subclass of `Fit` (checks in the driver, trains on the workers), a
`BoostingTrainer` around it, and a callback that tells `RoundReports` of each round and keeps
`Progress` in the checkpoints. No boosting library is imported here.
"""

from drawbar.boosting._backend import BoostingConfig
from drawbar.boosting._block import Block
from drawbar.boosting._columns import Columns
from drawbar.boosting._fit import Fit, check_label
from drawbar.boosting._load import load
from drawbar.boosting._metric import allreduce_metric
from drawbar.boosting._predict import predict
from drawbar.boosting._progress import History, Progress
from drawbar.boosting._read import Reading
from drawbar.boosting._report import Metrics, RoundReports
from drawbar.boosting._schema import Feature, Schema
from drawbar.boosting._shard import Shard
from drawbar.boosting._threads import warn_of_threads, worker_threads
from drawbar.boosting._trainer import BoostingTrainer

__all__ = [
    "Block",
    "BoostingConfig",
    "BoostingTrainer",
    "Columns",
    "Feature",
    "Fit",
    "History",
    "Metrics",
    "Progress",
    "Reading",
    "RoundReports",
    "Schema",
    "Shard",
    "allreduce_metric",
    "check_label",
    "load",
    "predict",
    "warn_of_threads",
    "worker_threads",
]
