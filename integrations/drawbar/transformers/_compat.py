"""Private APIs of Transformers, read in Transformers 4.50 to 5.23. No other file uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from transformers import Trainer


class BestModelTrainer(Trainer):
    """Trainer with a public method for loading the best model.

    The Trainer has no public method or callback for it.
    """

    def load_best_model(self, load: Callable[[], None]) -> None:
        """Load the best model with `load`, which reads `state.best_model_checkpoint`."""
        load()

    def _load_best_model(self) -> None:
        self.load_best_model(super()._load_best_model)


def make_collator(trainer: Trainer) -> Callable[[list[Any]], Any]:
    """Return the data collator, without the columns that the model does not accept."""
    collator: Callable[[list[Any]], Any] = cast("Any", trainer)._get_collator_with_removed_columns(
        trainer.data_collator
    )
    return collator
