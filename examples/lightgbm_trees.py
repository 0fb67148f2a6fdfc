"""Boosted trees on scikit-learn's handwritten digits, on several workers: declared, no loop.

Stop it and run it again, or run it with more --rounds: it resumes from the latest checkpoint.
"""

import argparse

import lightgbm
import matplotlib
import ray.data
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from drawbar import train
from drawbar.lightgbm import LightGBMTrainer, RayTrainReportCallback
from drawbar.train.runs import get_default_storage_path


def digits():
    data = load_digits(as_frame=True)
    return train_test_split(data.frame, test_size=0.25, random_state=0, stratify=data.target)


def plot(result, booster):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    curve = result.metrics_dataframe.query("rank == 0").drop_duplicates("index")
    losses = ["validation-multi_logloss", "validation-multi_error"]
    curve.plot("index", losses, ax=left, grid=True, xlabel="round")
    lightgbm.plot_importance(booster, right, importance_type="gain", max_num_features=10)
    figure.savefig(f"{result.path}/learning.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("rounds", 60)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    training, validation = digits()
    metrics = ["multi_logloss", "multi_error"]
    result = LightGBMTrainer(
        params={"objective": "multiclass", "num_class": 10, "metric": metrics, "num_leaves": 15},
        label_column="target",
        datasets={
            "train": ray.data.from_pandas(training),
            "validation": ray.data.from_pandas(validation),
        },
        num_boost_round=args.rounds,
        early_stopping_rounds=10,
        callbacks=[RayTrainReportCallback(frequency=20)],
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(name="digits-trees", storage_path=args.storage_path),
    ).fit()

    booster = LightGBMTrainer.get_model(result.checkpoint)
    plot(result, booster)
    print(f"best round {booster.best_iteration} of {booster.current_iteration()}")
    print(f"{result.metrics}\n{result.checkpoint}\n{result.path}/learning.png")
