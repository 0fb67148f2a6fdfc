"""DrawbarLogger: what the model logs, as it logs it, in the run's journal."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drawbar import train
from drawbar.lightning._package import LateBoundBase
from drawbar.train import get_context

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
else:
    Logger = object


class DrawbarLogger(LateBoundBase, Logger, base="loggers.Logger"):
    """A Lightning logger that reports every value of `self.log` to the run.

    Each rank reports its own values, without waiting for the others and without a checkpoint, when
    Lightning logs: every `log_every_n_steps` steps, and at the end of epochs and validations. They
    are in the journal, in `Result.metrics_dataframe` and in callbacks' `after_report`.

    Hyperparameters are not metrics; they are in Lightning's checkpoints.
    """

    @property
    def name(self) -> str:
        """Name of the run."""
        return get_context().get_experiment_name()

    @property
    def version(self) -> str:
        """Identity of the run, the same over restarts."""
        return get_context().get_run_id()

    @property
    def save_dir(self) -> str:
        """The run's directory."""
        return str(get_context().get_storage())

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Report the values, with the step that Lightning logs them for."""
        train.report({**metrics, "step": step})

    def log_hyperparams(
        self, params: dict[str, object] | Namespace, *args: object, **kwargs: object
    ) -> None:
        """Do nothing."""
