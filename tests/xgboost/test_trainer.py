"""`XGBoostTrainer` on Ray, with parameters or a function, and its validation."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray.data
import xgboost
from sklearn.datasets import load_breast_cancer
from xgboost import DMatrix
from xgboost.callback import TrainingCallback

from drawbar import train
from drawbar.train import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.testing import run_in_threads
from drawbar.xgboost import RayTrainReportCallback, XGBoostConfig, XGBoostTrainer

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

RANK = {"objective": "rank:ndcg", "eval_metric": "ndcg@5", "lambdarank_pair_method": "topk"}


class KillAfter18Rounds(TrainingCallback):
    """Kills rank 1 once, a round after a checkpoint."""

    def before_training(self, model: Any) -> Any:
        context = train.get_context()
        rank, attempt = context.get_world_rank(), context.get_attempt()
        (context.get_storage() / f"rank_{rank}_attempt_{attempt}").write_text(str(os.getpid()))
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        context = train.get_context()
        if (context.get_world_rank(), context.get_attempt(), epoch) == (1, 0, 17):
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def queries() -> pd.DataFrame:
    """Create forty queries of ten rows that are not contiguous."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.integers(0, 8, (400, 5)), columns=list("abcde")).astype("float32")
    frame["query"] = pd.Categorical(np.char.mod("query %d", np.arange(400) % 40))
    frame["target"] = (frame.a + rng.normal(size=400) > 5).astype(int) + (frame.b > 5)
    return frame


def test_ranking_with_killed_worker_completes(tmp_path: Path) -> None:
    frame = queries()

    def fit(name: str, num_workers: int, *callbacks: TrainingCallback) -> Result:
        return XGBoostTrainer(
            params={**RANK, "max_depth": 3},
            label_column="target",
            group_column="query",
            datasets={"train": ray.data.from_pandas(frame)},
            num_boost_round=40,
            callbacks=[RayTrainReportCallback(frequency=17), *callbacks],
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name=name, storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()

    killed = fit("killed", 2, KillAfter18Rounds())
    whole = fit("whole", 0)  # in this process
    matrix = DMatrix(frame[list("abcde")])
    boosters = [booster_of(result) for result in (killed, whole)]
    assert [booster.num_boosted_rounds() for booster in boosters] == [40, 40]
    assert boosters[0].predict(matrix) == pytest.approx(boosters[1].predict(matrix), rel=1e-4)
    pids = {path.name: path.read_text() for path in (tmp_path / "killed").glob("rank_*_attempt_*")}
    assert pids["rank_0_attempt_0"] == pids["rank_0_attempt_1"]  # kept
    assert pids["rank_1_attempt_0"] != pids["rank_1_attempt_1"]  # replaced
    assert killed.metrics == pytest.approx(whole.metrics, rel=1e-4)


def booster_of(result: Result) -> xgboost.Booster:
    assert result.checkpoint is not None
    return XGBoostTrainer.get_model(result.checkpoint)


def loop() -> tuple[float, int]:
    """Train on this worker's rows of the bundled data, as one would without a trainer."""
    features, target = load_breast_cancer(return_X_y=True)
    context = train.get_context()
    mine = slice(context.get_world_rank(), None, context.get_world_size())
    matrix = DMatrix(features[mine], target[mine])
    history: Any = {}
    booster = xgboost.train(
        {"objective": "binary:logistic"},
        matrix,
        5,
        evals=[(matrix, "train")],
        evals_result=history,
        verbose_eval=False,
        callbacks=[RayTrainReportCallback({"loss": "train-logloss"}, filename="m.json")],
    )
    return history["train"]["logloss"][-1], booster.num_boosted_rounds()


def test_training_function_reports_rounds(run_config: RunConfig) -> None:
    result = run_in_threads(loop, backend_config=XGBoostConfig(), run_config=run_config)
    losses, rounds = zip(*result.return_values, strict=True)
    assert losses[0] == losses[1]
    assert rounds == (5, 5)
    assert result.metrics == {"loss": losses[0]}
    assert len(result.metrics_dataframe.query("rank == 1")) == 6  # each round, and the end
    assert result.checkpoint is not None
    booster = RayTrainReportCallback.get_model(result.checkpoint, "m.json")
    assert booster.num_boosted_rounds() == 5
    with pytest.raises(FileNotFoundError, match=r"no 'model\.ubj'. Its files: m.json"):
        XGBoostTrainer.get_model(result.checkpoint)


FRAME = pd.DataFrame({"a": [0.0, 1.0], "s": ["p", "q"], "y": [0, 1]})
LOGISTIC = {"objective": "binary:logistic"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_column": "z"}, r"label_column is 'z', but datasets\['train'\] has .*'a', 's'"),
        ({}, r"Feature 's' of datasets\['train'\] has type .*Add it to categorical_features"),
        ({"label_column": ["y", "z"]}, r"label_column is 'z', but datasets\['train'\] has"),
        ({"datasets": {"train": FRAME.drop(columns="y")}}, "label_column is 'y', but datasets"),
        ({"early_stopping_rounds": 3}, "early_stopping_rounds=3 needs a dataset to evaluate"),
        ({"num_boost_round": 0}, "num_boost_round must be at least 1, found 0"),
        ({"params": {"device": "cuda"}}, r"'cuda', but the workers have no GPU.*use_gpu=True"),
        ({"params": {"tree_method": "exact"}}, r"supports tree_method .*, found 'exact'"),
        ({"params": {"objective": "multi:softmax"}}, r"needs params\['num_class'\]"),
        ({"params": RANK}, "objective 'rank:ndcg' needs group_column"),
        ({"params": {"objective": "survival:aft"}}, "needs a lower and an upper bound"),
        (
            {
                "params": {"objective": "survival:cox"},
                "scaling_config": ScalingConfig(num_workers=(1, 3)),
            },
            "'survival:cox' compares .*found 3 workers. Set num_workers=1",
        ),
        (
            {"train_loop_per_worker": loop},
            "params, label_column.* cannot be combined with a training function",
        ),
        ({"params": None}, "params and label_column"),
        ({"datasets": {"validation": None}}, r"datasets must have \"train\", found"),
    ],
)
def test_trainer_with_invalid_arguments_raises(arguments: Any, message: str) -> None:
    given: dict[str, Any] = {
        "params": LOGISTIC,
        "label_column": "y",
        "datasets": {"train": ray.data.from_arrow(pa.Table.from_pandas(FRAME))},
    }
    with pytest.raises((TypeError, ValueError), match=message):
        XGBoostTrainer(**{**given, **arguments})


def test_more_threads_than_cpus_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"params\['nthread'\]=8 is more than the 2 CPUs"):
        XGBoostTrainer(
            params={**LOGISTIC, "nthread": 8},
            label_column="y",
            categorical_features=["s"],
            datasets={"train": lambda: ray.data.from_pandas(FRAME)},
            scaling_config=ScalingConfig(resources_per_worker={"CPU": 2}),
        )


@pytest.mark.parametrize("name", ["nthread", "n_jobs"])
def test_oversubscribed_threads_with_default_cpu_warns(name: str) -> None:
    with pytest.warns(UserWarning, match="=64 is more than the 1 CPUs"):
        XGBoostTrainer(
            params={**LOGISTIC, name: 64, "tree_method": None},
            label_column="y",
            categorical_features=["s"],
            datasets={"train": lambda: ray.data.from_pandas(FRAME)},
            scaling_config=ScalingConfig(num_workers=2),
        )


def test_resume_from_plain_model_continues(tmp_path: Path) -> None:
    frame = load_breast_cancer(as_frame=True).frame
    matrix = DMatrix(frame.drop(columns="target"), frame.target)
    booster = xgboost.train(LOGISTIC, matrix, 20)
    booster.save_model(tmp_path / RayTrainReportCallback.CHECKPOINT_NAME)
    result = XGBoostTrainer(
        params=LOGISTIC,
        label_column="target",
        datasets={"train": ray.data.from_pandas(frame), "validation": ray.data.from_pandas(frame)},
        num_boost_round=25,
        early_stopping_rounds=20,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path / "runs"),
        resume_from_checkpoint=Checkpoint(tmp_path),
    ).fit()
    ours = booster_of(result)
    assert ours.num_boosted_rounds() == 25
    assert ours.best_iteration == 24
    assert (ours[:20].predict(matrix) == booster.predict(matrix)).all()


def test_tables_are_datasets_and_parameters_are_the_librarys(tmp_path: Path) -> None:
    frame = load_breast_cancer(as_frame=True).frame
    features = frame.drop(columns="target")
    weights = [1.0, 0.0] * (features.shape[1] // 2)
    params = {**LOGISTIC, "eval_metric": ["auc", "logloss"], "colsample_bynode": 0.2}
    result = XGBoostTrainer(
        params={**params, "n_estimators": 12, "feature_weights": weights},
        label_column="target",
        datasets={"train": frame, "validation": pa.Table.from_pandas(frame)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path / "runs"),
    ).fit()
    assert booster_of(result).num_boosted_rounds() == 12
    assert set(booster_of(result).get_score()) <= set(features.columns[::2])
    assert {"train-auc", "validation-auc", "validation-logloss"} <= (result.metrics or {}).keys()


def test_labels_out_of_range_are_told_by_every_rank(run_config: RunConfig) -> None:
    trainer = XGBoostTrainer(
        params=LOGISTIC,
        label_column="a",
        categorical_features=["s"],
        datasets={"train": ray.data.from_pandas(FRAME.assign(a=[1, 2]))},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    with pytest.raises(train.TrainingFailedError, match="labels that are numbers from 0 to 1, but"):
        trainer.fit()


def test_checkpoints_are_validated(tmp_path: Path) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, int]:
        return {"trees": XGBoostTrainer.get_model(checkpoint).num_boosted_rounds()}

    result = XGBoostTrainer(
        params=RANK,
        label_column="target",
        group_column="query",
        datasets={"train": ray.data.from_pandas(queries())},
        num_boost_round=15,
        callbacks=[RayTrainReportCallback(frequency=10, validation=True)],
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path),
        validation_config=ValidationConfig(validate),
    ).fit()
    assert [metrics["trees"] for _, metrics in result.best_checkpoints] == [10, 15]
