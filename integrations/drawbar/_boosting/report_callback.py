"""RoundReporter: report boosting rounds and save checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from drawbar._boosting.progress import EvaluationHistory
from drawbar.train import (
    ValidationTaskConfig,
    checkpoint_dir,
    get_checkpoint,
    get_context,
    report,
    should_checkpoint,
)
from drawbar.train.backend import report_buffered

MetricSelection = str | Sequence[str] | Mapping[str, str]
"""Names of metrics, or a dict from reported names to the library's names."""


class RoundReporter:
    """Reports and checkpoints of both libraries' `RayTrainReportCallback`.

    Every rank reports its metrics after every round, which takes a few microseconds. The driver
    receives them within a quarter of a second. Only rank 0 saves checkpoints.

    Args:
        metrics: Metrics to report: one name or several as `<dataset>-<metric>`, or a dict from
            reported name to this name. Default: all.
        frequency: Save a checkpoint every n rounds; 0 to save only at the end.
        checkpoint_at_end: Whether to save a checkpoint at the end of training.
        results_postprocessing_fn: Called with the evaluations so far, as
            `{"<dataset>-<metric>": [value of each round]}`. Returns the metrics to report in place
            of the latest values.
        validation: Whether to validate each checkpoint. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    def __init__(
        self,
        metrics: MetricSelection | None,
        frequency: int,
        checkpoint_at_end: bool,
        results_postprocessing_fn: Callable[[dict[str, list[float]]], Mapping[str, object]] | None,
        validation: bool | ValidationTaskConfig,
    ) -> None:
        if isinstance(frequency, bool) or not isinstance(frequency, int):
            raise TypeError(f"frequency must be an int, found {frequency!r}.")
        if frequency < 0:
            raise ValueError(f"frequency must not be negative, found {frequency}.")
        if isinstance(metrics, str):
            metrics = [metrics]
        if metrics is None or isinstance(metrics, Mapping):
            self._names = metrics
        else:
            self._names = {name: name for name in metrics}
        self._frequency = frequency
        self._checkpoint_at_end = checkpoint_at_end
        self._saves = bool(frequency or checkpoint_at_end)
        self._postprocess = results_postprocessing_fn
        self._validation = validation
        self._last_saved_round = 0

    @property
    def runs_user_code(self) -> bool:
        """Whether a user function computes the metrics."""
        return self._postprocess is not None

    def on_round_end(
        self, num_rounds: int, history: EvaluationHistory, save: Callable[[Path], None] | None
    ) -> None:
        """Report a round, with a checkpoint if one is due or the run is to stop or to move.

        Args:
            num_rounds: Number of completed rounds, including those before a resume.
            history: Evaluations of these rounds.
            save: Writes model and progress to a directory. None if there is no single model, as in
                cross-validation.
        """
        # Without a function that saves, as in `lightgbm.cv`, no request could be fulfilled.
        is_requested = save is not None and self._saves and should_checkpoint()
        is_due = self._frequency and num_rounds % self._frequency == 0
        if save is not None and (is_requested or is_due):
            self._report_checkpoint(num_rounds, history, save)
        else:
            report_buffered(self._select_metrics(history))

    def on_training_end(
        self,
        num_rounds: int,
        history: EvaluationHistory,
        save: Callable[[Path], None],
        *,
        has_changed: bool = False,
    ) -> None:
        """Report a checkpoint at the end of training, unless the last round was already saved.

        Args:
            num_rounds: Number of completed rounds.
            history: Evaluations of these rounds.
            save: Writes model and progress to a directory.
            has_changed: Whether early stopping has changed the model after its last round.
        """
        has_new_rounds = num_rounds > self._last_saved_round
        if self._checkpoint_at_end and (has_new_rounds or has_changed):
            self._report_checkpoint(num_rounds, history, save)

    def on_resume(self, num_rounds: int) -> None:
        """Note which rounds a checkpoint of this run has, so that they are not saved again.

        A checkpoint of another run does not count, so that each run ends with a checkpoint.
        """
        checkpoint = get_checkpoint()
        manifest = None if checkpoint is None else checkpoint.manifest
        if manifest is not None and manifest.run_id == get_context().get_run_id():
            self._last_saved_round = num_rounds

    def _report_checkpoint(
        self, num_rounds: int, history: EvaluationHistory, save: Callable[[Path], None]
    ) -> None:
        self._last_saved_round = num_rounds
        metrics = self._select_metrics(history)
        if get_context().get_world_rank() > 0:
            report(metrics)
            return
        with checkpoint_dir() as path:
            save(path)
            report(metrics, checkpoint=path, validation=self._validation)

    def _select_metrics(self, history: EvaluationHistory) -> dict[str, object]:
        values = {
            f"{dataset}-{metric}": scores
            for dataset, by_metric in history.items()
            for metric, scores in by_metric.items()
        }
        if self._postprocess is not None:
            return dict(self._postprocess(values))
        if self._names is None:
            return {name: scores[-1] for name, scores in values.items()}
        unknown = set(self._names.values()) - set(values)
        if unknown:
            raise ValueError(
                f"RayTrainReportCallback(metrics=) has {sorted(unknown)}, but the evaluations are "
                f"{sorted(values) or 'none'}."
            )
        return {name: values[source][-1] for name, source in self._names.items()}
