"""Find the TPU slice of each worker and build libtpu's multislice variables.

Within a slice, chips have a dedicated network. Between slices, libtpu uses the network of the
hosts, and its processes connect to an address that they read from environment variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

DEFAULT_MEGASCALE_PORT = "8081"
"""Port to which libtpu's processes connect, unless MEGASCALE_PORT is set. Same as in Ray Train."""


def slice_name(labels: Mapping[str, str], node: str) -> str | None:
    """Return the name of the TPU slice of a node.

    Args:
        labels: Labels of the node. Ray sets the TPU labels.
        node: ID of the node, used as name of a slice with a single host, which has no name.

    Returns:
        Name of the slice; None if the labels do not contain it.
    """
    if "ray.io/tpu-slice-name" in labels:
        return labels["ray.io/tpu-slice-name"]
    return node if "ray.io/tpu-topology" in labels else None


def multislice_env(slices: Sequence[str | None], rank: int, leader: str) -> dict[str, str]:
    """Return the variables with which libtpu connects slices; empty for a single slice.

    Args:
        slices: Slice of each rank. Slices are numbered in the order of ranks, so that rank 0 is in
            the first one.
        rank: Rank whose variables to return.
        leader: Address of rank 0.

    Raises:
        RuntimeError: Slices have different numbers of workers, so that hosts would wait forever.
    """
    workers_per_slice = Counter(slices)
    if len(workers_per_slice) < 2:
        return {}
    if len(set(workers_per_slice.values())) > 1:
        raise RuntimeError(
            "All TPU slices need the same number of workers, found "
            + ", ".join(f"{count} on {name!r}" for name, count in workers_per_slice.items())
            + ". Assign each worker to a slice with ScalingConfig(label_selector=[...]), with one "
            '{"ray.io/tpu-slice-name": ...} per worker.'
        )
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": leader,
        "MEGASCALE_NUM_SLICES": str(len(workers_per_slice)),
        "MEGASCALE_SLICE_ID": str(list(workers_per_slice).index(slices[rank])),
    }
