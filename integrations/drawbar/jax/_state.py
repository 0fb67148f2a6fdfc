"""report_state and load_state: save and load sharded JAX state with Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from drawbar.jax._structure import check_structure, find_structure, write_structure
from drawbar.train import (
    CheckpointUploadMode,
    ValidationTaskConfig,
    checkpoint_dir,
    collective,
    get_context,
    report,
)
from drawbar.train.backend import get_agreed_checkpoint

T = TypeVar("T")

_STATE_DIR = "state"
"""Directory in a checkpoint that Orbax writes and reads."""


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
        ValueError: Two leaves have the same name, such as `"a.b"` and `{"a": {"b": ...}}`.

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
    structure = find_structure(state)
    with checkpoint_dir() if is_rank_zero else nullcontext(None) as local_directory:
        directory = collective.broadcast_from_rank_zero(local_directory)
        assert directory is not None  # created on rank 0
        _require_shared_directory(directory)
        with StandardCheckpointer() as checkpointer:  # waits on exit until all files are written
            checkpointer.save(directory / _STATE_DIR, _scalars_to_arrays(state))
        if local_directory is not None:
            write_structure(local_directory, structure)
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


def load_state(like: T) -> tuple[T, dict[str, Any]] | None:
    """Load the latest reported state onto the current devices.

    Call it on all ranks. Each rank reads the parts for its own devices, also if the number of
    workers has changed.

    Args:
        like: PyTree with the structure of the saved state, such as the initial state. It
            determines dtypes and, by the shardings of its arrays, the devices.

    Returns:
        The state and the metrics that were reported with it; None if the run has no checkpoint yet.

    Raises:
        ValueError: The checkpoint has another structure, other shapes, None or another type of PRNG
            key in another place, or values that a dtype of `like` would cut, such as floats for
            integers. The message lists the leaves.
        FileNotFoundError: The checkpoint was not saved by `report_state`.

    Example:
        ```python
        state, step = init_state(), 0
        if (loaded := load_state(state)) is not None:
            state, metrics = loaded
            step = metrics["step"] + 1
        ```
    """
    checkpoint = get_agreed_checkpoint()
    if checkpoint is None:
        return None
    from orbax.checkpoint import StandardCheckpointer  # takes half a second to import

    with checkpoint.as_directory() as directory, StandardCheckpointer() as checkpointer:
        state = Path(directory, _STATE_DIR)
        if not state.is_dir():
            raise FileNotFoundError(
                f"{checkpoint} has no directory {_STATE_DIR!r}. Save it with "
                "drawbar.jax.report_state()."
            )
        check_structure(Path(directory), find_structure(like))
        loaded: T = checkpointer.restore(
            state, jax.tree.map(_to_shape_struct, _scalars_to_arrays(like))
        )
    return loaded, dict(checkpoint.manifest.metrics) if checkpoint.manifest else {}


def _scalars_to_arrays(tree: T) -> T:
    """Convert NumPy scalars of a tree to arrays, since Orbax saves scalars but cannot load them."""

    def as_array(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf

    converted: T = jax.tree.map(as_array, tree)
    return converted


def _to_shape_struct(leaf: object) -> object:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
