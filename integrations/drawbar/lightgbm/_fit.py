"""Training without a training function: what each worker does with its shards.

The loop is that of `lightgbm.train`, with two differences. The evaluation of a round is made global
before any callback sees it. And a resumed run does not begin at round 0: its rows start from what
the earlier trees predict, these trees are put before the new ones, and early stopping is told the
evaluations so far. LightGBM sums leaf values in the order of the trees whether it trains or
predicts, so the scores are the same to the last bit as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from lightgbm import Booster
from lightgbm.callback import CallbackEnv, EarlyStopException

from drawbar._boosting import Fit, Progress, Reading, Shard
from drawbar.lightgbm import _native
from drawbar.lightgbm._backend import with_own_network
from drawbar.lightgbm._data import agree_on_bins, make_dataset
from drawbar.lightgbm._evaluation import Evaluation
from drawbar.lightgbm._loop import (
    early_stopping,
    is_forest,
    other_draws,
    replay,
    resume_from,
)
from drawbar.lightgbm._parameters import (
    PERCENTILE_OBJECTIVES,
    SPELLED,
    check_labels,
    check_parameters,
    histogram_layout,
    name_of,
    value_of,
)
from drawbar.lightgbm._report import RayTrainReportCallback
from drawbar.train import ScalingConfig, get_checkpoint


@dataclass(frozen=True, kw_only=True)
class LightGBMFit(Fit):
    """A declared training with LightGBM.

    Args:
        num_boost_round: Rounds in total, as in `Fit`; by default 100, as in `lightgbm.train`.
        feval: A custom metric as `lightgbm.train` takes it, or a list of them.
    """

    waits_on_disk = True  # in memory they would lie beside the sample and the bins made of them
    spelled = SPELLED
    reading = Reading(doubles=True, negative_is_missing=True)  # as LightGBM itself

    num_boost_round: int = 100
    feval: Any | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user runs on the workers."""
        objective = value_of(self.params, "objective")
        return super().runs_user_code or callable(objective) or bool(self.feval)

    @property
    def averages_percentiles(self) -> bool:
        """True if the objective sets leaf values to percentiles of a worker's rows."""
        return value_of(self.params, "objective") in PERCENTILE_OBJECTIVES

    def check(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver."""
        if len(self.columns.labels) > 1:
            raise ValueError(
                f"label_column is {list(self.columns.labels)}, but LightGBM learns one output; "
                "train a model for each"
            )
        check_parameters(self.params, scaling_config)

    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round."""
        for shard in shards.values():
            check_labels(shard, self.params)
        report, params = self._report(), self._params(len(shards["train"].schema.features))
        earlier, progress = resume_from(None if is_forest(params) else get_checkpoint(), report)
        params = other_draws(params, progress.rounds)
        booster = self._booster(shards, params, earlier)
        shards.clear()  # the booster has all
        self._boost(booster, params, report, progress)

    def _report(self) -> RayTrainReportCallback:
        given = [each for each in self.callbacks if isinstance(each, RayTrainReportCallback)]
        return given[0] if given else RayTrainReportCallback()

    def _params(self, features: int) -> dict[str, object]:
        """Give the user's parameters, and those of the worker where the user has set none."""
        params = {"verbosity": -1, **with_own_network(self.params)}
        return {**histogram_layout(params, features), **params}

    def _booster(
        self, shards: dict[str, Shard], params: dict[str, object], earlier: Booster | None
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
        params: dict[str, object],
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

        begin = report.resume(progress)
        env = partial(
            CallbackEnv,
            booster,
            params,
            begin_iteration=begin,
            end_iteration=self.num_boost_round,
        )
        with_training = value_of(params, "is_provide_training_metric")

        def evaluation() -> list[Evaluation]:
            own = booster.eval_train(self.feval) if with_training else []
            return [*own, *booster.eval_valid(self.feval)]

        before = [each for each in callbacks if getattr(each, "before_iteration", False)]
        after = [each for each in callbacks if each not in before]
        try:
            replay(after, progress, env)
            for iteration in range(progress.rounds, self.num_boost_round):
                for callback in before:
                    callback(env(iteration=iteration, evaluation_result_list=None))
                booster.update(fobj=custom)
                found = evaluation()
                for callback in after:
                    callback(env(iteration=iteration, evaluation_result_list=found))
        except EarlyStopException as stop:
            booster.best_iteration = stop.best_iteration + 1
