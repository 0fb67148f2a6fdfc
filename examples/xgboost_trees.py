"""Boosted trees on scikit-learn's breast cancer data, on several workers: declared, no loop.

Stop it and run it again, or run it with more --rounds: it resumes from the latest checkpoint.
"""

import argparse

import matplotlib
import ray.data
import xgboost as xgb
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

from drawbar import train
from drawbar.train.runs import get_default_storage_path
from drawbar.xgboost import RayTrainReportCallback, XGBoostTrainer


def cells():
    data = load_breast_cancer(as_frame=True)
    return train_test_split(data.frame, test_size=0.25, random_state=0, stratify=data.target)


def plot(result, booster):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    curve = result.metrics_dataframe.query("rank == 0").drop_duplicates("index")
    curve.plot("index", ["train-logloss", "validation-logloss"], ax=left, grid=True, xlabel="round")
    features = {"importance_type": "gain", "max_num_features": 10, "show_values": False}
    xgb.plot_importance(booster, ax=right, **features)
    figure.savefig(f"{result.path}/learning.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("rounds", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    training, validation = cells()
    result = XGBoostTrainer(
        params={"objective": "binary:logistic", "eval_metric": ["error", "logloss"], "eta": 0.1},
        label_column="target",
        datasets={
            "train": ray.data.from_pandas(training),
            "validation": ray.data.from_pandas(validation),
        },
        num_boost_round=args.rounds,
        early_stopping_rounds=20,
        callbacks=[RayTrainReportCallback(frequency=25)],
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(name="cancer", storage_path=args.storage_path),
    ).fit()

    booster = XGBoostTrainer.get_model(result.checkpoint)
    plot(result, booster)
    print(f"best round {booster.best_iteration}, log loss {booster.best_score:.4f}")
    print(f"{result.metrics}\n{result.checkpoint}\n{result.path}/learning.png")
