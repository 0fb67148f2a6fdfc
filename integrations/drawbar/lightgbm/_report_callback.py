"""LightGBM's callback that reports: metrics after every round, a checkpoint now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lightgbm import Booster
from lightgbm.callback import CallbackEnv

from drawbar._boosting import (
    BoostingProgress,
    EvaluationHistory,
    MetricSelection,
    RoundReporter,
    load_model,
)
from drawbar.lightgbm._backend import on_success
from drawbar.lightgbm._evaluation import GlobalEvaluation
from drawbar.train import Checkpoint, ValidationTaskConfig


class RayTrainReportCallback:
    """Reports the metrics of every round, and saves the booster every so often.

    Pass it to `lightgbm.train(..., callbacks=[...])`, or to the `fit` of LightGBM's estimators. All
    ranks must have it. The metrics are global, also for the callbacks that come after it, so that
    `lightgbm.early_stopping` ends all ranks on one round; see `GlobalEvaluation`. The driver hears
    of a round within a quarter of a second.

    Args:
        metrics: Which to report: one name or several as `<dataset>-<metric>`, or a dict from the
            name to report to that one; those of `lightgbm.cv` end in "-mean" and "-stdv". Default:
            all.
        filename: Name of the booster's file in a checkpoint; LightGBM's own text format.
        frequency: Save every so many rounds; 0 for none on the way.
        checkpoint_at_end: Save once more when the training function returns, unless the last round
            was saved already.
        results_postprocessing_fn: Called with the evaluations so far, as
            `{"<dataset>-<metric>": [value of each round]}`; gives the metrics to report instead of
            the newest values.
        validation: Have each checkpoint validated, as for `drawbar.train.report`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    CHECKPOINT_NAME = "model.txt"
    order = GlobalEvaluation.order
    before_iteration = False

    def __init__(
        self,
        metrics: MetricSelection | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, list[float]]], Mapping[str, object]]
        | None = None,
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        self.filename = filename
        self._reports = RoundReporter(
            metrics, frequency, checkpoint_at_end, results_postprocessing_fn, validation
        )
        self._global_evaluation = GlobalEvaluation()
        self._maximized: set[str] = set()
        self._history: EvaluationHistory = {}
        self._rounds = 0
        self._first_round: int = 0
        self._model: Booster | None = None

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user is in it; unlike other callbacks, most have none."""
        return type(self) is not RayTrainReportCallback or self._reports.runs_user_code

    def restore(self, progress: BoostingProgress) -> int:
        """Go on after the rounds of an earlier attempt; gives the first that was seen."""
        self._rounds, self._history = progress.rounds, progress.history
        self._maximized = set(progress.details.get("maximized", ()))
        self._first_round = progress.details.get("begin", 0)
        return self._first_round

    def __call__(self, env: CallbackEnv) -> None:
        """Report the round that has ended."""
        self._global_evaluation(env)
        self._record(env)
        if self._model is None:
            on_success(self._finish)
        self._model = env.model if isinstance(env.model, Booster) else None  # lightgbm.cv has many
        self._reports.on_round_end(self._rounds, self._history, self._save)

    def _record(self, env: CallbackEnv) -> None:
        self._rounds = env.iteration + 1
        for data, metric, value, maximize, *stdv in env.evaluation_result_list or ():
            if maximize:
                self._maximized.add(metric)
            values = {"": value} if not stdv else {"-mean": value, "-stdv": stdv[0]}
            for suffix, each in values.items():
                by_metric = self._history.setdefault(data, {})
                by_metric.setdefault(metric + suffix, []).append(each)

    def _finish(self) -> None:
        if self._model is not None:
            self._reports.on_training_end(self._rounds, self._history, self._save)

    def _save(self, folder: Path) -> None:
        assert self._model is not None
        self._model.save_model(folder / self.filename, num_iteration=-1)
        state = {
            "best_iteration": self._model.best_iteration,
            "maximized": sorted(self._maximized),
            "begin": self._first_round,
        }
        BoostingProgress(self._rounds, self._history, state).save(folder)

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Load the booster of a checkpoint, which predicts by its best round if one was found.

        Args:
            checkpoint: Of a run whose callback saved it.
            filename: As the callback had it.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
        """
        booster = load_model(checkpoint, filename, lambda path: Booster(model_file=path))
        progress = BoostingProgress.load(checkpoint)
        if progress is not None:
            booster.best_iteration = progress.details.get("best_iteration", -1)
        return booster
