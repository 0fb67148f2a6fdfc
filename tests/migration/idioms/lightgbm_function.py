"""LightGBM in a training function, with its network parameters."""

import lightgbm
import numpy as np

from drawbar import train
from drawbar.train import ScalingConfig
from drawbar.train.lightgbm import LightGBMTrainer, RayTrainReportCallback, get_network_params


def train_func() -> None:
    x = np.arange(200.0).reshape(-1, 1)
    data = lightgbm.Dataset(x, x[:, 0] % 2, params={"verbose": -1})
    lightgbm.train(
        {"objective": "binary", "verbose": -1, "num_threads": 1, **get_network_params()},
        data,
        valid_sets=[data],
        valid_names=["train"],
        num_boost_round=2,
        callbacks=[RayTrainReportCallback()],
    )
    train.report({"done": True})


result = LightGBMTrainer(train_func, scaling_config=ScalingConfig(num_workers=1)).fit()
assert result.checkpoint
assert RayTrainReportCallback.get_model(result.checkpoint).num_trees() == 2
