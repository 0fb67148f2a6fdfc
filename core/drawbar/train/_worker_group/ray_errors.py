"""Classify exceptions of Ray.

The controller also supervises workers without Ray. These functions therefore do not import Ray: in
a process that has not imported it, no exception is one of Ray's.
"""

from __future__ import annotations

import sys


def is_worker_death(error: Exception) -> bool:
    """Return whether Ray raised this error because the process of an actor died."""
    if "ray" not in sys.modules:
        return False
    from ray.exceptions import OutOfMemoryError, RayActorError

    return isinstance(error, RayActorError | OutOfMemoryError)


def is_node_loss(error: Exception) -> bool:
    """Return whether Ray raised this error because an actor died with its node."""
    # Ray reports the loss of a node only in the text of the error.
    return is_worker_death(error) and "its node has died" in str(error)


def is_runtime_env_error(error: Exception) -> bool:
    """Return whether Ray raised this error because it could not set up a runtime environment."""
    if "ray" not in sys.modules:
        return False
    from ray.exceptions import RuntimeEnvSetupError

    return isinstance(error, RuntimeEnvSetupError)
