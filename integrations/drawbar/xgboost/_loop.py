"""For the training function: `train`, which goes on where the run's newest checkpoint ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from xgboost import Booster, DMatrix
from xgboost.callback import (
    CallbackContainer,
    EarlyStopping,
    EvaluationMonitor,
    LearningRateScheduler,
    TrainingCallback,
)

from drawbar._boosting import History, Progress, allreduce_metric
from drawbar.train.backend import begin_training
from drawbar.xgboost._report import RayTrainReportCallback

Score: TypeAlias = tuple[str, float]
"""Name and value of a metric."""

Metric: TypeAlias = Callable[..., Score | list[Score]]


def train(
    params: dict[str, Any],
    dtrain: DMatrix,
    num_boost_round: int = 10,
    *,
    evals: Sequence[tuple[DMatrix, str]] = (),
    obj: Callable[..., object] | None = None,
    maximize: bool | None = None,
    early_stopping_rounds: int | None = None,
    evals_result: History | None = None,
    verbose_eval: bool | int = False,
    xgb_model: str | Booster | bytearray | None = None,
    callbacks: Sequence[TrainingCallback] = (),
    custom_metric: Callable[..., tuple[str, float]] | None = None,
) -> Booster:
    """Do what `xgboost.train` does, and resume: only the rounds that are left are trained.

    A resumed training gives the booster that an uninterrupted one would: the rounds keep their
    numbers, `evals_result` has them all, early stopping and learning rates go on. XGBoost saves no
    state of its random draws: set `seed_per_iteration=True` in `params` for dart to drop the same
    trees, and for `subsample` and `colsample_*` not to begin again with the draws of round 0;
    theirs are others than without the resume.

    The arguments are those of `xgboost.train`, save that `verbose_eval` is off unless set. With no
    `RayTrainReportCallback` among the callbacks there is one with its defaults, which saves at the
    end; give one with a `frequency` to go on from the middle after a failure.

    Args:
        params: Parameters of the booster.
        dtrain: This worker's part of the training data.
        num_boost_round: Rounds in total, those before a resume included.
        evals: What to evaluate each round, with names; a name must not contain "-".
        obj: A custom objective. It sees this worker's rows only.
        maximize: Whether the custom metric is to be maximised.
        early_stopping_rounds: As for `xgboost.train`: the last metric of the last of `evals`
            counts. It is the same number on every rank, so all stop on one round.
        evals_result: Receives the history.
        verbose_eval: Print the metrics of each round, or of each so many rounds.
        xgb_model: What to start from in place of nothing. A checkpoint of the run goes before it.
        callbacks: Further callbacks.
        custom_metric: A custom metric, which receives this worker's rows. Its values are averaged
            over the workers, weighted by their rows, which is exact for a mean over rows. For other
            metrics see `allreduce_metric`.
    """
    reports = [each for each in callbacks if isinstance(each, RayTrainReportCallback)]
    reports = reports or [RayTrainReportCallback()]
    progress, booster = reports[0].newest(begin_training())
    done = progress.rounds
    booster = Booster(
        params, [dtrain, *(matrix for matrix, _ in evals)], model_file=booster or xgb_model
    )
    others = [each for each in callbacks if not isinstance(each, RayTrainReportCallback)]
    if verbose_eval:
        others.append(EvaluationMonitor(period=int(verbose_eval)))
    if early_stopping_rounds:
        others.append(EarlyStopping(rounds=early_stopping_rounds, maximize=maximize))
    watched = list(evals)
    metric = None if custom_metric is None else partial(_evaluate_globally, custom_metric)
    rounds = CallbackContainer(others, metric=metric, output_margin=callable(obj))
    rounds.history.update(progress.history)
    booster = rounds.before_training(booster)
    stop = _catch_up(others, booster, progress)
    for number in range(done, num_boost_round):
        if stop or rounds.before_iteration(booster, number, dtrain, watched):
            break
        booster.update(dtrain, iteration=number, fobj=obj)
        stop = rounds.after_iteration(booster, number, dtrain, watched)
        for report in reports:  # not one of the others: after a stop these are not all called
            report.after_iteration(booster, number, rounds.history)
    booster = rounds.after_training(booster)
    for report in reports:
        report.after_training(booster)
    if evals_result is not None:
        evals_result.update(rounds.history)
    result: Booster = booster.reset()
    return result


def _evaluate_globally(metric: Metric, predictions: object, matrix: DMatrix) -> list[Score]:
    """Evaluate a custom metric and average its values over the workers, weighted by their rows.

    XGBoost itself gives each worker the same weight. Rows count by their weights, if they have
    some; a worker without rows counts nothing.
    """
    result = metric(predictions, matrix)
    weights = matrix.get_weight()
    weight = float(weights.sum()) if weights.size else float(matrix.num_row())
    return [
        (name, allreduce_metric(value * weight if weight else 0.0, weight))
        for name, value in (result if isinstance(result, list) else [result])
    ]


def _catch_up(callbacks: Sequence[TrainingCallback], booster: Booster, progress: Progress) -> bool:
    """Show the rounds before a resume to XGBoost's own callbacks; says whether training is over."""
    stop = False
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            callback.starting_round = booster.num_boosted_rounds() - progress.rounds
            for number, evaluated in enumerate(progress.evaluations(), progress.first):
                stop = callback.after_iteration(booster, number, evaluated)
        elif isinstance(callback, LearningRateScheduler) and progress.rounds:
            callback.after_iteration(booster, progress.rounds - 1, progress.history)
    return stop
