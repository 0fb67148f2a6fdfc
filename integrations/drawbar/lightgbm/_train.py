"""train: lightgbm.train that resumes from the run's latest checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from lightgbm import Booster, Dataset
from lightgbm.callback import CallbackEnv, EarlyStopException

from drawbar._boosting.progress import BoostingProgress
from drawbar.lightgbm import _c_api
from drawbar.lightgbm._backend import add_network_parameters
from drawbar.lightgbm._dataset_values import check_values
from drawbar.lightgbm._evaluation import EvalResult, make_eval_result
from drawbar.lightgbm._parameters import (
    check_num_workers,
    check_rank_weights,
    drop_parameters,
    find_alias,
    get_parameter,
    is_forest,
)
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.train import Checkpoint, get_context
from drawbar.train.backend import start_training

Callback = Callable[[CallbackEnv], None]


def train(
    params: Mapping[str, object],
    train_set: Dataset,
    num_boost_round: int = 100,
    valid_sets: Sequence[Dataset] | Dataset | None = None,
    valid_names: Sequence[str] | str | None = None,
    feval: Any | None = None,
    init_model: str | Path | Booster | None = None,
    keep_training_booster: bool = False,
    callbacks: Sequence[Callback] | None = None,
) -> Booster:
    """Run lightgbm.train on all workers, resuming from the latest checkpoint of the run.

    It uses the run's network and CPUs without `get_network_params`. Training resumes with the same
    round numbers and state of early stopping and learning rates, so that the booster equals the
    result of an uninterrupted run. There are exceptions: LightGBM does not save the state of its
    random generators, so rows and features (`bagging_fraction`, `feature_fraction`) are drawn with
    new random numbers. `dart` drops only new trees, and `rf` starts from scratch.

    The arguments equal `lightgbm.train`'s. Without a `RayTrainReportCallback`, one with
    default settings is added, which saves at the end. Pass one with a `frequency` to save during
    training.

    Args:
        params: Parameters of the booster.
        train_set: This worker's part of the training data. To resume, LightGBM needs its features,
            so a dataset that is already constructed needs `free_raw_data=False`.
        num_boost_round: Total number of rounds, including those before a resume.
        valid_sets: Datasets to evaluate each round.
        valid_names: Names of these datasets.
        feval: Custom metric, or a list of them; see `allreduce_metric` and `GlobalEvaluation`.
        init_model: Model to continue from, unless the run has a checkpoint, which includes its
            trees. `num_boost_round` does not include the rounds of this model.
        keep_training_booster: Whether the returned booster can be trained further.
        callbacks: Callbacks.

    Returns:
        The trained booster.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: A parameter or its use with several workers is invalid, the weights of a rank
            are all 0, or a label, weight, or `init_score` is missing or infinite in a dataset that
            is not constructed. Also if a dataset has an `init_score` and training resumes or has
            an `init_model`: LightGBM would replace the `init_score`.

    Example:
        ```python
        def train_func(config):
            rows = drawbar.train.get_dataset_shard("train").materialize().to_pandas()
            train_set = lightgbm.Dataset(rows.drop(columns="y"), rows["y"])
            callback = RayTrainReportCallback(frequency=10)
            drawbar.lightgbm.train(config, train_set, 100, callbacks=[callback])
        ```
    """
    check_num_workers(params, get_context().get_world_size())
    valid_sets = [valid_sets] if isinstance(valid_sets, Dataset) else list(valid_sets or ())
    check_values(train_set, valid_sets)
    weight: Any = train_set.weight
    check_rank_weights(weight is None or bool(np.any(weight)), params)
    params = add_network_parameters(params)
    rounds = int(get_parameter(params, "num_iterations", num_boost_round))
    all_callbacks = [*(callbacks or ()), *_early_stopping_callbacks(params)]
    params = drop_parameters(params, "num_iterations", "early_stopping_round")
    valid_names = [valid_names] if isinstance(valid_names, str) else list(valid_names or ())

    all_callbacks = add_report_callback(all_callbacks)
    initial = Booster(model_file=init_model) if isinstance(init_model, str | Path) else init_model
    earlier, progress = load_resume_state(params, start_training(), all_callbacks, initial)
    if earlier is not None:
        _require_no_init_score([train_set, *valid_sets], is_resume=earlier is not initial)
    return run_rounds(
        params,
        rounds + (0 if initial is None else initial.current_iteration()),
        all_callbacks,
        earlier,
        progress,
        train_name=_train_data_name(train_set, valid_sets, valid_names),
        train_set=train_set,
        valid_sets=valid_sets or None,
        valid_names=valid_names or None,
        feval=feval,
        init_model=earlier,
        keep_training_booster=keep_training_booster,
    )


def run_rounds(
    params: dict[str, Any],
    end: int,
    callbacks: Sequence[Callback],
    earlier: Booster | None,
    progress: BoostingProgress,
    *,
    train_name: str,
    **options: Any,
) -> Booster:
    """Train the remaining rounds with `lightgbm.train`.

    Args:
        params: Parameters of the booster.
        end: Total number of rounds.
        callbacks: Callbacks, with at least one `RayTrainReportCallback`.
        earlier: Booster with the trees so far.
        progress: Progress of this booster.
        train_name: Name of the training data in evaluations, which early stopping ignores.
        **options: Other arguments of `lightgbm.train`. Without `init_model`, the datasets must
            start from the scores of `earlier`.

    Returns:
        The trained booster; `earlier` if there are no remaining rounds.
    """
    reports = _list_report_callbacks(callbacks)
    begin = min(report.restore(progress) for report in reports)
    if earlier is not None:
        earlier.set_train_data_name(train_name)
        env = partial(CallbackEnv, earlier, params, begin_iteration=begin, end_iteration=end)
        is_stopped = _is_stopped_by_replay(earlier, progress, callbacks, env)
        if is_stopped or progress.rounds >= end:
            for report in reports:
                report.end_without_rounds(earlier)
            return earlier

    booster: Booster | None = None

    def prepare(env: CallbackEnv) -> None:
        nonlocal booster
        assert isinstance(env.model, Booster)
        booster = env.model
        if env.iteration == progress.rounds:
            booster.set_train_data_name(train_name)
            if earlier is not None and options.get("init_model") is None:
                _c_api.prepend_trees(booster, earlier)

    callbacks = _sort_callbacks(callbacks)
    before = [callback for callback in callbacks if _is_before_iteration(callback)]
    after = [callback for callback in callbacks if not _is_before_iteration(callback)]
    group = partial(_CallbackGroup, first=progress.rounds, begin=begin, end=end)
    try:
        return lightgbm.train(
            _offset_seeds(params, progress.rounds - begin),
            num_boost_round=end - progress.rounds,
            callbacks=[
                group([prepare, *before], before_iteration=True),
                group(after, before_iteration=False),
            ],
            **options,
        )
    except EarlyStopException as stop:  # LightGBM expects it only after a round
        assert booster is not None
        booster.best_iteration = stop.best_iteration + 1
        return booster


@dataclass(eq=False)
class _CallbackGroup:
    """LightGBM callback that calls others with the rounds of the training, not of its resumed part.

    Args:
        callbacks: Callbacks, in the order of their calls.
        first: First round after the resume.
        begin: First round of the training.
        end: Total number of rounds.
        before_iteration: Whether LightGBM calls it before a round, instead of after.
    """

    callbacks: Sequence[Callback]
    first: int
    begin: int
    end: int
    before_iteration: bool

    def __call__(self, env: CallbackEnv) -> None:
        """Call the callbacks."""
        iteration = self.first + env.iteration - env.begin_iteration
        results = env.evaluation_result_list
        env = CallbackEnv(env.model, env.params, iteration, self.begin, self.end, results)
        try:
            for callback in self.callbacks:
                callback(env)
        except EarlyStopException as stop:
            best_score = _normalize_results(stop.best_score)
            raise EarlyStopException(stop.best_iteration, best_score) from stop
        if results is not None:
            results[:] = _normalize_results(results)


def _normalize_results(results: Iterable[EvalResult]) -> list[EvalResult]:
    """Convert results that a callback has added as tuples, which LightGBM 4.7 cannot read."""
    return [make_eval_result(*result) for result in results]


def _sort_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Sort callbacks like LightGBM, but keep the order of callbacks with the same `order`."""
    numbered = enumerate(callbacks, -len(callbacks))  # default of `order`, as in LightGBM
    by_order = sorted(numbered, key=lambda pair: getattr(pair[1], "order", pair[0]))
    return [callback for _, callback in by_order]


def _is_before_iteration(callback: Callback) -> bool:
    return bool(getattr(callback, "before_iteration", False))


def add_report_callback(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks with a `RayTrainReportCallback`."""
    if _list_report_callbacks(callbacks):
        return list(callbacks)
    return [RayTrainReportCallback(), *callbacks]


def _list_report_callbacks(callbacks: Sequence[Callback]) -> list[RayTrainReportCallback]:
    return [callback for callback in callbacks if isinstance(callback, RayTrainReportCallback)]


def _early_stopping_callbacks(params: Mapping[str, object]) -> list[Callback]:
    """Return a resumable callback for early stopping if the parameters enable it."""
    rounds = get_parameter(params, "early_stopping_round")
    return [early_stopping(rounds, params)] if rounds is not None and rounds > 0 else []


def _train_data_name(
    train_set: Dataset, valid_sets: Sequence[Dataset], names: Sequence[str]
) -> str:
    """Return the name of the training data in evaluations, which early stopping ignores."""
    known = zip(valid_sets, names, strict=False)
    return next((name for data, name in known if data is train_set), "training")


def _is_stopped_by_replay(
    init_model: Booster,
    progress: BoostingProgress,
    callbacks: Sequence[Callback],
    env: Callable[..., CallbackEnv],
) -> bool:
    """Replay earlier rounds to the callbacks. Return whether they stop training."""
    try:
        _replay_evaluations(callbacks, progress, env)
    except EarlyStopException as stop:
        init_model.best_iteration = stop.best_iteration + 1
        return True
    return False


def _require_no_init_score(datasets: Sequence[Dataset], *, is_resume: bool) -> None:
    if all(data.init_score is None for data in datasets):
        return
    if is_resume:
        raise ValueError(
            "Cannot resume with a dataset that has an init_score, because LightGBM would replace "
            "it. Start without a checkpoint, or use "
            "LightGBMTrainer(params=..., base_margin_column=...)."
        )
    raise ValueError(
        "init_model cannot be combined with a dataset that has an init_score, because LightGBM "
        "would replace it. Remove init_model, or remove the init_score."
    )


_SEED_DEFAULTS = {"bagging_seed": 3, "feature_fraction_seed": 2, "extra_seed": 6, "drop_seed": 4}
"""Seeds of draws in every round, and LightGBM's default values."""

_REPLAYABLE_CALLBACKS = (type(lightgbm.early_stopping(1)), type(lightgbm.record_evaluation({})))
"""Callbacks whose state consists only of the evaluations."""


def _offset_seeds(params: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Change the seeds, so that a resumed training does not repeat the draws of earlier rounds."""
    if not rounds:
        return params
    seeds = {find_alias(params, name) or name: default for name, default in _SEED_DEFAULTS.items()}
    return {**params, **{name: params.get(name, seed) + rounds for name, seed in seeds.items()}}


def early_stopping(rounds: int, params: Mapping[str, object]) -> Callback:
    """Create LightGBM's callback for early stopping with the options in the parameters."""
    callback: Callback = lightgbm.early_stopping(
        rounds,
        first_metric_only=bool(get_parameter(params, "first_metric_only", False)),
        min_delta=get_parameter(params, "early_stopping_min_delta", 0.0),
        verbose=False,
    )
    return callback


def load_resume_state(
    params: Mapping[str, object],
    checkpoint: Checkpoint | None,
    callbacks: Sequence[Callback],
    initial: Booster | None = None,
) -> tuple[Booster | None, BoostingProgress]:
    """Return booster and progress of a checkpoint, or else of the initial model."""
    if checkpoint is not None and not is_forest(params):
        report = _list_report_callbacks(callbacks)[0]
        initial = report.get_model(checkpoint, report.filename)
        known = BoostingProgress.load(checkpoint)
        if known is not None:
            return initial, known
    if initial is None:
        return None, BoostingProgress()
    rounds = initial.current_iteration()
    return initial, BoostingProgress(rounds, details={"begin": rounds})


def _replay_evaluations(
    callbacks: Sequence[Callback], progress: BoostingProgress, env: Callable[..., CallbackEnv]
) -> None:
    """Replay the rounds of earlier attempts to callbacks whose state is the evaluations.

    Raises:
        EarlyStopException: A callback stops training.
    """
    maximized = progress.details.get("maximized", ())
    replayable = sorted(
        (callback for callback in callbacks if isinstance(callback, _REPLAYABLE_CALLBACKS)),
        key=attrgetter("order"),
    )
    for iteration, evaluated in enumerate(progress.iter_rounds(), progress.first_recorded_round):
        results = [
            make_eval_result(data, metric, values[0], metric in maximized)
            for data, by_metric in evaluated.items()
            for metric, values in by_metric.items()
        ]
        for callback in replayable:
            callback(env(iteration=iteration, evaluation_result_list=results))
