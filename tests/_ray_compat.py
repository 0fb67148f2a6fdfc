"""Private APIs of Ray that tests need, read in Ray 2.50 to 2.60. No other test uses them."""

from __future__ import annotations

import contextlib
import inspect
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle

AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it


def start_nodes_without_time_limits() -> None:
    """Make Ray start nodes of this process without time limits, which a busy machine may exceed.

    Ray waits 30 s until a node has registered, and a node waits 15 s for the ports that its agents
    choose (https://github.com/ray-project/ray/issues/65983). Neither limit can be configured. Here,
    the ports are chosen for the agents, and the timeout of pytest is the only limit. A node waits
    for the file with the port of the dashboard's agent even if its port was chosen.
    """
    from ray import _raylet
    from ray._private import services

    if not hasattr(_raylet, "persist_port"):
        return  # nodes of older versions of Ray do not wait for ports
    persist_port: Any = getattr(_raylet, "persist_port")  # noqa: B009  # Ray has no types here
    port_name = getattr(_raylet, "DASHBOARD_AGENT_LISTEN_PORT_NAME")  # noqa: B009
    get_node: Any = services.get_node
    start_raylet: Any = services.start_raylet
    raylets: list[Any] = []
    if get_node.__name__ == "get_registered_node":
        return

    def get_registered_node(*args: Any, **options: Any) -> Any:
        while True:
            try:
                return get_node(*args, **options)
            except RuntimeError:
                for raylet in raylets[-1:]:
                    _check_runs(raylet)
                time.sleep(0.1)  # Ray has no event for it

    def start_raylet_with_ports(*args: Any, **options: Any) -> Any:
        arguments = inspect.signature(start_raylet).bind(*args, **options).arguments
        persist_port(arguments["session_dir"], arguments["node_id"], port_name, -1)  # no server
        ports = find_free_ports(len(AGENT_PORTS))
        raylet = start_raylet(*args, **options | dict(zip(AGENT_PORTS, ports, strict=True)))
        raylets.append(raylet)
        return raylet

    services.get_node = get_registered_node
    services.start_raylet = start_raylet_with_ports


def wait_for_nodes(cluster: Any) -> None:
    """Wait until all nodes of a `ray.cluster_utils.Cluster` have registered, without time limit.

    Raises:
        RuntimeError: A node has ended.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            cluster.wait_for_nodes(timeout=5)
            return
        for node in cluster.list_all_nodes():
            for raylet in node.all_processes["raylet"]:
                _check_runs(raylet)


def _check_runs(raylet: Any) -> None:
    if (code := raylet.process.poll()) is not None:
        log = Path(raylet.stdout_file).read_text(errors="replace") if raylet.stdout_file else ""
        raise RuntimeError(
            f"The raylet of a new node ended with exit status {code}:\n{log[-3000:]}"
        )


def find_free_ports(count: int) -> list[int]:
    """Return free ports below those that the system assigns to connections."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # the port is in use
                probe.bind(("", random.SystemRandom().randrange(10_000, 32_000)))
                ports.append(probe.getsockname()[1])
        return ports


def get_ray_address_file() -> Path:
    """Return the file in which `ray start` stores the address of the cluster of this machine."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def get_log_directory() -> Path:
    """Return the directory of the logs of this process's Ray; Ray 2.54 has no public method."""
    from ray._private import worker

    return Path(worker._global_node.get_logs_dir_path())


def list_actors() -> dict[str, Any]:
    """Return Ray's records of all actors by ID. `ray.util.state` needs the dashboard."""
    from ray._private.state import actors

    records: dict[str, Any] = actors()
    return records


def make_tune_checkpoint_manager(config: object) -> Any:
    """Return the object with which Tune deletes checkpoints of a trial."""
    from ray.train._internal.checkpoint_manager import _CheckpointManager

    manager: Any = _CheckpointManager
    return manager(config)
