"""Connect to Ray and query its nodes and its autoscaler."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys

from drawbar._base import ray_compat as _ray_compat
from drawbar._base.node_resources import NodeResources


def is_connected_to_ray() -> bool:
    """Return whether this process is connected to Ray. Does not import Ray."""
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()


# Ray's read-only node provider, which cannot start nodes, lists each node as a type of this name.
_READ_ONLY_NODE_TYPE = re.compile(r"node_[0-9a-f]{56}")


def get_ray_worker_id() -> str:
    """Return Ray's ID of this process: a driver, or the process of an actor or a task.

    For a Ray Client this is the ID of its server process, or "" if Ray's version does not support
    it.
    """
    import ray

    with contextlib.suppress(AttributeError):
        return str(ray.get_runtime_context().get_worker_id())
    return ""


def list_node_resources() -> list[NodeResources]:
    """Return the live nodes of the connected cluster. Not available in a Ray Client."""
    import ray

    available = _ray_compat.get_available_resources()
    return [
        NodeResources(
            node_id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
            labels=node.get("Labels", {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        if node["Alive"]
    ]


def is_node_available(node_id: str) -> bool:
    """Return whether a node is alive and not draining.

    If a node is lost, Ray reports it as alive for about 15 more seconds. So this also connects to
    the raylet of the node. Otherwise, the death of a worker on a lost node would count as a failure
    and not as a preemption.
    """
    import ray

    nodes = {node["NodeID"]: node for node in ray.nodes()}  # type: ignore[no-untyped-call]  # Ray has no types here
    node = nodes.get(node_id)
    if node is None or not node["Alive"] or node_id in _ray_compat.get_draining_nodes():
        return False
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def can_autoscale() -> bool:
    """Return whether the connected cluster has an autoscaler that could add nodes.

    It is true in one of these cases:

    - The configuration of the cluster has a node group that may grow.
    - Autoscaler v2 runs, and a node has the label of the node group to which v2 assigned it.
    - The status of autoscaler v1 lists node types that v1 can launch.
    """
    if _ray_compat.has_growing_node_group():
        return True
    if _ray_compat.is_autoscaler_v2_enabled():
        return any("ray.io/node-group" in node.labels for node in list_node_resources())
    return has_launchable_node_types(_ray_compat.get_autoscaler_status())


def has_launchable_node_types(status: bytes) -> bool:
    """Return whether a status of autoscaler v1 (JSON) lists node types that v1 can launch.

    Without an autoscaler, the status lists one type `node_<id>` for each node.
    """
    node_types = json.loads(status).get("autoscaler_report", {}).get("active_nodes", {})
    return any(not _READ_ONLY_NODE_TYPE.fullmatch(node_type) for node_type in node_types)
