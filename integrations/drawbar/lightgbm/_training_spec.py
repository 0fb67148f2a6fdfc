"""LightGBMTrainingSpec: train from parameters on each worker.

The loop is the same as in `lightgbm.train`, with two differences. Metrics are made global before
callbacks receive them. On resume, rows start from the predictions of the earlier trees, these trees
are inserted before the new ones, and early stopping receives the evaluations so far. LightGBM sums
leaf values in the order of the trees in training and prediction, so that the scores are identical
to an uninterrupted run.
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
    """Training with LightGBM that is described by parameters.

    Args:
        num_boost_round: Total number of rounds. Default: 100, as in `lightgbm.train`.
        feval: Custom metric of `lightgbm.train`, or a list of them.
    """

    stages_on_disk = True  # in memory, rows would be held in addition to the sample and the bins
    parameter_aliases = PARAMETER_ALIASES
    column_format = ColumnFormat(keep_float64=True, negative_is_missing=True)  # as in LightGBM

    num_boost_round: int = 100
    feval: Any | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether user code runs on the workers."""
        objective = get_parameter(self.params, "objective")
        return super().runs_user_code or callable(objective) or bool(self.feval)

    @property
    def averages_percentiles(self) -> bool:
        """Whether the objective sets leaf values to percentiles of a worker's rows."""
        return get_parameter(self.params, "objective") in PERCENTILE_OBJECTIVES

    def validate(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver."""
        if len(self.columns.labels) > 1:
            raise ValueError(
                f"label_column is {list(self.columns.labels)}, but LightGBM supports one output. "
                "Train one model per label."
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
        shards.clear()  # the booster contains all data
        self.run_rounds(booster, params, report, progress)

    def _report_callback(self) -> RayTrainReportCallback:
        reports = [
            callback for callback in self.callbacks if isinstance(callback, RayTrainReportCallback)
        ]
        return reports[0] if reports else RayTrainReportCallback()

    def _params(self, features: int) -> dict[str, object]:
        """Add this worker's parameters to those that the user has not set."""
        params = {"verbosity": -1, **add_network_parameters(self.params)}
        return {**choose_histogram_layout(params, features), **params}

    def _make_booster(
        self, shards: dict[str, Shard], params: dict[str, object], earlier: Booster | None
    ) -> Booster:
        """Create the booster and its datasets."""
        training, *validation = shards.values()
        if callable(get_parameter(params, "objective")):
            params = {**params, str(find_alias(params, "objective")): "none"}
        bins = compute_shared_bins(training, params)
        booster = Booster(params, make_dataset(training, bins, params, earlier))
        booster.set_train_data_name(training.name)  # early stopping ignores this name
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
        """Train the remaining rounds."""
        callbacks = [report, *(callback for callback in self.callbacks if callback is not report)]
        if self.early_stopping_rounds is not None:
            callbacks.append(early_stopping(self.early_stopping_rounds, params))
        callbacks.sort(key=lambda callback: getattr(callback, "order", 0))
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
            training_results = booster.eval_train(self.feval) if with_training else []
            return [*training_results, *booster.eval_valid(self.feval)]

        before = [
            callback for callback in callbacks if getattr(callback, "before_iteration", False)
        ]
        after = [callback for callback in callbacks if callback not in before]
        try:
            replay_evaluations(after, progress, env)
            for iteration in range(progress.rounds, self.num_boost_round):
                for callback in before:
                    callback(env(iteration=iteration, evaluation_result_list=None))
                booster.update(fobj=custom)
                results = evaluation()
                for callback in after:
                    callback(env(iteration=iteration, evaluation_result_list=results))

        except EarlyStopException as stop:
            booster.best_iteration = stop.best_iteration + 1
