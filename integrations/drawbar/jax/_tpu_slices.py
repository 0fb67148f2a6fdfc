"""Several slices of TPUs as one program: which slice each worker is on, and what libtpu is told.

Within a slice the chips have a network of their own; between slices libtpu goes over the hosts',
and its processes meet at an address that they find in their environments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

DEFAULT_MEGASCALE_PORT = "8081"
"""Where libtpu's processes meet, unless MEGASCALE_PORT is set; Ray Train has the same."""


def slice_name(labels: Mapping[str, str], node: str) -> str | None:
    """Name the slice that a node is a host of.

    Args:
        labels: The node's, of which Ray sets those of TPUs itself.
        node: Its id. A slice of one host has no name of its own.

    Returns:
        None if the labels do not say.
    """
    if "ray.io/tpu-slice-name" in labels:
        return labels["ray.io/tpu-slice-name"]
    return node if "ray.io/tpu-topology" in labels else None


def multislice_env(slices: Sequence[str | None], rank: int, leader: str) -> dict[str, str]:
    """Give the variables by which libtpu joins slices; none where there is only one.

    Args:
        slices: The slice of each rank. They are numbered in the order of the ranks, so that the
            first is that of the leader.
        rank: Whose variables they are.
        leader: The address of rank 0.

    Raises:
        RuntimeError: A slice has fewer workers than another, so its hosts would wait for ever.
    """
    workers_per_slice = Counter(slices)
    if len(workers_per_slice) < 2:
        return {}
    if len(set(workers_per_slice.values())) > 1:
        raise RuntimeError(
            "the workers are on slices of TPUs in different numbers, "
            + ", ".join(f"{count} on {name!r}" for name, count in workers_per_slice.items())
            + "; name each worker's slice by ScalingConfig(label_selector=[...]), with one "
            '{"ray.io/tpu-slice-name": ...} per worker'
        )
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": leader,
        "MEGASCALE_NUM_SLICES": str(len(workers_per_slice)),
        "MEGASCALE_SLICE_ID": str(list(workers_per_slice).index(slices[rank])),
    }
