"""LightGBM training on Ray, with or without a training function.

The names correspond to the names in `drawbar.xgboost`. Three more are for tasks that XGBoost
handles itself: `get_network_params`, `GlobalEvaluation`, and `normalize_pandas_for_lightgbm`.
"""

from drawbar._boosting.metric import allreduce_metric
from drawbar.lightgbm._backend import LightGBMBackend, LightGBMConfig, get_network_params
from drawbar.lightgbm._estimators import RayLGBMClassifier, RayLGBMRanker, RayLGBMRegressor
from drawbar.lightgbm._evaluation import GlobalEvaluation
from drawbar.lightgbm._pandas import normalize_pandas_for_lightgbm
from drawbar.lightgbm._predict import predict
from drawbar.lightgbm._report_callback import LightGBMCheckpoint, RayTrainReportCallback
from drawbar.lightgbm._train import train
from drawbar.lightgbm._trainer import LightGBMTrainer
from drawbar.train.backend import set_public_module

__all__ = [
    "GlobalEvaluation",
    "LightGBMBackend",
    "LightGBMCheckpoint",
    "LightGBMConfig",
    "LightGBMTrainer",
    "RayLGBMClassifier",
    "RayLGBMRanker",
    "RayLGBMRegressor",
    "RayTrainReportCallback",
    "allreduce_metric",
    "get_network_params",
    "normalize_pandas_for_lightgbm",
    "predict",
    "train",
]

set_public_module(globals())
