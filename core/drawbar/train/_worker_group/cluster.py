"""Connect to Ray and query its nodes and its autoscaler."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from drawbar._base import ray_compat as _ray_compat
from drawbar._base.node_resources import NodeResources, count_fitting_bundles, format_resources
from drawbar._base.ray_probe import check_reachable, find_local_address, find_running_cluster
from drawbar._process.errors import InsufficientResourcesError
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._worker_group.capacity import (
    check_cpus_for_datasets,
    check_group_fits,
    check_unreserved_cpus,
)

_PLACEMENT_RELEASE_S = 3.0  # wait for ended Tune trials to release their placement groups

_connect_lock = threading.Lock()  # ray.init() is not safe from several threads


def is_connected_to_ray() -> bool:
    """Return whether this process is connected to Ray. Does not import Ray."""
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()


def connect_to_ray() -> str:
    """Connect this process to Ray.

    Use the cluster in `RAY_ADDRESS`, the one of `ray start` on this machine, or a new local one.
    Does nothing if the process is connected already.

    Returns:
        Address of the cluster if this process has joined one that was already running, else "".
    """
    import ray

    with _connect_lock:
        if not ray.is_initialized():
            starts_local_ray = not (os.environ.get("RAY_ADDRESS") or find_running_cluster())
            # A local Ray ends with this script. Start it without a dashboard, which would need more
            # processes and a longer start. An existing cluster keeps its own setting.
            start = partial(ray.init, logging_level=logging.WARNING)
            if starts_local_ray:
                start = partial(start, "local", include_dashboard=False)
            suppress = _ray_compat.suppress_startup_messages
            with suppress() if starts_local_ray else contextlib.nullcontext():
                _run_in_permanent_thread(start)
            if not has_started_ray():
                return _get_cluster_address()
    return ""


def _get_cluster_address() -> str:
    import ray

    if is_ray_client():
        return os.environ.get("RAY_ADDRESS", "ray://")
    return str(ray.get_runtime_context().gcs_address)


def _run_in_permanent_thread(start_ray: Callable[[], object]) -> None:
    """Start Ray in a thread that lives as long as this process.

    Ray sets PR_SET_PDEATHSIG (ray-project/ray#7150), so Linux kills Ray's processes when the thread
    that started them ends.
    """
    if threading.current_thread() is threading.main_thread():
        start_ray()
        return
    started = Future[None]()

    def start_and_block() -> None:
        try:
            start_ray()
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            threading.Event().wait()

    threading.Thread(target=start_and_block, name="drawbar-ray", daemon=True).start()
    started.result()


def is_ray_client() -> bool:
    """Return whether this process is a Ray Client (`ray.init("ray://...")`)."""
    from ray.util.client import ray as client

    return bool(client.is_connected())  # type: ignore[no-untyped-call]  # Ray has no types here


def has_started_ray() -> bool:
    """Return whether this process has started the Ray that it is connected to."""
    return not is_ray_client() and _ray_compat.is_head_of_local_ray()


def try_connect_to_ray() -> str:
    """Connect to a running Ray cluster if this process is not connected.

    Returns:
        The reason why no cluster could be joined, or an empty string if there is a connection.
    """
    import ray

    with _connect_lock:
        if not ray.is_initialized():
            try:
                # First, because Ray waits for minutes for a cluster that was killed.
                named = os.environ.get("RAY_ADDRESS")
                check_reachable(
                    named or find_local_address() or "", sends_token=None if named else True
                )
                # Not `connect_to_ray()`: looking for a run must not start a Ray cluster.
                with _ray_compat.suppress_startup_messages():
                    ray.init(address="auto", logging_level=logging.WARNING)
            except Exception as error:  # Ray raises plain exceptions too
                return f"no Ray cluster could be joined: {error}"
    return ""


# Ray's read-only node provider, which cannot start nodes, lists each node as a type of this name.
_READ_ONLY_NODE_TYPE = re.compile(r"node_[0-9a-f]{56}")


def check_cluster_fits(scaling: ScalingConfig) -> None:
    """Reject workers that the connected cluster can never hold. See `check_group_fits`."""
    # Ray does not report the resources of nodes that an autoscaler can add.
    if not can_autoscale():
        check_group_fits(list_node_resources(), scaling)


def check_dataset_cpus(scaling: ScalingConfig, streamed_datasets: Sequence[str]) -> None:
    """Reject workers that leave no CPU for datasets. See `check_cpus_for_datasets`."""
    if streamed_datasets and scaling.max_workers and not can_autoscale():
        check_cpus_for_datasets(list_node_resources(), scaling, streamed_datasets)


def check_unreserved_dataset_cpus(streamed_datasets: Sequence[str]) -> None:
    """Reject datasets for which placement groups leave no CPU. See `check_unreserved_cpus`.

    Waits up to `_PLACEMENT_RELEASE_S` for a CPU, because a Tune trial that has just ended may still
    hold its placement group.
    """
    deadline = time.monotonic() + _PLACEMENT_RELEASE_S
    while streamed_datasets and not can_autoscale():
        try:
            check_unreserved_cpus(list_node_resources(), _count_reserved_cpus(), streamed_datasets)
        except InsufficientResourcesError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PLACEMENT_RELEASE_S / 10)
        else:
            return


def _count_reserved_cpus() -> float:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    bundles = [bundle for group in groups for bundle in group["bundles"].values()]
    return float(sum(bundle.get("CPU", 0.0) for bundle in bundles))


def get_ray_worker_id() -> str:
    """Return Ray's ID of this process: a driver, or the process of an actor or a task.

    For a Ray Client this is the ID of its server process, or "" if Ray's version does not support
    it.
    """
    import ray

    with contextlib.suppress(AttributeError):
        return str(ray.get_runtime_context().get_worker_id())
    return ""


def get_remaining_resources(reserved: Mapping[str, float]) -> dict[str, float]:
    """Return how many CPUs and GPUs of the cluster the workers leave unreserved.

    Args:
        reserved: Resources that the workers reserve.

    Returns:
        CPUs and GPUs. Empty if `reserved` is empty or the cluster can autoscale.
    """
    if not reserved or can_autoscale():
        return {}
    nodes = list_node_resources()
    total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    return {name: max(amount - reserved.get(name, 0.0), 0.0) for name, amount in total.items()}


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
