"""report_state and load_state: save and resume the state of an Accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from drawbar.accelerate._data_position import track_loader_epochs
from drawbar.accelerate._other_loaders import warn_without_prepared_loader
from drawbar.accelerate._prepare import check_accelerator
from drawbar.train import (
    CheckpointUploadMode,
    ValidationTaskConfig,
    checkpoint_dir,
    get_context,
    report,
)
from drawbar.train.backend import get_agreed_checkpoint


def report_state(
    accelerator: Accelerator,
    metrics: Mapping[str, object],
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    validation: bool | ValidationTaskConfig = False,
    **kwargs: object,
) -> None:
    """Save the state of an Accelerator and report it with metrics.

    Collective: call it on all ranks. Each rank writes its part of the state to a directory from
    `checkpoint_dir()`. `load_state()` reads the checkpoint, as does `Accelerator.load_state()`.

    Args:
        accelerator: Accelerator that has prepared model, optimizer, and scheduler.
        metrics: Metrics to report. `load_state()` returns them, so include the progress of the
            training function, for example the epoch.
        checkpoint_upload_mode: See `drawbar.train.report()`.
        validation: Whether to validate the checkpoint. See `drawbar.train.report()`.
        kwargs: Further arguments of `Accelerator.save_state()`.

    Raises:
        RuntimeError: Called outside a training function, or the Accelerator does not match the
            worker. See `check_accelerator()`.

    Example:
        ```python
        for epoch in range(start_epoch, 3):
            loss = train_one_epoch(accelerator, model, optimizer, loader)
            report_state(accelerator, {"loss": loss, "epoch": epoch})
        ```
    """
    check_accelerator(accelerator)
    if accelerator.sync_gradients:
        # It counts batches modulo gradient_accumulation_steps, which can change after a restart.
        accelerator.step = 0
    elif get_context().get_world_rank() == 0:
        warnings.warn(
            "report_state() was called within gradient accumulation. The checkpoint does not "
            "contain the accumulated gradients: a restart loses those batches. Call it if "
            "accelerator.sync_gradients is true.",
            stacklevel=2,
        )
    with checkpoint_dir() as path:
        accelerator.save_state(str(path), **kwargs)
        report(metrics, path, checkpoint_upload_mode=checkpoint_upload_mode, validation=validation)


def load_state(accelerator: Accelerator, **kwargs: object) -> dict[str, Any] | None:
    """Load the latest reported state into an Accelerator.

    Collective: call it on all ranks after `accelerator.prepare()`. It loads the run's latest
    checkpoint, also after a restart. Data loaders that the Accelerator has prepared continue with
    the epoch of the checkpoint. Later checkpoints of this attempt contain their epochs.

    Args:
        accelerator: Accelerator that has prepared model, optimizer, and scheduler.
        kwargs: Further arguments of `Accelerator.load_state()`.

    Returns:
        The metrics that were reported with the checkpoint; None if the run has no checkpoint yet.

    Raises:
        RuntimeError: Called outside a training function, or the Accelerator does not match the
            worker. See `check_accelerator()`.

    Example:
        ```python
        metrics = load_state(accelerator)
        start_epoch = 0 if metrics is None else metrics["epoch"] + 1
        ```
    """
    check_accelerator(accelerator)
    track_loader_epochs(accelerator)
    warn_without_prepared_loader(accelerator)
    checkpoint = get_agreed_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as path:
        accelerator.load_state(path, **kwargs)
    return dict(checkpoint.manifest.metrics) if checkpoint.manifest else {}
