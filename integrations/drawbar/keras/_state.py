"""load_state: resume a model from the latest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawbar.keras._progress import FitProgress, model_state, restore_seeds
from drawbar.keras._report_callback import MODEL_FILE
from drawbar.train.backend import get_agreed_checkpoint


def load_state(model: Any) -> int:
    """Load the latest checkpoint and return the epoch to resume from.

    The checkpoint must be from a `ReportCheckpointCallback`. Model and optimizer are restored. Call
    it on all ranks, before or after `prepare_model`.

    Args:
        model: The model that was saved, compiled and built.

    Returns:
        The epoch for `fit(initial_epoch=...)`; 0 if the run has no checkpoint yet. If the
        checkpoint was saved in mid-epoch, the `fit` of a prepared model resumes there, with the
        accumulated metrics, provided that the data has a known number of batches. Otherwise, the
        epoch starts from its first batch. If a callback stopped this run's training at the
        checkpoint, `fit` trains no further epochs.

    Raises:
        FileNotFoundError: The checkpoint has no model file of that callback.

    Example:
        ```python
        model = prepare_model(make_model())
        model.fit(
            prepare_dataset(x, y, batch_size=64),
            epochs=10,
            initial_epoch=load_state(model),
            callbacks=[ReportCheckpointCallback()],
        )
        ```
    """
    checkpoint = get_agreed_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        path = Path(directory, MODEL_FILE)
        if not path.exists():
            raise FileNotFoundError(
                f"{checkpoint} has no file {MODEL_FILE!r}. Save it with ReportCheckpointCallback."
            )
        if getattr(model, "optimizer", None) is not None:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(str(path))
        progress = FitProgress.read(Path(directory))
    restore_seeds(model, progress)
    state = model_state(model)
    state.loaded_progress = progress
    state.epochs, state.batches = progress.epochs, progress.batches
    return progress.epochs
