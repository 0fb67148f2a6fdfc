"""TuneReportCallback: forward reports to Ray Tune."""

from __future__ import annotations

import warnings
from typing import NoReturn

from ray import tune

from drawbar.train import Checkpoint, RunContext, UserCallback
from drawbar.train.backend import set_tune_trial

CHECKPOINT_PATH_METRIC = "checkpoint_path"
"""Metric with the path of the committed checkpoint, in reports that have a checkpoint."""


class TuneReportCallback(UserCallback):
    """Forward the reports of a run to Ray Tune, in a Tune function that calls `fit()`.

    Each round becomes one report to Tune with the metrics of rank 0. The metric `checkpoint_path`
    is the path of the committed checkpoint. Training does not wait for Tune.
    `DataParallelTrainer.as_trainable()` does the same, and also passes the checkpoints to Tune.

    Raises:
        RuntimeError: The callback is created outside a function that Tune runs.

    Example:
        ```python
        def trial(config):
            trainer = TorchTrainer(
                train_func,
                train_loop_config=config,
                scaling_config=scaling,
                run_config=RunConfig(callbacks=[TuneReportCallback()]),
            )
            trainer.fit()

        tune.Tuner(tune.with_resources(trial, as_placement_group_factory(scaling)), ...).fit()
        ```
    """

    def __init__(self) -> None:
        context = tune.get_context()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below is more helpful
            name = context.get_trial_name()
        if name is None:
            raise RuntimeError(
                "TuneReportCallback() was created outside a Tune trial. Create it inside the "
                "function that ray.tune.Tuner runs, or pass trainer.as_trainable() to Tuner."
            )
        set_tune_trial(
            name=name,
            id=context.get_trial_id(),
            directory=context.get_trial_dir(),
            resources=context.get_trial_resources(),
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "TuneReportCallback must run in the process of the trial, but "
            "RunConfig(detached=True) runs callbacks in another process. Set detached=False."
        )

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, object]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Report rank 0's metrics to Tune, with the checkpoint's path if there is one."""
        tune.report(tune_metrics(metrics, checkpoint))


def tune_metrics(
    metrics: list[dict[str, object]], checkpoint: Checkpoint | None
) -> dict[str, object]:
    """Return the metrics of one round for Tune."""
    return metrics[0] | ({CHECKPOINT_PATH_METRIC: checkpoint.path} if checkpoint else {})
