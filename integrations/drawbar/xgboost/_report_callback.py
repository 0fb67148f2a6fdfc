"""RayTrainReportCallback: XGBoost's rounds to reports and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xgboost import Booster
from xgboost.callback import TrainingCallback

from drawbar._boosting import (
    BoostingProgress,
    EvaluationHistory,
    MetricSelection,
    RoundReporter,
    load_model,
)
from drawbar.train import Checkpoint, ValidationTaskConfig


class RayTrainReportCallback(TrainingCallback):
    """Reports every boosting round, and saves the model every few rounds and at the end.

    Every rank reports the metrics, named `<dataset>-<metric>`; XGBoost has reduced them over all
    workers. Reports of a round need no other rank and take microseconds; the driver hears of them
    within a quarter of a second. Rank 0 saves the model, and beside it what `drawbar.xgboost.train`
    needs to go on from there.

    Args:
        metrics: Which metrics to report: a name, a list of names, or a dict from the name to report
            to XGBoost's. Default: all.
        filename: The model's file in the checkpoint; its ending is the format, as for
            `Booster.save_model`.
        frequency: Save a checkpoint every so many rounds; 0 saves none on the way.
        checkpoint_at_end: Save one when training has ended.
        results_postprocessing_fn: Called with all values so far as `{"<dataset>-<metric>": [...]}`;
            gives the metrics to report.
        validation: Have each checkpoint validated, as for `drawbar.train.report`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value, or a round has no such
            metric.
    """

    CHECKPOINT_NAME = "model.ubj"

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
        super().__init__()
        self._reports = RoundReporter(
            metrics, frequency, checkpoint_at_end, results_postprocessing_fn, validation
        )
        self._filename = filename
        self._progress = BoostingProgress()

    @property
    def runs_user_code(self) -> bool:
        """Whether code of the user is in it; unlike other callbacks, most have none."""
        return type(self) is not RayTrainReportCallback or self._reports.runs_user_code

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Load the booster of a checkpoint.

        Raises:
            FileNotFoundError: The checkpoint has no such file.
        """
        return load_model(checkpoint, filename, lambda path: Booster(model_file=path))

    def after_iteration(self, model: object, epoch: int, evals_log: EvaluationHistory) -> bool:
        """Report the round."""
        self._progress = BoostingProgress(epoch + 1, evals_log)
        self._reports.on_round_end(epoch + 1, evals_log, lambda path: self._save(model, path))
        return False

    def after_training(self, model: object) -> object:
        """Save the model, unless the last round has."""
        done, history = self._progress.rounds, self._progress.history
        self._reports.on_training_end(done, history, lambda path: self._save(model, path))
        return model

    def _save(self, model: Any, folder: Path) -> None:
        model.save_model(folder / self._filename)
        self._progress.save(folder)

    def load_resume_state(
        self, checkpoint: Checkpoint | None
    ) -> tuple[BoostingProgress, Booster | None]:
        """Give how far a checkpoint has come and its booster; none if it has no such booster.

        A booster alone, which others have saved, has come as far as its rounds.
        """
        if checkpoint is None:
            return BoostingProgress(), None
        try:
            booster = self.get_model(checkpoint, self._filename)
        except FileNotFoundError:
            return BoostingProgress(), None
        return BoostingProgress.load(checkpoint) or BoostingProgress(
            booster.num_boosted_rounds()
        ), booster
