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

from drawbar._boosting import BoostingProgress, ColumnFormat, Shard, TrainingSpec
from drawbar.lightgbm import _c_api
from drawbar.lightgbm._backend import add_network_parameters
from drawbar.lightgbm._data import compute_shared_bins, make_dataset
from drawbar.lightgbm._evaluation import EvalResult
from drawbar.lightgbm._parameters import (
    PARAMETER_ALIASES,
    PERCENTILE_OBJECTIVES,
    check_labels,
    check_parameters,
    choose_histogram_layout,
    find_alias,
    get_parameter,
)
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.lightgbm._train import (
    early_stopping,
    is_random_forest,
    load_resume_state,
    offset_seeds,
    replay_evaluations,
)
from drawbar.train import ScalingConfig, get_checkpoint


@dataclass(frozen=True, kw_only=True)
class LightGBMTrainingSpec(TrainingSpec):
    """A declared training with LightGBM.

    Args:
        num_boost_round: Rounds in total, as in `Fit`; by default 100, as in `lightgbm.train`.
        feval: A custom metric as `lightgbm.train` takes it, or a list of them.
    """

    stages_on_disk = True  # in memory they would lie beside the sample and the bins made of them
    parameter_aliases = PARAMETER_ALIASES
    column_format = ColumnFormat(keep_float64=True, negative_is_missing=True)  # as LightGBM itself

    num_boost_round: int = 100
    feval: Any | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user runs on the workers."""
        objective = get_parameter(self.params, "objective")
        return super().runs_user_code or callable(objective) or bool(self.feval)

    @property
    def averages_percentiles(self) -> bool:
        """True if the objective sets leaf values to percentiles of a worker's rows."""
        return get_parameter(self.params, "objective") in PERCENTILE_OBJECTIVES

    def validate(self, scaling_config: ScalingConfig) -> None:
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
        report, params = self._report_callback(), self._params(len(shards["train"].schema.features))
        earlier, progress = load_resume_state(
            None if is_random_forest(params) else get_checkpoint(), report
        )
        params = offset_seeds(params, progress.rounds)
        booster = self._make_booster(shards, params, earlier)
        shards.clear()  # the booster has all
        self.run_rounds(booster, params, report, progress)

    def _report_callback(self) -> RayTrainReportCallback:
        given = [each for each in self.callbacks if isinstance(each, RayTrainReportCallback)]
        return given[0] if given else RayTrainReportCallback()

    def _params(self, features: int) -> dict[str, object]:
        """Give the user's parameters, and those of the worker where the user has set none."""
        params = {"verbosity": -1, **add_network_parameters(self.params)}
        return {**choose_histogram_layout(params, features), **params}

    def _make_booster(
        self, shards: dict[str, Shard], params: dict[str, object], earlier: Booster | None
    ) -> Booster:
        """Make the booster that will be trained, with its data."""
        training, *validation = shards.values()
        if callable(get_parameter(params, "objective")):
            params = {**params, str(find_alias(params, "objective")): "none"}
        bins = compute_shared_bins(training, params)
        booster = Booster(params, make_dataset(training, bins, params, earlier))
        booster.set_train_data_name(training.name)  # early stopping leaves it out by this name
        for shard in validation:
            booster.add_valid(make_dataset(shard, bins, params, earlier), shard.name)
        if earlier is not None:
            _c_api.prepend_trees(booster, earlier)
        return booster

    def run_rounds(
        self,
        booster: Booster,
        params: dict[str, object],
        report: RayTrainReportCallback,
        progress: BoostingProgress,
    ) -> None:
        """Train the rounds that are left."""
        callbacks = [report, *(each for each in self.callbacks if each is not report)]
        if self.early_stopping_rounds is not None:
            callbacks.append(early_stopping(self.early_stopping_rounds, params))
        callbacks.sort(key=lambda each: getattr(each, "order", 0))
        objective = get_parameter(params, "objective")
        custom = objective if callable(objective) else None

        begin = report.restore(progress)
        env = partial(
            CallbackEnv,
            booster,
            params,
            begin_iteration=begin,
            end_iteration=self.num_boost_round,
        )
        with_training = get_parameter(params, "is_provide_training_metric")

        def evaluation() -> list[EvalResult]:
            own = booster.eval_train(self.feval) if with_training else []
            return [*own, *booster.eval_valid(self.feval)]

        before = [each for each in callbacks if getattr(each, "before_iteration", False)]
        after = [each for each in callbacks if each not in before]
        try:
            replay_evaluations(after, progress, env)
            for iteration in range(progress.rounds, self.num_boost_round):
                for callback in before:
                    callback(env(iteration=iteration, evaluation_result_list=None))
                booster.update(fobj=custom)
                found = evaluation()
                for callback in after:
                    callback(env(iteration=iteration, evaluation_result_list=found))
        except EarlyStopException as stop:
            booster.best_iteration = stop.best_iteration + 1
