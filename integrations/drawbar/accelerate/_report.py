"""report_state: save and report the state of an Accelerator."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate import Accelerator

from drawbar.accelerate._prepare import check_accelerator
from drawbar.train import CheckpointUploadMode, ValidationTaskConfig, checkpoint_dir, report


def report_state(
    accelerator: Accelerator,
    metrics: Mapping[str, object],
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    validation: bool | ValidationTaskConfig = False,
    **kwargs: object,
) -> None:
    """Save the state of an Accelerator and report it with metrics.

    Collective: call it on all ranks. Each rank writes its part of the state directly into the run's
    storage. `load_state()` reads the checkpoint, and so does `Accelerator.load_state()`.

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
    with checkpoint_dir() as path:
        accelerator.save_state(str(path), **kwargs)
        report(metrics, path, checkpoint_upload_mode=checkpoint_upload_mode, validation=validation)
