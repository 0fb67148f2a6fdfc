"""XGBoost on a group of Ray actors: declared, or with a training function of one's own."""

from drawbar.xgboost._backend import XGBoostBackend, XGBoostConfig
from drawbar.xgboost._loop import allreduce_metric, train
from drawbar.xgboost._report import RayTrainReportCallback
from drawbar.xgboost._trainer import XGBoostTrainer

__all__ = [
    "RayTrainReportCallback",
    "XGBoostBackend",
    "XGBoostConfig",
    "XGBoostTrainer",
    "allreduce_metric",
    "train",
]
