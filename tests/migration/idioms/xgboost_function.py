"""XGBoost in a training function."""

import numpy as np
import ray
import ray.data
import xgboost

from drawbar import train
from drawbar.train import RunConfig, ScalingConfig
from drawbar.train.xgboost import RayTrainReportCallback, XGBoostTrainer


def train_func() -> None:
    frame = train.get_dataset_shard("train").materialize().to_pandas()
    matrix = xgboost.DMatrix(frame[["x"]], label=frame["y"])
    xgboost.train(
        {"objective": "reg:squarederror", "nthread": 1},
        matrix,
        evals=[(matrix, "train")],
        num_boost_round=3,
        callbacks=[RayTrainReportCallback()],
    )


rows = [{"x": float(n), "y": float(n % 2)} for n in range(40)]
result = XGBoostTrainer(
    train_func,
    datasets={"train": ray.data.from_items(rows)},
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="boosted"),
).fit()
assert result.checkpoint and result.metrics and "train-rmse" in result.metrics
booster = RayTrainReportCallback.get_model(result.checkpoint)
assert booster.predict(xgboost.DMatrix(np.zeros((1, 1)), feature_names=["x"])).shape == (1,)
