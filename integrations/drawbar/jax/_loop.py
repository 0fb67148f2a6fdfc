"""load_state: load sharded JAX state, stored with Orbax, onto the current devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from drawbar.train.backend import get_agreed_checkpoint

T = TypeVar("T")

STATE_DIR = "state"
"""Directory in a checkpoint that Orbax writes and reads."""


def load_state(like: T) -> tuple[T, dict[str, Any]] | None:
    """Load the latest reported state onto the current devices.

    Call it on all ranks. Each rank reads the parts for its own devices, also if the number of
    workers has changed.

    Args:
        like: PyTree with the structure of the saved state, such as the initial state. It
            determines shapes, dtypes and, by the shardings of its arrays, the devices.

    Returns:
        The state and the metrics that were reported with it; None if the run has no checkpoint yet.

    Raises:
        ValueError: The checkpoint has another structure or other shapes.
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
        state = Path(directory, STATE_DIR)
        if not state.is_dir():
            raise FileNotFoundError(
                f"{checkpoint} has no directory {STATE_DIR!r}. Save it with "
                "drawbar.jax.report_state()."
            )
        loaded: T = checkpointer.restore(
            state, jax.tree.map(_to_shape_struct, scalars_to_arrays(like))
        )
    return loaded, dict(checkpoint.manifest.metrics) if checkpoint.manifest else {}


def scalars_to_arrays(tree: T) -> T:
    """Convert NumPy scalars of a tree to arrays, since Orbax saves scalars but cannot load them."""

    def as_array(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf

    converted: T = jax.tree.map(as_array, tree)
    return converted


def _to_shape_struct(leaf: object) -> object:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
