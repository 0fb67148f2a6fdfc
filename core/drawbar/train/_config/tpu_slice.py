"""Number of workers and chips per worker of a TPU slice."""

from __future__ import annotations

from collections.abc import Mapping

TOPOLOGY_LABEL = "ray.io/tpu-topology"
"""Ray's node label for the topology of a TPU slice, such as "2x2x2"."""


def compute_slice_workers(
    topology: str, accelerator_type: str, resources: Mapping[str, float] | None
) -> tuple[int, float]:
    """Return the number of workers of a slice and the number of chips of each worker.

    Args:
        topology: Topology such as "2x2x2".
        accelerator_type: Accelerator such as "TPU-V4".
        resources: Resources of one worker, if set. Without "TPU", a worker gets all chips of a
            host.

    Raises:
        ValueError: The slice does not exist, or workers cannot divide it evenly.
    """
    from ray.util.tpu import get_tpu_worker_resources

    try:
        num_workers, worker_resources = get_tpu_worker_resources(
            topology, accelerator_type, dict(resources or {})
        )
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"ScalingConfig has topology={topology!r} and accelerator_type={accelerator_type!r}, "
            f"which is no TPU slice that workers can divide: {error}. "
            'Set, for example, topology="2x2x2" and accelerator_type="TPU-V4"'
        ) from error
    return num_workers, worker_resources["TPU"]
