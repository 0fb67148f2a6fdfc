"""`health.report()`: signals that the training function computes."""

from __future__ import annotations

from collections.abc import Mapping

from drawbar.train._protocol.messages import Observation
from drawbar.train._worker.active_session import current_session

HEALTH = "health"
"""Kind of the observations of `report()`."""


def report(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Send signals about the health of this rank to the evaluators of the run.

    It does not wait, and the metrics are no part of the result. Without a `HealthConfig`, only
    callbacks receive them.

    Args:
        metrics: Numbers by name, such as the norm of the gradients. NaN is allowed.
        step: Number of the step.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError: A metric is no number.

    Example: `health.report({"grad_norm": float(norm)}, step=step)`
    """
    for name, value in metrics.items():
        if not isinstance(value, int | float):
            raise TypeError(
                f"health.report() needs numbers, found {name}={value!r}. Convert it with float()."
            )
    # As texts: JSON has no NaN.
    payload = {"metrics": {str(key): repr(float(v)) for key, v in metrics.items()}, "step": step}
    current_session("health.report").send(Observation(kind=HEALTH, payload=payload))
