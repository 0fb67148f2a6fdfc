"""Report boosting rounds, save the booster, and load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xgboost import Booster
from xgboost.callback import TrainingCallback

from drawbar._boosting.checkpoint import BoosterCheckpoint, load_model
from drawbar._boosting.progress import BoostingProgress, EvaluationHistory
from drawbar._boosting.report_callback import MetricSelection, RoundReporter
from drawbar.train import Checkpoint, ValidationTaskConfig


class RayTrainReportCallback(TrainingCallback):
    """Report every boosting round, and save the booster every n rounds and at the end.

    Every rank reports the same metrics, because XGBoost combines the values of all workers. Their
    names are `<dataset>-<metric>`. A report takes microseconds and does not wait for other ranks;
    the driver receives it within a quarter of a second. Rank 0 saves the booster and the progress
    that `drawbar.xgboost.train` needs to resume.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from reported name to
            XGBoost's name. Default: all.
        filename: Filename of the model in the checkpoint. Its extension determines the format, as
            in `Booster.save_model`.
        frequency: Save a checkpoint every n rounds; 0 to save only at the end.
        checkpoint_at_end: Whether to save a checkpoint at the end of training.
        results_postprocessing_fn: Called with the evaluations so far, as
            `{"<dataset>-<metric>": [value of each round]}`. Returns the metrics to report in place
            of the latest values.
        validation: Whether to validate each checkpoint. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value, or a metric does not exist.

    Example:
        ```python
        callback = RayTrainReportCallback(metrics="validation-auc", frequency=10)
        trainer = XGBoostTrainer(
            params=params, label_column="target", datasets=datasets, callbacks=[callback]
        )
        ```
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
        """True if a subclass or a `results_postprocessing_fn` adds user code."""
        return type(self) is not RayTrainReportCallback or self._reports.runs_user_code

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Load the booster of a checkpoint.

        Raises:
            FileNotFoundError: The checkpoint has no model file.
        """
        return load_model(checkpoint, filename, lambda path: Booster(model_file=path))

    def restore(self, progress: BoostingProgress) -> None:
        """Continue after the rounds of an earlier attempt or run."""
        self._progress = progress
        self._reports.on_resume(progress.rounds)

    def after_iteration(self, model: object, epoch: int, evals_log: EvaluationHistory) -> bool:
        """Report a round."""
        self._progress = BoostingProgress(epoch + 1, evals_log)
        self._reports.on_round_end(epoch + 1, evals_log, lambda path: self._save(model, path))
        return False

    def after_training(self, model: object) -> object:
        """Save the model unless the last round was saved."""
        num_rounds, history = self._progress.rounds, self._progress.history
        self._reports.on_training_end(num_rounds, history, lambda path: self._save(model, path))
        return model

    def _save(self, model: Any, directory: Path) -> None:
        model.save_model(directory / self._filename)
        self._progress.save(directory)

    def load_resume_state(
        self, checkpoint: Checkpoint | None
    ) -> tuple[BoostingProgress, Booster | None]:
        """Return the progress and the booster in a checkpoint.

        Without a checkpoint, or if it has no booster, the progress is 0 rounds and the booster is
        None. If it has a booster but no progress, the booster's number of rounds is the progress.
        """
        if checkpoint is None:
            return BoostingProgress(), None
        try:
            booster = self.get_model(checkpoint, self._filename)
        except FileNotFoundError:
            return BoostingProgress(), None
        progress = BoostingProgress.load(checkpoint)
        return progress or BoostingProgress(booster.num_boosted_rounds()), booster


class XGBoostCheckpoint(BoosterCheckpoint[Booster]):
    """Checkpoint with one booster, as saved by `RayTrainReportCallback`.

    Args:
        path: Directory or URI of the checkpoint.
        filesystem: Filesystem of `path`. Default: derived from the path.

    Example:
        ```python
        checkpoint = XGBoostCheckpoint.from_model(booster)
        drawbar.train.report({"error": error}, checkpoint=checkpoint)
        booster = XGBoostCheckpoint(result.checkpoint.path).get_model()
        ```
    """

    MODEL_FILENAME = RayTrainReportCallback.CHECKPOINT_NAME
    CALLBACK = RayTrainReportCallback
