"""Check whether a run can outlive the driver that starts it."""

from __future__ import annotations

import warnings

from drawbar.train._config.run_config import RunConfig
from drawbar.train._controller.run import RunSpec
from drawbar.train._worker_group.cluster import has_started_ray

_STACKLEVEL = 5  # the user's call of `fit()` or `start()`


def check_not_detached(config: RunConfig) -> None:
    """Reject `detached=True` for a run in this process.

    Raises:
        ValueError: The run is detached.
    """
    if config.detached:
        raise ValueError(
            "RunConfig.detached=True needs workers that outlive this process, but "
            "ScalingConfig.num_workers=0 runs the function in this process. Set num_workers=1"
        )


def warn_if_driver_owns_ray() -> None:
    """Warn that the cluster of a detached run ends with this process."""
    if has_started_ray():
        warnings.warn(
            "RunConfig.detached=True has no effect, because this process has started its own "
            "Ray, which ends with it. Set RAY_ADDRESS, or call ray.init(address=...), to use "
            "a cluster that keeps running",
            stacklevel=_STACKLEVEL,
        )


def warn_if_driver_owns_objects(spec: RunSpec) -> None:
    """Warn that objects of a detached run are lost when this process ends."""
    serialized = [
        spec.train_loop,
        *([spec.validation_task.function] if spec.validation_task else []),
    ]
    count = sum(value.num_owned_objects for value in serialized)
    if count:
        warnings.warn(
            "the training function, its config, or the validation function refers to objects "
            f"in Ray's object store that this process owns ({count}). When this process ends, "
            "ray.get raises OwnerDiedError in the detached run. Keep this process alive until "
            "the run has fetched them, or put them from an actor that stays alive",
            stacklevel=_STACKLEVEL,
        )
