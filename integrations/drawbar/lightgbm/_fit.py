"""Training without a training function: what each worker does with its shards.

The loop is that of `lightgbm.train`, with two differences. The evaluation of a round is made global
before any callback sees it. And a resumed run does not begin at round 0: its rows start from what
the earlier trees predict, these trees are put before the new ones, and early stopping is told the
evaluations so far. LightGBM sums leaf values in the order of the trees whether it trains or
predicts, so the scores are the same to the last bit as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
from lightgbm import Booster
from lightgbm.callback import CallbackEnv, EarlyStopException

from drawbar._boosting import Fit, History, Progress, Reading, Shard
from drawbar.lightgbm import _native
from drawbar.lightgbm._backend import get_network_params
from drawbar.lightgbm._data import agree_on_bins, make_dataset
from drawbar.lightgbm._evaluation import Evaluation, make_evaluation
from drawbar.lightgbm._parameters import (
    check_labels,
    check_parameters,
    histogram_layout,
    name_of,
    value_of,
)
from drawbar.lightgbm._report import RayTrainReportCallback
from drawbar.train import Checkpoint, ScalingConfig, get_checkpoint

Callback = Callable[[CallbackEnv], None]


@dataclass(frozen=True, kw_only=True)
class LightGBMFit(Fit):
    """A declared training with LightGBM.

    Args:
        num_boost_round: Rounds in total, as in `Fit`; by default 100, as in `lightgbm.train`.
        feval: A custom metric as `lightgbm.train` takes it, or a list of them.
    """

    waits_on_disk = True  # in memory they would lie beside the sample and the bins made of them
    reading = Reading(doubles=True, negative_is_missing=True)  # as LightGBM itself

    num_boost_round: int = 100
    feval: Any | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user runs on the workers."""
        objective = value_of(self.params, "objective")
        return super().runs_user_code or callable(objective) or bool(self.feval)

    def check(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver."""
        check_parameters(self.params, scaling_config)

    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round."""
        for shard in shards.values():
            check_labels(shard, self.params)
        report, params = self._report(), self._params(len(shards["train"].schema.features))
        earlier, progress = None, Progress()
        if value_of(params, "boosting") not in _FORESTS:
            earlier, progress = resume_from(get_checkpoint(), report)
        params = _other_draws(params, progress.rounds)
        booster = self._booster(shards, params, earlier)
        shards.clear()  # the booster has all
        self._boost(booster, params, report, progress)

    def _report(self) -> RayTrainReportCallback:
        given = [each for each in self.callbacks if isinstance(each, RayTrainReportCallback)]
        return given[0] if given else RayTrainReportCallback()

    def _params(self, features: int) -> dict[str, Any]:
        """Give the user's parameters, and those of the worker where the user has set none."""
        learner = value_of(self.params, "tree_learner", "data").removesuffix("_parallel")
        ours = get_network_params(learner)
        threads = int(value_of(self.params, "num_threads", 0))
        share = name_of(self.params, "num_threads") if threads <= 0 else None
        given = {name: v for name, v in self.params.items() if v is not None and name != share}
        added = {name: ours[name] for name in ours if name_of(given, name) is None}
        params = {"verbosity": -1, **added, **given}
        return {**histogram_layout(params, features), **params}

    def _booster(
        self, shards: dict[str, Shard], params: dict[str, Any], earlier: Booster | None
    ) -> Booster:
        """Make the booster that will be trained, with its data."""
        training, *validation = shards.values()
        if callable(value_of(params, "objective")):
            params = {**params, str(name_of(params, "objective")): "none"}
        bins = agree_on_bins(training, params)
        booster = Booster(params, make_dataset(training, bins, params, earlier))
        booster.set_train_data_name(training.name)  # early stopping leaves it out by this name
        for shard in validation:
            booster.add_valid(make_dataset(shard, bins, params, earlier), shard.name)
        if earlier is not None:
            _native.put_before(booster, earlier)
        return booster

    def _boost(
        self,
        booster: Booster,
        params: dict[str, Any],
        report: RayTrainReportCallback,
        progress: Progress,
    ) -> None:
        """Train the rounds that are left."""
        callbacks = [report, *(each for each in self.callbacks if each is not report)]
        if self.early_stopping_rounds is not None:
            callbacks.append(early_stopping(self.early_stopping_rounds, params))
        callbacks.sort(key=lambda each: getattr(each, "order", 0))
        objective = value_of(params, "objective")
        custom = objective if callable(objective) else None

        begin = progress.details.get("begin", 0)  # of what callbacks have seen
        with_training = value_of(params, "is_provide_training_metric")

        def evaluation() -> list[Evaluation]:
            own = booster.eval_train(self.feval) if with_training else []
            return [*own, *booster.eval_valid(self.feval)]

        def call(iteration: int, found: list[Evaluation] | None, which: Sequence[Callback]) -> None:
            env = CallbackEnv(booster, params, iteration, begin, self.num_boost_round, found)
            for callback in which:
                callback(env)

        before = [each for each in callbacks if getattr(each, "before_iteration", False)]
        after = [each for each in callbacks if each not in before]
        try:
            report.resume(progress)
            remembering = [each for each in after if isinstance(each, _REMEMBERING)]
            for iteration, evaluated in enumerate(progress.evaluations(), progress.first):
                call(iteration, evaluations(evaluated, progress), remembering)
            for iteration in range(progress.rounds, self.num_boost_round):
                call(iteration, None, before)
                booster.update(fobj=custom)
                call(iteration, evaluation(), after)
        except EarlyStopException as stop:
            booster.best_iteration = stop.best_iteration + 1


_FORESTS = ("rf", "random_forest")
"""Whose trees LightGBM cannot put on earlier ones: a killed forest begins anew."""

_DRAWS = {"bagging_seed": 3, "feature_fraction_seed": 2, "extra_seed": 6, "drop_seed": 4}
"""Seeds of what is drawn every round, and LightGBM's defaults."""


def _other_draws(params: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Have a resumed training draw other rows and features than its first rounds did."""
    if not rounds:
        return params
    seeds = {name_of(params, name) or name: default for name, default in _DRAWS.items()}
    return {**params, **{name: params.get(name, seed) + rounds for name, seed in seeds.items()}}


_REMEMBERING = (type(lightgbm.early_stopping(1)), type(lightgbm.record_evaluation({})))
"""Callbacks whose state is the evaluations so far, and nothing else."""


def early_stopping(rounds: int, params: dict[str, Any]) -> Callback:
    """Give LightGBM's own callback, with what the parameters say of it."""
    callback: Callback = lightgbm.early_stopping(
        rounds,
        first_metric_only=bool(value_of(params, "first_metric_only", False)),
        min_delta=value_of(params, "early_stopping_min_delta", 0.0),
        verbose=False,
    )
    return callback


def resume_from(
    checkpoint: Checkpoint | None, report: RayTrainReportCallback
) -> tuple[Booster | None, Progress]:
    """Give what an earlier attempt, or another run, has left."""
    if checkpoint is None:
        return None, Progress()
    booster = report.get_model(checkpoint, report.filename)
    rounds = booster.current_iteration()
    return booster, Progress.load(checkpoint) or Progress(rounds, details={"begin": rounds})


def evaluations(evaluated: History, progress: Progress) -> list[Evaluation]:
    """Give what LightGBM had found in a round of an earlier attempt."""
    maximized = progress.details.get("maximized", ())
    return [
        make_evaluation(data, metric, values[0], metric in maximized)
        for data, by_metric in evaluated.items()
        for metric, values in by_metric.items()
    ]
