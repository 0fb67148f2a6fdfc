"""Restart after a failure yields the results of an uninterrupted run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_diabetes
from xgboost import DMatrix
from xgboost.callback import EarlyStopping, LearningRateScheduler, TrainingCallback

from drawbar.train import Result, get_context
from drawbar.xgboost import RayTrainReportCallback
from tests.stops import stop_run

if TYPE_CHECKING:
    from tests.xgboost.conftest import FitInThreads

# An interrupt may come while a rank's thread removes files that have had their use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <finalize:pytest.PytestUnraisableExceptionWarning"
)

FAILS_AFTER = 18
"""The round after which a rank fails; the last checkpoint is from round 17."""


class FailOnce(TrainingCallback):
    """Fails rank 1 in the first attempt."""

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        context = get_context()
        if (context.get_attempt(), context.get_world_rank(), epoch + 1) == (0, 1, FAILS_AFTER):
            raise ZeroDivisionError
        return False


class KeepEpochs(TrainingCallback):
    """Notes which rounds were trained in which attempt."""

    seen: set[tuple[int, int]]

    def __deepcopy__(self, memo: Any) -> KeepEpochs:
        return self

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self.seen.add((get_context().get_attempt(), epoch))
        return False


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    features, target = load_diabetes(return_X_y=True, as_frame=True)
    return features.astype("float32").assign(target=target).sample(frac=1, random_state=0)


def parts(frame: pd.DataFrame) -> dict[str, list[pd.DataFrame]]:
    return {
        "train": [frame[:150], frame[150:300]],
        "validation": [frame[300:400], frame[400:]],
    }


def declining(epoch: int) -> float:
    return float(0.3 * 0.97**epoch)


@pytest.mark.parametrize(
    ("params", "callbacks"),
    [
        ({}, []),
        ({}, [LearningRateScheduler(declining)]),
        ({"eta": 0.15}, [EarlyStopping(rounds=8, save_best=True)]),
    ],
    ids=["plain", "learning rates", "early stopping"],
)
def test_forty_rounds_equal_seventeen_and_a_failure_and_the_rest(
    fit_in_threads: FitInThreads,
    frame: pd.DataFrame,
    params: dict[str, Any],
    callbacks: list[TrainingCallback],
) -> None:
    def train(*more: TrainingCallback) -> tuple[Any, Result]:
        return fit_in_threads(
            parts(frame),
            {"max_depth": 3, **params},
            num_boost_round=40,
            callbacks=[*callbacks, RayTrainReportCallback(frequency=17), *more],
        )

    epochs = KeepEpochs()
    epochs.seen = set()
    booster, result = train(FailOnce(), epochs)
    whole, uninterrupted = train()
    assert booster.num_boosted_rounds() == whole.num_boosted_rounds()
    assert booster.attributes() == whole.attributes()  # best iteration and score
    everything = DMatrix(frame.drop(columns="target"))
    np.testing.assert_allclose(booster.predict(everything), whole.predict(everything), rtol=1e-6)
    assert curve(result) == pytest.approx(curve(uninterrupted), rel=1e-9)
    assert min(epoch for attempt, epoch in epochs.seen if attempt == 1) == 17


class Stop(TrainingCallback):
    """Stops the run in round 11, on the rank that has this callback first."""

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if epoch == 10 and get_context().get_world_rank() == 0:
            stop_run()
        return False


def test_stop_saves_in_this_round_and_resumes_there(
    fit_in_threads: FitInThreads, frame: pd.DataFrame
) -> None:
    def train(name: str, *more: TrainingCallback) -> tuple[Any, Result]:
        callbacks = [*more, RayTrainReportCallback()]
        return fit_in_threads(
            parts(frame), {"max_depth": 3}, name, num_boost_round=15, callbacks=callbacks
        )

    stopped, _ = train("stopped", Stop())
    assert stopped.num_boosted_rounds() in (11, 12)
    resumed, _ = train("stopped")
    whole, _ = train("whole")
    everything = DMatrix(frame.drop(columns="target"))
    np.testing.assert_allclose(resumed.predict(everything), whole.predict(everything), rtol=1e-6)


def curve(result: Result) -> list[float]:
    rows = result.metrics_dataframe.query("rank == 0").drop_duplicates("index", keep="last")
    values: list[float] = rows["validation-rmse"].tolist()
    return values
