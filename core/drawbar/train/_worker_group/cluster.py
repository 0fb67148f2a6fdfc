"""All that asks Ray about its nodes: what they have, which are about to go, whether more can come.

Ray has no public call for half of that; every use of `ray._private` is in this file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypedDict

from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._errors import InsufficientResourcesError
from drawbar.train._messages import WorkerInfo
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

_PLACEMENT_RELEASE_S = 3.0  # that a trial which has ended may hold its placement group yet

_connect_lock = threading.Lock()  # ray.init() is not safe from several threads


def connect_to_ray() -> None:
    """Stay in this process's Ray, or join the one `RAY_ADDRESS` names, or start a local one."""
    import ray

    with _connect_lock:
        if not ray.is_initialized():
            starts_its_own = "RAY_ADDRESS" not in os.environ
            # A dashboard is more processes and a longer start, for a Ray that ends with this
            # script. Of a Ray that is there already, others have decided.
            dashboard = False if starts_its_own else None
            start = partial(ray.init, logging_level=logging.WARNING, include_dashboard=dashboard)
            with _suppress_startup_messages() if starts_its_own else contextlib.nullcontext():
                _run_in_permanent_thread(start)


_DEATH = re.compile(
    r"A worker died or was killed .*Node ID: (?P<node>\w+).*Worker PID: (?P<pid>\d+)", re.DOTALL
)
_own_workers: set[tuple[str, str]] = set()


def hide_deaths_of(workers: Iterable[WorkerInfo]) -> None:
    """Keep Ray from printing its own paragraph when one of these workers dies.

    Drawbar reports the death, with its cause. Ray has no setting for single processes, so the
    function that prints errors of raylets in this process is wrapped.
    """
    from ray._private import worker as ray_worker

    print_lines: Any = getattr(ray_worker, "print_to_stdstream", None)
    if print_lines is not None and not _own_workers:

        def print_unless_own(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            is_own = data.get("pid") == "raylet" and all(map(_is_own_death, data["lines"]))
            if not is_own:
                print_lines(data, *args, **kwargs)

        ray_worker.print_to_stdstream = print_unless_own
    _own_workers.update((each.node_id, str(each.pid)) for each in workers)


def _is_own_death(line: str) -> bool:
    death = _DEATH.match(line)
    return death is not None and (death["node"], death["pid"]) in _own_workers


@contextlib.contextmanager
def _suppress_startup_messages() -> Iterator[None]:
    """Leave out what Ray logs when it is started or found as here, and nobody can act on."""

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
    """Start Ray for as long as this process lives, whichever thread asks for it.

    Linux ends Ray's processes with the very thread that has started them (PR_SET_PDEATHSIG).
    """
    if threading.current_thread() is threading.main_thread():
        start_ray()
        return
    started = Future[None]()

    def stay() -> None:
        try:
            start_ray()
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            threading.Event().wait()

    # ray-project/ray#7150 has set that signal; the thread it is bound to must live as long as Ray
    # is to.
    threading.Thread(target=stay, name="drawbar-ray", daemon=True).start()
    started.result()


def is_ray_client() -> bool:
    """Whether this process is a Ray Client (`ray.init("ray://...")`)."""
    from ray.util.client import ray as client

    return bool(client.is_connected())  # type: ignore[no-untyped-call]  # Ray has no types here


def has_started_ray() -> bool:
    """Whether this process has started the Ray that it is connected to."""
    from ray._private.worker import _global_node

    return _global_node is not None and not is_ray_client() and bool(_global_node.is_head())


def try_connect_to_ray() -> str:
    """Make sure of a connection to a Ray that is running; says why there is none, "" if there is.

    That may be that none runs here, or that the one which does takes another token.
    """
    import ray

    with _connect_lock:
        if not ray.is_initialized():
            try:
                # Not `connect_to_ray()`: who only looks for a run must not start a Ray of his own.
                with _suppress_startup_messages():
                    ray.init(address="auto", logging_level=logging.WARNING)
            except Exception as error:  # Ray raises bare ones, too
                return f"no Ray could be joined: {error}"
    return ""


_READ_ONLY_NODE_TYPE = re.compile(r"node_[0-9a-f]{56}")


def check_cluster_fits(scaling: ScalingConfig) -> None:
    """Refuse workers that the connected Ray cluster can never hold; see `check_group_fits`."""
    check_group_fits(
        list_node_resources(),
        scaling.bundle,
        scaling.min_workers,
        scaling.placement_strategy,
        scaling.label_selectors[: scaling.min_workers],
        autoscaling=can_autoscale(),
    )


def check_dataset_cpus(scaling: ScalingConfig, lazy: Sequence[str]) -> None:
    """Refuse workers that starve their datasets on the connected cluster; see
    `check_cpus_for_datasets`."""
    if lazy and scaling.max_workers:
        workers = scaling.max_workers
        check_cpus_for_datasets(
            list_node_resources(), scaling.bundle, workers, lazy, autoscaling=can_autoscale()
        )


def check_unreserved_dataset_cpus(lazy: Sequence[str]) -> None:
    """Refuse datasets for which placement groups leave no CPU; see `check_unreserved_cpus`."""
    until = time.monotonic() + _PLACEMENT_RELEASE_S
    while lazy:
        try:
            nodes = list_node_resources()
            check_unreserved_cpus(nodes, _count_reserved_cpus(), lazy, autoscaling=can_autoscale())
        except InsufficientResourcesError:
            if time.monotonic() > until:
                raise
            time.sleep(_PLACEMENT_RELEASE_S / 10)
        else:
            return


def _count_reserved_cpus() -> float:
    from ray.util import placement_group_table

    groups = [each for each in placement_group_table().values() if each["state"] == "CREATED"]
    bundles = [bundle for group in groups for bundle in group["bundles"].values()]
    return float(sum(bundle.get("CPU", 0.0) for bundle in bundles))


class ActorInfo(TypedDict, total=False):
    """What Ray has noted of an actor, of which this is wanted."""

    Address: dict[str, str]
    Pid: int


def get_actor_info(actor: str) -> ActorInfo:
    """Give what Ray has noted of the actor of this id, which needs no answer of its process."""
    noted: ActorInfo = {}
    with contextlib.suppress(Exception):  # an interface of Ray's that is not public
        from ray._private.state import actors

        noted = actors(actor_id=actor)
    return noted


def get_ray_worker_id() -> str:
    """Give the id by which Ray knows this process: a driver, or what an actor or a task runs in.

    That of a Ray Client is its server's, or "" in versions of Ray where a client cannot ask for it.
    """
    import ray

    with contextlib.suppress(AttributeError):
        return str(ray.get_runtime_context().get_worker_id())
    return ""


def is_process_dead(worker_id: str) -> bool:
    """Whether the process of this id has ended, or its node has, by what Ray has noted."""
    import ray

    with contextlib.suppress(Exception):  # an interface of Ray's that is not public
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]  # Protobuf makes it

        accessor = state._connect_and_get_accessor()
        noted = accessor.get_worker_info(ray.WorkerID.from_hex(worker_id))
        known = WorkerTableData.FromString(noted)
        # Of a process that went with its node Ray notes no end.
        node = known.worker_address.node_id.hex()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        return not known.is_alive or not any(
            each["NodeID"] == node and each["Alive"] for each in nodes
        )
    return False


def get_remaining_resources(reserved: Mapping[str, float]) -> dict[str, float]:
    """Say what is left of the cluster beside workers that hold so much.

    Nothing is said without workers, and of a cluster that grows by itself.
    """
    if not reserved or can_autoscale():
        return {}
    nodes = list_node_resources()
    total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    return {name: max(amount - reserved.get(name, 0.0), 0.0) for name, amount in total.items()}


def check_validation_fits(resources: Mapping[str, float]) -> None:
    """Refuse validations that no node of the connected cluster can ever run."""
    nodes = list_node_resources()
    if can_autoscale() or any(count_fitting_bundles(node.total, resources) for node in nodes):
        return
    raise InsufficientResourcesError(
        f"one validation needs {format_resources(resources)}, and no node of this cluster has "
        "that, even if "
        "all is free. Ask for less in ValidationConfig.ray_remote_kwargs, or add a larger node"
    )


def list_node_resources() -> list[NodeResources]:
    """Ask the connected Ray for its live nodes. Ray Client cannot: it does not see what is free."""
    import ray
    from ray._private.state import available_resources_per_node

    # `ray.available_resources()` adds all nodes up, and what no single one of them has is no room.
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
    """Ask the connected Ray which nodes are to be taken away: id to deadline.

    The deadline is in milliseconds since the epoch, 0 if none is known. There is no public call.
    """
    from ray._private.state import state

    draining: dict[str, int] = state.get_draining_nodes()
    return draining


def is_node_available(node_id: str) -> bool:
    """Whether a node is alive and is not to be taken away.

    Ray takes some 15 s to count a node as dead whose raylet vanished; so the raylet is called too.
    """
    import ray

    nodes = {node["NodeID"]: node for node in ray.nodes()}  # type: ignore[no-untyped-call]  # Ray has no types here
    node = nodes.get(node_id)
    if node is None or not node["Alive"] or node_id in get_draining_nodes():
        return False
    # ray.nodes() would say "alive" for that long, and a death would cost a budget of failures that
    # it should not.
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def can_autoscale() -> bool:
    """Whether the connected Ray cluster has an autoscaler that could add nodes.

    There is no public call for this. It is true if the cluster's configuration has a group of nodes
    that may grow; if autoscaler v2 runs and Ray nodes carry the node group that it gave them; or if
    the status of autoscaler v1 names node types, where a cluster without one shows a `node_<id>`
    for each node.
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
    """Whether this status of autoscaler v1, JSON, names types of nodes that it can launch."""
    node_types = json.loads(status).get("autoscaler_report", {}).get("active_nodes", {})
    return any(not _READ_ONLY_NODE_TYPE.fullmatch(node_type) for node_type in node_types)
