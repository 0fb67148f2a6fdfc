"""The callback by which a function that Ray Tune runs tells what its run reports."""

from __future__ import annotations

import warnings
from typing import NoReturn

from ray import tune

from drawbar.train import Checkpoint, RunContext, UserCallback
from drawbar.train.backend import set_tune_trial

CHECKPOINT_PATH_METRIC = "checkpoint_path"
"""The metric that has the path of the committed checkpoint, for those reports that have one."""


class TuneReportCallback(UserCallback):
    """Reports to Ray Tune what the workers report, for a Tune function that calls `fit()`.

        def trial(config):
            trainer = TorchTrainer(
                train_func,
                train_loop_config=config,
                scaling_config=scaling,
                run_config=RunConfig(callbacks=[TuneReportCallback()]),
            )
            trainer.fit()

        tune.Tuner(tune.with_resources(trial, as_placement_group_factory(scaling)), ...).fit()

    Each round of reports is one of Tune's, with rank 0's metrics; the path of its committed
    checkpoint is in `checkpoint_path`. The training does not wait for Tune.
    `DataParallelTrainer.as_trainable` does all this, and also hands the checkpoints to Tune.

    Raises:
        RuntimeError: It is not made inside a function that Tune runs.
    """

    def __init__(self) -> None:
        context = tune.get_context()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error below says more
            name = context.get_trial_name()
        if name is None:
            raise RuntimeError(
                "TuneReportCallback() was made outside a Tune trial; make it inside the function "
                "that ray.tune.Tuner runs. A trainer needs none: Tuner(trainer.as_trainable(), ...)"
            )
        set_tune_trial(
            name=name,
            id=context.get_trial_id(),
            directory=context.get_trial_dir(),
            resources=context.get_trial_resources(),
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "TuneReportCallback reports from the trial's own process, and RunConfig(detached=True) "
            "runs callbacks in another one; set detached=False"
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
    """Give what Tune gets of one round of reports."""
    return metrics[0] | ({CHECKPOINT_PATH_METRIC: checkpoint.path} if checkpoint else {})
