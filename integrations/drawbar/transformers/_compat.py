"""Private APIs of Transformers, read in Transformers 4.50 to 5.24. No other file uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy


class BestModelTrainer(Trainer):
    """Trainer with a public method for loading the best model.

    The Trainer has no public method or callback for it.
    """

    def load_best_model(self, load: Callable[[], None]) -> None:
        """Load the best model with `load`, which reads `state.best_model_checkpoint`."""
        load()

    def _load_best_model(self) -> None:
        self.load_best_model(super()._load_best_model)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best: bool = super()._determine_best_metric(metrics, trial)
        # Before Transformers 5.6, the Trainer does not set it for this strategy, so it would keep
        # the last model instead of loading the best one.
        if is_best and self.args.save_strategy == SaveStrategy.BEST:
            self.state.best_global_step = self.state.global_step
        return is_best


def get_train_batch_size(trainer: Trainer) -> int:
    """Return the batch size, which `auto_find_batch_size` or a checkpoint may have changed."""
    size: int = cast("Any", trainer)._train_batch_size
    return size


def make_collator(trainer: Trainer) -> Callable[[list[Any]], Any]:
    """Return the data collator, without the columns that the model does not accept."""
    collator: Callable[[list[Any]], Any] = cast("Any", trainer)._get_collator_with_removed_columns(
        trainer.data_collator
    )
    return collator
