"""Slices of TPUs: how many workers one has, and how many chips each worker gets."""

from __future__ import annotations

from collections.abc import Mapping

TOPOLOGY_LABEL = "ray.io/tpu-topology"
"""The label of Ray's that a TPU node has, such as "2x2x2"."""


def compute_slice_workers(
    topology: str, accelerator_type: str, resources: Mapping[str, float] | None
) -> tuple[int, float]:
    """Give the number of workers of one slice, and the chips of each.

    Args:
        topology: Such as "2x2x2".
        accelerator_type: Such as "TPU-V4".
        resources: Those of a worker, if they were set. Without "TPU" a worker has a host's chips.

    Raises:
        ValueError: There is no such slice, or the workers cannot share it evenly.
    """
    from ray.util.tpu import get_tpu_worker_resources

    try:
        workers, found = get_tpu_worker_resources(topology, accelerator_type, dict(resources or {}))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"ScalingConfig has topology={topology!r} and accelerator_type={accelerator_type!r}, "
            f"which are no slice of TPUs that workers can share: {error}. "
            'Such as: topology="2x2x2", accelerator_type="TPU-V4"'
        ) from error
    return workers, found["TPU"]
