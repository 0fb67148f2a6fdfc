"""From Accelerate's `save_state` to `report()`."""

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
    """Report metrics with a checkpoint of everything that the `Accelerator` has prepared.

    All ranks must call it. The checkpoint's directory is what `Accelerator.save_state` writes, each
    rank its part, straight to where it stays; `load_state` reads it, as does Accelerate alone.

    Args:
        accelerator: The one whose `prepare` was given model, optimizer and scheduler.
        metrics: As for `drawbar.train.report`. `load_state` returns them, so put what tells how far
            the function has come among them, such as the epoch.
        checkpoint_upload_mode: As for `drawbar.train.report`.
        validation: As for `drawbar.train.report`.
        kwargs: Further arguments of `Accelerator.save_state`.
    """
    check_accelerator(accelerator)
    with checkpoint_dir() as path:
        accelerator.save_state(str(path), **kwargs)
        report(metrics, path, checkpoint_upload_mode=checkpoint_upload_mode, validation=validation)
