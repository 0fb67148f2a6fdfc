"""What a training function calls: the state of the newest checkpoint, onto the devices of now."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from drawbar.train.backend import get_agreed_checkpoint

T = TypeVar("T")

STATE_DIR = "state"
"""The folder in a checkpoint that Orbax writes and reads."""


def load_state(like: T) -> tuple[T, dict[str, Any]] | None:
    """Load what `report_state` saved from the newest checkpoint of the run.

    All ranks must call it; each reads what its own devices need, also if the checkpoint was made by
    another number of workers.

    Args:
        like: A tree as it was saved, such as the state that training begins with: tells the shapes,
            the types and, by its arrays' shardings, which device gets what.

    Returns:
        The state, and the metrics that were reported with it; None if the run has no checkpoint
        yet.

    Raises:
        ValueError: The checkpoint holds another tree, or other shapes.
        FileNotFoundError: The checkpoint was not made by `report_state`.
    """
    checkpoint = get_agreed_checkpoint()
    if checkpoint is None:
        return None
    from orbax.checkpoint import StandardCheckpointer  # half a second

    with checkpoint.as_directory() as folder, StandardCheckpointer() as checkpointer:
        state = Path(folder, STATE_DIR)
        if not state.is_dir():
            raise FileNotFoundError(
                f"{checkpoint} has no folder {STATE_DIR!r}, which drawbar.jax.report_state writes"
            )
        loaded: T = checkpointer.restore(
            state, jax.tree.map(_to_shape_struct, scalars_to_arrays(like))
        )
    return loaded, dict(checkpoint.manifest.metrics) if checkpoint.manifest else {}


def scalars_to_arrays(tree: T) -> T:
    """Give a tree without scalars of NumPy's, which Orbax saves and does not load: as arrays."""

    def as_array(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf

    saved: T = jax.tree.map(as_array, tree)
    return saved


def _to_shape_struct(leaf: object) -> object:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
