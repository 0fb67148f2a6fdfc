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

from drawbar._boosting import BoostingProgress, EvaluationHistory, allreduce_metric
from drawbar.train.backend import start_training
from drawbar.xgboost._report_callback import RayTrainReportCallback

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
    evals_result: EvaluationHistory | None = None,
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
    report_callbacks = [each for each in callbacks if isinstance(each, RayTrainReportCallback)]
    report_callbacks = report_callbacks or [RayTrainReportCallback()]
    progress, booster = report_callbacks[0].load_resume_state(start_training())
    num_done = progress.rounds
    booster = Booster(
        params, [dtrain, *(matrix for matrix, _ in evals)], model_file=booster or xgb_model
    )
    others = [each for each in callbacks if not isinstance(each, RayTrainReportCallback)]
    if verbose_eval:
        others.append(EvaluationMonitor(period=int(verbose_eval)))
    if early_stopping_rounds:
        others.append(EarlyStopping(rounds=early_stopping_rounds, maximize=maximize))
    eval_sets = list(evals)
    metric = None if custom_metric is None else partial(_evaluate_globally, custom_metric)
    callback_container = CallbackContainer(others, metric=metric, output_margin=callable(obj))
    callback_container.history.update(progress.history)
    booster = callback_container.before_training(booster)
    should_stop = _replay_callbacks(others, booster, progress)
    for number in range(num_done, num_boost_round):
        if should_stop or callback_container.before_iteration(booster, number, dtrain, eval_sets):
            break
        booster.update(dtrain, iteration=number, fobj=obj)
        should_stop = callback_container.after_iteration(booster, number, dtrain, eval_sets)
        for (
            report
        ) in report_callbacks:  # not one of the others: after a stop these are not all called
            report.after_iteration(booster, number, callback_container.history)
    booster = callback_container.after_training(booster)
    for report in report_callbacks:
        report.after_training(booster)
    if evals_result is not None:
        evals_result.update(callback_container.history)
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


def _replay_callbacks(
    callbacks: Sequence[TrainingCallback], booster: Booster, progress: BoostingProgress
) -> bool:
    """Show the rounds before a resume to XGBoost's own callbacks; says whether training is over."""
    should_stop = False
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            callback.starting_round = booster.num_boosted_rounds() - progress.rounds
            for number, evaluated in enumerate(
                progress.iter_rounds(), progress.first_recorded_round
            ):
                should_stop = callback.after_iteration(booster, number, evaluated)
        elif isinstance(callback, LearningRateScheduler) and progress.rounds:
            callback.after_iteration(booster, progress.rounds - 1, progress.history)
    return should_stop
