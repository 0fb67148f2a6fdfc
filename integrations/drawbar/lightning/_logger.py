"""DrawbarLogger: report every logged value to the run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from drawbar import train
from drawbar.lightning._bases import Logger
from drawbar.lightning._package import LateBoundBase
from drawbar.train import get_context


class DrawbarLogger(LateBoundBase, Logger, base="loggers.Logger"):
    """Lightning logger that reports every value of `self.log` to the run.

    Each rank reports its values when Lightning logs: every `log_every_n_steps` steps, and after
    epochs and validations. Reports do not wait for other ranks and have no checkpoint. The values
    are stored in the journal and in `Result.metrics_dataframe`, and passed to `after_report` of
    callbacks.

    Hyperparameters are not reported as metrics; Lightning stores them in its checkpoints.

    Args:
        *args: Passed to Lightning's `Logger`, which takes no arguments.
        **kwargs: Passed to Lightning's `Logger`, which takes no arguments.

    Example:
        ```python
        trainer = L.Trainer(
            strategy=drawbar.lightning.RayDDPStrategy(),
            logger=drawbar.lightning.DrawbarLogger(),
        )
        ```
    """

    @property
    def name(self) -> str:
        """Name of the run."""
        return get_context().get_experiment_name()

    @property
    def version(self) -> str:
        """Run ID, which stays the same across restarts."""
        return get_context().get_run_id()

    @property
    def save_dir(self) -> str:
        """Run directory."""
        return str(get_context().get_storage())

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Report the values together with Lightning's step number."""
        train.report({**metrics, "step": step})

    def log_hyperparams(
        self, params: dict[str, object] | Namespace, *args: object, **kwargs: object
    ) -> None:
        """Do nothing. Lightning stores hyperparameters in its checkpoints."""
