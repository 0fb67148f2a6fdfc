"""Private APIs of Ray that tests need, read in Ray 2.60. No other test uses them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it


def wait_for_started_nodes() -> None:
    """Make Ray wait until a node that it starts has registered.

    Ray gives up after 30 s, which is not configurable (`ray._private.node.Node`). A busy machine
    needs longer. The timeout of pytest is the only limit then.
    """
    from ray._private import services

    get_node: Any = services.get_node
    if get_node.__name__ == "get_registered_node":
        return

    def get_registered_node(*args: Any, **options: Any) -> Any:
        while True:
            try:
                return get_node(*args, **options)
            except RuntimeError:
                time.sleep(0.1)  # Ray has no event for it

    services.get_node = get_registered_node


def get_ray_address_file() -> Path:
    """Return the file in which `ray start` stores the address of the cluster of this machine."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def make_tune_checkpoint_manager(config: object) -> Any:
    """Return the object with which Tune deletes checkpoints of a trial."""
    from ray.train._internal.checkpoint_manager import _CheckpointManager

    manager: Any = _CheckpointManager
    return manager(config)
