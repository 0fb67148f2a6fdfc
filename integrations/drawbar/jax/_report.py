"""report_state: save sharded JAX state with Orbax and report it."""

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
    """Save a sharded PyTree with Orbax and report it with metrics.

    Call it on all ranks. Each rank writes the arrays that it holds. Orbax's `StandardCheckpointer`
    writes them to the directory `state` in `checkpoint_dir()` of rank 0; read it with `load_state`
    or Orbax. The run's storage must be shared between the workers.

    Args:
        state: PyTree of numbers and arrays. The arrays are replicated or sharded over the devices
            of all ranks.
        metrics: See `drawbar.train.report()`. `load_state` returns them, so include the progress of
            the training function, such as the step.
        checkpoint_upload_mode: See `drawbar.train.report()`.
        validation: See `drawbar.train.report()`.

    Raises:
        RuntimeError: Called outside a training function, or another rank cannot see the directory.

    Example:
        ```python
        for step in range(start, num_steps):
            state, loss = train_step(state, next(batches))
            if step % 100 == 0:
                report_state(state, {"step": step, "loss": float(loss)})
        ```
    """
    from orbax.checkpoint import StandardCheckpointer  # takes half a second to import

    is_rank_zero = get_context().get_world_rank() == 0
    with checkpoint_dir() if is_rank_zero else nullcontext(None) as local_directory:
        directory = collective.broadcast_from_rank_zero(local_directory)
        assert directory is not None  # created on rank 0
        _require_shared_directory(directory)
        with StandardCheckpointer() as checkpointer:  # waits on exit until all files are written
            checkpointer.save(directory / STATE_DIR, scalars_to_arrays(state))
        report(
            metrics,
            local_directory,
            checkpoint_upload_mode=checkpoint_upload_mode,
            validation=is_rank_zero and validation,
        )


def _require_shared_directory(directory: Path) -> None:
    missing_ranks = [
        rank for rank, exists in enumerate(collective.all_gather(directory.is_dir())) if not exists
    ]
    if missing_ranks:
        raise RuntimeError(
            f"report_state() needs a shared directory, but ranks {missing_ranks} cannot see "
            f"{directory}. Set RunConfig(storage_path=...) to a directory that is mounted on all "
            "nodes, or save each rank's arrays to its own checkpoint_dir()."
        )
