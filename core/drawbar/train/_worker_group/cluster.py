"""Connect to Ray and query its nodes, actors, and autoscaler.

Ray has no public API for about half of this. All uses of `ray._private` are in this module.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypedDict

from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._errors import InsufficientResourcesError
from drawbar.train._protocol.assignment import WorkerInfo
from drawbar.train._worker_group.capacity import (
    NodeResources,
    check_cpus_for_datasets,
    check_group_fits,
    check_unreserved_cpus,
    count_fitting_bundles,
    format_resources,
)

_SUPPRESSED_MESSAGES = (
    "Token authentication is ",
    "SIGTERM handler is not set because current thread",
)
_SUPPRESSED_LOGGERS = ("authentication.authentication_token_setup", "worker")

_PLACEMENT_RELEASE_S = 3.0  # wait for ended Tune trials to release their placement groups

_connect_lock = threading.Lock()  # ray.init() is not safe from several threads


def is_connected_to_ray() -> bool:
    """Return whether this process is connected to Ray. Does not import Ray."""
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()


def connect_to_ray() -> None:
    """Connect this process to Ray: to the cluster in `RAY_ADDRESS`, or to a new local one.

    Does nothing if the process is connected already.
    """
    import ray

    with _connect_lock:
        if not ray.is_initialized():
            starts_local_ray = "RAY_ADDRESS" not in os.environ
            # A local Ray ends with this script. Start it without a dashboard, which would need more
            # processes and a longer start. An existing cluster keeps its own setting.
            dashboard = False if starts_local_ray else None
            start = partial(ray.init, logging_level=logging.WARNING, include_dashboard=dashboard)
            with _suppress_startup_messages() if starts_local_ray else contextlib.nullcontext():
                _run_in_permanent_thread(start)


_DEATH = re.compile(
    r"A worker died or was killed .*Node ID: (?P<node>\w+).*Worker PID: (?P<pid>\d+)", re.DOTALL
)
_suppressed_workers: set[tuple[str, str]] = set()  # node ID and process ID


def suppress_death_messages(workers: Iterable[WorkerInfo]) -> None:
    """Suppress the message that Ray prints in this process when one of these workers dies.

    Drawbar reports the death with its cause. Ray has no setting to suppress the message for single
    workers, so this wraps the function of Ray that prints it.
    """
    from ray._private import worker as ray_worker

    print_lines: Any = getattr(ray_worker, "print_to_stdstream", None)
    if print_lines is not None and not _suppressed_workers:

        def print_unless_suppressed(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            is_from_raylet = data.get("pid") == "raylet"
            if not (is_from_raylet and all(map(_is_suppressed_death, data["lines"]))):
                print_lines(data, *args, **kwargs)

        ray_worker.print_to_stdstream = print_unless_suppressed
    _suppressed_workers.update((worker.node_id, str(worker.pid)) for worker in workers)


def _is_suppressed_death(line: str) -> bool:
    death = _DEATH.match(line)
    return death is not None and (death["node"], death["pid"]) in _suppressed_workers


@contextlib.contextmanager
def _suppress_startup_messages() -> Iterator[None]:
    """Suppress messages that Ray logs at every start and that need no action."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_SUPPRESSED_MESSAGES)

    loggers = [logging.getLogger(f"ray._private.{name}") for name in _SUPPRESSED_LOGGERS]
    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)


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
    from ray._private.worker import _global_node

    return _global_node is not None and not is_ray_client() and bool(_global_node.is_head())


def try_connect_to_ray() -> str:
    """Connect to a running Ray cluster if this process is not connected.

    Returns:
        The reason why no cluster could be joined, or an empty string if there is a connection.
    """
    import ray

    with _connect_lock:
        if not ray.is_initialized():
            try:
                # Not `connect_to_ray()`: looking for a run must not start a Ray cluster.
                with _suppress_startup_messages():
                    ray.init(address="auto", logging_level=logging.WARNING)
            except Exception as error:  # Ray raises plain exceptions too
                return f"no Ray cluster could be joined: {error}"
    return ""


# Ray's read-only node provider, which cannot start nodes, lists each node as a type of this name.
_READ_ONLY_NODE_TYPE = re.compile(r"node_[0-9a-f]{56}")


def check_cluster_fits(scaling: ScalingConfig) -> None:
    """Reject workers that the connected cluster can never hold. See `check_group_fits`."""
    check_group_fits(
        list_node_resources(),
        scaling.bundle,
        scaling.min_workers,
        scaling.placement_strategy,
        scaling.label_selectors[: scaling.min_workers],
        can_autoscale=can_autoscale(),
    )


def check_dataset_cpus(scaling: ScalingConfig, streamed_datasets: Sequence[str]) -> None:
    """Reject workers that leave no CPU for datasets. See `check_cpus_for_datasets`."""
    if streamed_datasets and scaling.max_workers:
        check_cpus_for_datasets(
            list_node_resources(),
            scaling.bundle,
            scaling.max_workers,
            streamed_datasets,
            can_autoscale=can_autoscale(),
        )


def check_unreserved_dataset_cpus(streamed_datasets: Sequence[str]) -> None:
    """Reject datasets for which placement groups leave no CPU. See `check_unreserved_cpus`.

    Waits up to `_PLACEMENT_RELEASE_S` for a CPU, because a Tune trial that has just ended may still
    hold its placement group.
    """
    deadline = time.monotonic() + _PLACEMENT_RELEASE_S
    while streamed_datasets:
        try:
            check_unreserved_cpus(
                list_node_resources(),
                _count_reserved_cpus(),
                streamed_datasets,
                can_autoscale=can_autoscale(),
            )
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


class ActorInfo(TypedDict, total=False):
    """The part of Ray's record of an actor that is used here."""

    Address: dict[str, str]
    Pid: int


def get_actor_info(actor_id: str) -> ActorInfo:
    """Return Ray's record of an actor, without a call to its process."""
    info: ActorInfo = {}
    with contextlib.suppress(Exception):  # a private API, which another Ray version may lack
        from ray._private.state import actors

        info = actors(actor_id=actor_id)
    return info


def get_ray_worker_id() -> str:
    """Return Ray's ID of this process: a driver, or the process of an actor or a task.

    For a Ray Client this is the ID of its server process, or "" if Ray's version does not support
    it.
    """
    import ray

    with contextlib.suppress(AttributeError):
        return str(ray.get_runtime_context().get_worker_id())
    return ""


def is_process_dead(worker_id: str) -> bool:
    """Return whether the process with this ID or its node has died, according to Ray."""
    import ray

    with contextlib.suppress(Exception):  # a private API, which another Ray version may lack
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]  # Protobuf makes it

        accessor = state._connect_and_get_accessor()
        record = accessor.get_worker_info(ray.WorkerID.from_hex(worker_id))
        worker = WorkerTableData.FromString(record)
        # If a process dies with its node, Ray does not record the end of the process.
        worker_node = worker.worker_address.node_id.hex()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        return not worker.is_alive or not any(
            node["NodeID"] == worker_node and node["Alive"] for node in nodes
        )
    return False


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
    from ray._private.state import available_resources_per_node

    # `ray.available_resources()` adds up all nodes, but a bundle must fit on a single one.
    available = available_resources_per_node()  # type: ignore[no-untyped-call]  # Ray has no types here
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


def get_draining_nodes() -> dict[str, int]:
    """Return the draining nodes of the connected cluster, by ID.

    Values are deadlines in milliseconds since the epoch, 0 if unknown. Ray has no public API for
    this.
    """
    from ray._private.state import state

    draining: dict[str, int] = state.get_draining_nodes()
    return draining


def is_node_available(node_id: str) -> bool:
    """Return whether a node is alive and not draining.

    If a node is lost, Ray reports it as alive for about 15 more seconds. So this also connects to
    the raylet of the node. Otherwise, the death of a worker on a lost node would count as a failure
    and not as a preemption.
    """
    import ray

    nodes = {node["NodeID"]: node for node in ray.nodes()}  # type: ignore[no-untyped-call]  # Ray has no types here
    node = nodes.get(node_id)
    if node is None or not node["Alive"] or node_id in get_draining_nodes():
        return False
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def can_autoscale() -> bool:
    """Return whether the connected cluster has an autoscaler that could add nodes.

    Ray has no public API for this. It is true in one of these cases:

    - The configuration of the cluster has a node group that may grow.
    - Autoscaler v2 runs, and a node has the label of the node group to which v2 assigned it.
    - The status of autoscaler v1 lists node types that v1 can launch.
    """
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get

    config = state.get_cluster_config()
    if config is not None and any(
        group.max_count == -1 or group.max_count > group.min_count
        for group in config.node_group_configs
    ):
        return True
    if _internal_kv_get(b"__autoscaler_v2_enabled", namespace=b"__autoscaler") == b"1":
        return any("ray.io/node-group" in node.labels for node in list_node_resources())
    return has_launchable_node_types(_internal_kv_get(b"__autoscaling_status") or b"{}")


def has_launchable_node_types(status: bytes) -> bool:
    """Return whether a status of autoscaler v1 (JSON) lists node types that v1 can launch.

    Without an autoscaler, the status lists one type `node_<id>` for each node.
    """
    node_types = json.loads(status).get("autoscaler_report", {}).get("active_nodes", {})
    return any(not _READ_ONLY_NODE_TYPE.fullmatch(node_type) for node_type in node_types)
