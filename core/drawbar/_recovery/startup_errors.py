"""Kinds of errors with which the start of workers fails.

The controller also supervises workers without Ray, so this module does not import it. In a process
that has not imported Ray, no exception is one of Ray's.
"""

from __future__ import annotations

import sys

from drawbar._process.errors import InsufficientResourcesError
from drawbar._records.events import AttemptEndCause


def classify_startup_error(error: Exception) -> AttemptEndCause:
    """Return whether a failed start counts as preemption, configuration error, or startup failure.

    Configuration errors are not retried.
    """
    if is_node_loss(error):
        return "preemption"
    # The next start would fail with these errors too.
    permanent_errors = (ValueError, TypeError, ImportError, InsufficientResourcesError)
    is_permanent = isinstance(error, permanent_errors) or is_runtime_env_error(error)
    return "configuration" if is_permanent else "startup"


def is_worker_death(error: Exception | None) -> bool:
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
