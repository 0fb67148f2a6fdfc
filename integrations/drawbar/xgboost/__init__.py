"""XGBoost training on Ray, with or without a training function."""

from drawbar._boosting.metric import allreduce_metric
from drawbar.train.backend import set_public_module
from drawbar.xgboost._backend import XGBoostBackend, XGBoostConfig
from drawbar.xgboost._estimators import RayXGBClassifier, RayXGBRanker, RayXGBRegressor
from drawbar.xgboost._predict import predict
from drawbar.xgboost._report_callback import RayTrainReportCallback, XGBoostCheckpoint
from drawbar.xgboost._train import train
from drawbar.xgboost._trainer import XGBoostTrainer

__all__ = [
    "RayTrainReportCallback",
    "RayXGBClassifier",
    "RayXGBRanker",
    "RayXGBRegressor",
    "XGBoostBackend",
    "XGBoostCheckpoint",
    "XGBoostConfig",
    "XGBoostTrainer",
    "allreduce_metric",
    "predict",
    "train",
]

set_public_module(globals())
