"""train: xgboost.train that resumes from the run's latest checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from xgboost import Booster, DMatrix
from xgboost.callback import (
    CallbackContainer,
    EarlyStopping,
    EvaluationMonitor,
    LearningRateScheduler,
    TrainingCallback,
)

from drawbar._boosting.metric import allreduce_metric
from drawbar._boosting.progress import BoostingProgress, EvaluationHistory
from drawbar.train import collective, get_context, set_progress
from drawbar.train.backend import start_training
from drawbar.xgboost._parameters import (
    check_metrics_without_queries,
    require_no_ranking,
    validate_num_workers,
)
from drawbar.xgboost._report_callback import RayTrainReportCallback
from drawbar.xgboost._worker_weights import validate_worker_weights

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
    """Run xgboost.train, resuming from the latest checkpoint of the run.

    Training resumes with the same round numbers, complete `evals_result`, and state of early
    stopping and learning rates, so that the booster equals the result of an uninterrupted run.
    XGBoost does not save the state of its random generators. Set `seed_per_iteration=True` in
    `params`, so that dart drops the same trees, and `subsample` and `colsample_*` do not repeat the
    draws from round 0; their draws still differ from an uninterrupted run.

    The arguments are the same as in `xgboost.train`, except that `verbose_eval` is off by default.
    Without a `RayTrainReportCallback`, one with default settings is added, which saves at the end.
    Pass one with a `frequency` to save during training.

    Args:
        params: Parameters of the booster.
        dtrain: This worker's part of the training data.
        num_boost_round: Total number of rounds, including those before a resume.
        evals: Datasets to evaluate each round, with names. Names must not contain "-".
        obj: Custom objective. It receives only this worker's rows.
        maximize: Whether the custom metric is maximized.
        early_stopping_rounds: See `xgboost.train`; the last metric of the last of `evals` is used.
            It is global, so all ranks stop at the same round.
        evals_result: Receives the evaluations.
        verbose_eval: Whether to print the metrics of each round, or of every n-th round.
        xgb_model: Model to continue from, unless the run has a checkpoint.
        callbacks: Callbacks.
        custom_metric: Custom metric, which receives this worker's rows. Its values are averaged
            over the workers, weighted by their rows, which is exact for a mean over rows. For other
            metrics, use `allreduce_metric`.

    Returns:
        The trained booster.

    Raises:
        ValueError: With the objective and the workers' rows and weights, XGBoost would train
            another model than in one process, or it cannot evaluate a metric on several workers.
            Also if a base margin is NaN or infinite.

    Example:
        ```python
        def train_func(config):
            rows = drawbar.train.get_dataset_shard("train").materialize().to_pandas()
            dtrain = xgboost.DMatrix(rows.drop(columns="y"), rows["y"])
            callback = RayTrainReportCallback(frequency=10)
            drawbar.xgboost.train(config, dtrain, 100, callbacks=[callback])
        ```
    """
    _validate(params, dtrain, evals)
    report_callbacks = [
        callback for callback in callbacks if isinstance(callback, RayTrainReportCallback)
    ] or [RayTrainReportCallback()]
    progress, booster = report_callbacks[0].load_resume_state(start_training())
    for report in report_callbacks:
        report.restore(progress)
    booster = Booster(
        params, [dtrain, *(matrix for matrix, _ in evals)], model_file=booster or xgb_model
    )
    others = [callback for callback in callbacks if callback not in report_callbacks]
    others += _make_default_callbacks(verbose_eval, early_stopping_rounds, maximize)
    eval_sets = list(evals)
    metric = None if custom_metric is None else partial(_evaluate_globally, custom_metric)
    callback_container = CallbackContainer(others, metric=metric, output_margin=callable(obj))
    callback_container.history.update(progress.history)
    booster = callback_container.before_training(booster)
    should_stop = _replay_callbacks(others, booster, progress)
    for number in range(progress.rounds, num_boost_round):
        if should_stop or callback_container.before_iteration(booster, number, dtrain, eval_sets):
            break
        booster.update(dtrain, iteration=number, fobj=obj)
        should_stop = callback_container.after_iteration(booster, number, dtrain, eval_sets)
        set_progress(number + 1, num_boost_round, unit="rounds")
        # Called separately, because XGBoost does not call all callbacks after an early stop.
        for report in report_callbacks:
            report.after_iteration(booster, number, callback_container.history)
    booster = callback_container.after_training(booster)
    for report in report_callbacks:
        report.after_training(booster)
    if evals_result is not None:
        evals_result.update(callback_container.history)
    result: Booster = booster.reset()
    return result


def _validate(
    params: dict[str, Any], dtrain: DMatrix, evals: Sequence[tuple[DMatrix, str]]
) -> None:
    """Check objective, metrics, weights, and queries of all ranks. Collective."""
    workers = get_context().get_world_size()
    validate_num_workers(params, workers)
    matrices = [dtrain, *(matrix for matrix, _ in evals)]
    _require_base_margins(["dtrain", *(name for _, name in evals)], matrices)
    if workers == 1:
        return
    own = [len(matrix.get_uint_info("group_ptr")) > 1 for matrix in matrices]
    by_matrix = zip(*collective.all_gather(own), strict=True)  # a rank without rows has no queries
    train_queries, *eval_queries = map(any, by_matrix)
    if not train_queries:
        require_no_ranking(params)
    if not all(eval_queries):
        check_metrics_without_queries(params)
    validate_worker_weights(params, dtrain)


def _require_base_margins(names: Sequence[str], matrices: Sequence[DMatrix]) -> None:
    """Check for base margins with which XGBoost trains no trees, without an error."""
    for name, matrix in zip(names, matrices, strict=True):
        margins = matrix.get_base_margin()
        count = margins.size - int(np.isfinite(margins).sum())
        if count:
            raise ValueError(
                f"{count} of {margins.size} values in the base_margin of {name} are NaN or "
                "infinite. Drop these rows, or replace these values."
            )


def _make_default_callbacks(
    verbose_eval: bool | int, early_stopping_rounds: int | None, maximize: bool | None
) -> Iterator[TrainingCallback]:
    """Create the callbacks that `xgboost.train` creates for these arguments."""
    if verbose_eval:
        yield EvaluationMonitor(period=int(verbose_eval))
    if early_stopping_rounds:
        yield EarlyStopping(rounds=early_stopping_rounds, maximize=maximize)


def _evaluate_globally(metric: Metric, predictions: object, matrix: DMatrix) -> list[Score]:
    """Evaluate a custom metric and average its values over the workers, weighted by their rows.

    XGBoost itself gives each worker the same weight. Rows are weighted if they have weights. A
    worker without rows has weight 0.
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
    """Replay the rounds before a resume to XGBoost's callbacks. Return whether training ends."""
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
