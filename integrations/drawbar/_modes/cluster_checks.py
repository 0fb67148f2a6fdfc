"""Check that the connected cluster can hold the workers and validations of a run."""

from __future__ import annotations

from collections.abc import Mapping

from drawbar._base.node_resources import count_fitting_bundles, format_resources
from drawbar._process.errors import InsufficientResourcesError
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._worker_group.capacity import check_group_fits
from drawbar.train._worker_group.cluster import can_autoscale, list_node_resources


def check_cluster_fits(scaling: ScalingConfig) -> None:
    """Reject workers that the connected cluster can never hold. See `check_group_fits`."""
    # Ray does not report the resources of nodes that an autoscaler can add.
    if not can_autoscale():
        check_group_fits(list_node_resources(), scaling)


def check_validation_fits(resources: Mapping[str, float]) -> None:
    """Reject validations that no node of the connected cluster can run."""
    nodes = list_node_resources()
    if can_autoscale() or any(count_fitting_bundles(node.total, resources) for node in nodes):
        return
    raise InsufficientResourcesError(
        f"one validation needs {format_resources(resources)}, which no node of this cluster has, "
        "even if the cluster is idle. Lower the resources in ValidationConfig.ray_remote_kwargs, "
        "or add a larger node"
    )
