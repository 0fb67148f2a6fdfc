"""From the arrays of all processes to `report()`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from drawbar.jax._loop import STATE_DIR, scalars_to_arrays
from drawbar.train import (
    CheckpointUploadMode,
    ValidationTaskConfig,
    checkpoint_dir,
    collective,
    get_context,
    report,
)


def report_state(
    state: object,
    metrics: Mapping[str, object],
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics with a checkpoint of a tree of arrays, each rank writing those that it holds.

    All ranks must call it. The folder `state` of the checkpoint is written by Orbax's
    `StandardCheckpointer`, straight to where it stays: `load_state` reads it, as does Orbax alone.
    The workers must share the folder that the run lies in.

    Args:
        state: A tree of arrays, whole or sharded over the devices of all ranks, and numbers.
        metrics: As for `drawbar.train.report`. `load_state` returns them, so put what tells how far
            the function has come among them, such as the step.
        checkpoint_upload_mode: As for `drawbar.train.report`.
        validation: As for `drawbar.train.report`.

    Raises:
        RuntimeError: Called outside a training function, or another rank does not see the folder.
    """
    from orbax.checkpoint import StandardCheckpointer  # half a second

    leads = get_context().get_world_rank() == 0
    with checkpoint_dir() if leads else nullcontext(None) as local_directory:
        folder = collective.broadcast_from_rank_zero(local_directory)
        assert folder is not None  # rank 0 has one
        _require_shared_directory(folder)
        with StandardCheckpointer() as checkpointer:  # on the way out it waits until all is written
            checkpointer.save(folder / STATE_DIR, scalars_to_arrays(state))
        report(
            metrics,
            local_directory,
            checkpoint_upload_mode=checkpoint_upload_mode,
            validation=leads and validation,
        )


def _require_shared_directory(folder: Path) -> None:
    missing_ranks = [
        rank for rank, sees in enumerate(collective.all_gather(folder.is_dir())) if not sees
    ]
    if missing_ranks:
        raise RuntimeError(
            f"rank 0 saves into {folder}, which ranks {missing_ranks} do not see: report_state "
            "needs a "
            "folder that all workers share; set RunConfig.storage_path to one that is mounted on "
            "all nodes, or save each rank's own arrays into its own checkpoint_dir()"
        )
