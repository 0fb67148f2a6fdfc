"""For the training function: `train`, which goes on where the run's newest checkpoint ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightgbm
from lightgbm import Booster, Dataset
from lightgbm.callback import CallbackEnv, EarlyStopException

from drawbar._boosting import BoostingProgress
from drawbar.lightgbm._backend import add_network_parameters
from drawbar.lightgbm._evaluation import make_eval_result
from drawbar.lightgbm._parameters import drop_parameters, find_alias, get_parameter
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.train import Checkpoint
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
    """Do what `lightgbm.train` does, on all workers, and resume: only what is left is trained.

    The run's network and CPUs are used without `get_network_params`. A resumed training gives the
    booster that an uninterrupted one would: the rounds keep their numbers, early stopping and
    learning rates go on. LightGBM saves no state of its random draws, so that rows and features
    (`bagging_fraction`, `feature_fraction`) are drawn anew; `dart` drops new trees only, and `rf`
    begins anew.

    The arguments are those of `lightgbm.train`. With no `RayTrainReportCallback` among the
    callbacks there is one with its defaults, which saves at the end; give one with a `frequency` to
    go on from the middle after a failure.

    Args:
        params: Parameters of the booster.
        train_set: This worker's part of the training data. To resume, LightGBM needs its features:
            one that has been constructed before needs `free_raw_data=False`.
        num_boost_round: Rounds in total, those before a resume included.
        valid_sets: What to evaluate each round.
        valid_names: Their names.
        feval: A custom metric, or a list of them; see `allreduce_metric` and `GlobalEvaluation`.
        init_model: What to start from; its rounds do not count. A checkpoint of the run, which has
            them too, goes before it.
        keep_training_booster: Whether the booster that is given back can be trained further.
        callbacks: Further callbacks.

    Raises:
        RuntimeError: Called outside a training function.
        ValueError: A parameter is wrong, or a dataset with an `init_score` is to be resumed, which
            LightGBM would replace.
    """
    params = add_network_parameters(params)
    rounds = int(get_parameter(params, "num_iterations", num_boost_round))
    all_callbacks = [*(callbacks or ()), *_early_stopping_callbacks(params)]
    params = drop_parameters(params, "num_iterations", "early_stopping_round")
    valid_sets = [valid_sets] if isinstance(valid_sets, Dataset) else list(valid_sets or ())
    valid_names = [valid_names] if isinstance(valid_names, str) else list(valid_names or ())

    reports = [each for each in all_callbacks if isinstance(each, RayTrainReportCallback)]
    if not reports:
        reports = [RayTrainReportCallback()]
        all_callbacks = [*reports, *all_callbacks]
    initial = Booster(model_file=init_model) if isinstance(init_model, str | Path) else init_model
    inherited = start_training()
    init_model, progress = load_resume_state(
        None if is_random_forest(params) else inherited, reports[0], initial
    )
    end = rounds + (0 if initial is None else initial.current_iteration())
    begin = min(each.restore(progress) for each in reports)
    if init_model is not None:
        _require_no_init_score([train_set, *valid_sets])
        init_model.set_train_data_name(_train_data_name(train_set, valid_sets, valid_names))
        env = partial(CallbackEnv, init_model, params, begin_iteration=begin, end_iteration=end)
        if (
            _is_stopped_by_replay(init_model, progress, all_callbacks, env)
            or progress.rounds >= end
        ):
            return init_model
    return lightgbm.train(
        offset_seeds(params, progress.rounds - begin),
        train_set,
        end - progress.rounds,
        valid_sets=valid_sets or None,
        valid_names=valid_names or None,
        feval=feval,
        init_model=init_model,
        keep_training_booster=keep_training_booster,
        callbacks=[
            _WithBeginIteration(begin, each, n - len(all_callbacks))
            for n, each in enumerate(all_callbacks)
        ],
    )


class _WithBeginIteration:
    """A callback that hears when the training has begun, where LightGBM says when it went on."""

    def __init__(self, begin: int, callback: Callback, order: int) -> None:
        self.order = getattr(callback, "order", order)  # LightGBM's own default
        self.before_iteration = getattr(callback, "before_iteration", False)
        self._begin = begin
        self._callback = callback

    def __call__(self, env: CallbackEnv) -> None:
        self._callback(
            CallbackEnv(
                env.model,
                env.params,
                env.iteration,
                self._begin,
                env.end_iteration,
                env.evaluation_result_list,
            )
        )


def _early_stopping_callbacks(params: Mapping[str, object]) -> list[Callback]:
    """Give what the parameters say of early stopping, as a callback that can be resumed."""
    rounds = get_parameter(params, "early_stopping_round")
    return [early_stopping(rounds, params)] if rounds is not None and rounds > 0 else []


def _train_data_name(
    train_set: Dataset, valid_sets: Sequence[Dataset], names: Sequence[str]
) -> str:
    """Give the name that the training data is evaluated by, which early stopping leaves out."""
    known = zip(valid_sets, names, strict=False)
    return next((name for data, name in known if data is train_set), "training")


def _is_stopped_by_replay(
    init_model: Booster,
    progress: BoostingProgress,
    callbacks: Sequence[Callback],
    env: Callable[..., CallbackEnv],
) -> bool:
    """Show the callbacks the rounds that were; says whether these end the training."""
    try:
        replay_evaluations(callbacks, progress, env)
    except EarlyStopException as stop:
        init_model.best_iteration = stop.best_iteration + 1
        return True
    return False


def _require_no_init_score(datasets: Sequence[Dataset]) -> None:
    if any(data.init_score is not None for data in datasets):
        raise ValueError(
            "a dataset has an init_score, which LightGBM replaces by what the earlier trees "
            "predict where a training goes on; train from the start, without a checkpoint or "
            "init_model, or declare it: LightGBMTrainer(params=..., base_margin_column=...)"
        )


_FORESTS = ("rf", "random_forest")
"""Whose trees LightGBM cannot put on earlier ones: a killed forest begins anew."""

_SEED_DEFAULTS = {"bagging_seed": 3, "feature_fraction_seed": 2, "extra_seed": 6, "drop_seed": 4}
"""Seeds of what is drawn every round, and LightGBM's defaults."""

_REPLAYABLE_CALLBACKS = (type(lightgbm.early_stopping(1)), type(lightgbm.record_evaluation({})))
"""Callbacks whose state is the evaluations so far, and nothing else."""


def is_random_forest(params: Mapping[str, object]) -> bool:
    """Whether each tree is of its own, so that there is nothing to go on from."""
    return get_parameter(params, "boosting") in _FORESTS


def offset_seeds(params: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Have a resumed training draw other rows and features than its first rounds did."""
    if not rounds:
        return params
    seeds = {find_alias(params, name) or name: default for name, default in _SEED_DEFAULTS.items()}
    return {**params, **{name: params.get(name, seed) + rounds for name, seed in seeds.items()}}


def early_stopping(rounds: int, params: Mapping[str, object]) -> Callback:
    """Give LightGBM's own callback, with what the parameters say of it."""
    callback: Callback = lightgbm.early_stopping(
        rounds,
        first_metric_only=bool(get_parameter(params, "first_metric_only", False)),
        min_delta=get_parameter(params, "early_stopping_min_delta", 0.0),
        verbose=False,
    )
    return callback


def load_resume_state(
    checkpoint: Checkpoint | None,
    report: RayTrainReportCallback,
    initial: Booster | None = None,
) -> tuple[Booster | None, BoostingProgress]:
    """Give what an earlier attempt, or another run, has left; else what to start from."""
    if checkpoint is not None:
        initial = report.get_model(checkpoint, report.filename)
        known = BoostingProgress.load(checkpoint)
        if known is not None:
            return initial, known
    if initial is None:
        return None, BoostingProgress()
    rounds = initial.current_iteration()
    return initial, BoostingProgress(rounds, details={"begin": rounds})


def replay_evaluations(
    callbacks: Sequence[Callback], progress: BoostingProgress, env: Callable[..., CallbackEnv]
) -> None:
    """Show the rounds of earlier attempts to the callbacks that are made of nothing else.

    Raises:
        EarlyStopException: One of them ends the training.
    """
    maximized = progress.details.get("maximized", ())
    remembering = sorted(
        (each for each in callbacks if isinstance(each, _REPLAYABLE_CALLBACKS)),
        key=attrgetter("order"),
    )
    for iteration, evaluated in enumerate(progress.iter_rounds(), progress.first_recorded_round):
        found = [
            make_eval_result(data, metric, values[0], metric in maximized)
            for data, by_metric in evaluated.items()
            for metric, values in by_metric.items()
        ]
        for callback in remembering:
            callback(env(iteration=iteration, evaluation_result_list=found))
