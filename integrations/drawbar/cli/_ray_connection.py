"""Connect to a Ray cluster, or start a local one."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.cli._output import CommandError
from drawbar.train.backend import get_visible_gpu_ids

# Ray's own log lines would appear between the lines of rank 0.
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def connect_ray(
    address: str | None, *, standalone: bool, cpus: int, must_outlive_process: bool
) -> bool:
    """Connect to a running Ray cluster, or start one that ends with this process.

    Imports Ray only if it connects.

    Args:
        address: Cluster to connect to. Default: RAY_ADDRESS, or the cluster that `ray start` runs
            on this machine. Ray instances that other programs started are ignored, because they end
            with these programs.
        standalone: Always start a new Ray instance.
        cpus: Minimum number of CPUs of a new instance.
        must_outlive_process: Whether a cluster is required.

    Returns:
        Whether this process is connected now. If so, call `disconnect_ray()` at the end. False if
        no cluster is named, running, or required.

    Raises:
        CommandError: The arguments conflict, Ray does not start, or its version differs.
        ConnectionError: There is no cluster at the address.
        PermissionError: The cluster requires another token.
    """
    from drawbar.train.run_modes import check_reachable, find_running_cluster

    if address and standalone:
        raise CommandError(f"--standalone cannot be combined with --address {address}.")
    named = address or os.environ.get("RAY_ADDRESS")
    if not standalone and named:
        check_reachable(named)
        _init_ray(named, **_QUIET)
        return True
    if not standalone and find_running_cluster():
        _init_ray("auto", **_QUIET)
        return True
    if must_outlive_process:
        raise CommandError(
            "--detach needs a running Ray cluster. Run 'ray start --head', or pass --address."
        )
    if not standalone:
        return False
    start_ray(num_local_cpus(cpus))
    return True


def start_ray(num_cpus: int, local_address: str = "") -> None:
    """Start a Ray instance that ends with this process.

    Args:
        num_cpus: CPUs of the instance.
        local_address: Address for other nodes. Default: Ray finds it.

    Raises:
        CommandError: Ray does not start.
    """
    # Ray starts workers with nice 15, which only root can lower again.
    os.environ.setdefault("RAY_worker_niceness", "0")
    settings = {"_node_ip_address": local_address} if local_address else {}
    with isolate_from_signals():
        _init_ray("local", num_cpus=num_cpus, include_dashboard=False, **_QUIET, **settings)


_is_starting_ray: ContextVar[bool] = ContextVar("_is_starting_ray", default=False)


@contextlib.contextmanager
def isolate_from_signals() -> Iterator[None]:
    """Start Ray's processes in separate process groups.

    `timeout`, shells, and terminals send signals to the whole process group of this command. Ray's
    processes would end at once, and the run could not be stopped gracefully.
    """
    token = _is_starting_ray.set(True)
    try:
        yield
    finally:
        _is_starting_ray.reset(token)


def _leave_process_group() -> None:
    if _is_starting_ray.get():
        os.setpgrp()


# Ray has no setting for this. It passes preexec_fn for all its processes, so fork hooks are called.
os.register_at_fork(after_in_child=_leave_process_group)


def num_local_cpus(num_processes: int) -> int:
    """Return the number of CPUs for a local Ray instance: one per process, at least all cores.

    Raises:
        CommandError: This machine does not allow as many processes.
    """
    cores = len(os.sched_getaffinity(0))
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    if num_processes >= pid_max:
        raise CommandError(
            f"Cannot start {num_processes} processes: this machine allows fewer than {pid_max} "
            "(kernel.pid_max). Reduce --nproc-per-node."
        )
    return max(num_processes, cores)


def is_connected_to_ray() -> bool:
    """Return whether this process is connected to Ray: a user's program may have called `main`."""
    if "ray" not in sys.modules:
        return False
    import ray

    return ray.is_initialized()


def disconnect_ray() -> None:
    """Disconnect from Ray now. At interpreter exit, Ray would wait another 0.5 s for log lines."""
    import ray

    ray.shutdown()


def _init_ray(address: str, **settings: Any) -> None:
    import ray

    try:
        ray.init(address=address, **settings)
    except OSError:
        raise
    except Exception as error:  # Ray also raises plain Exception
        action = "start Ray" if address == "local" else f"connect to Ray at {address}"
        raise CommandError(f"Cannot {action}: {error}") from error


@dataclass(frozen=True)
class ClusterSize:
    """Resources of a cluster or of this machine.

    Attributes:
        max_cpus_per_node: CPUs of the node with most CPUs.
        max_gpus_per_node: GPUs of the node with most GPUs.
        gpus: GPUs of all nodes.
        uses_ray: Whether Ray starts the processes. If not, there may be more of them than CPUs.
    """

    max_cpus_per_node: int
    max_gpus_per_node: int
    gpus: int
    uses_ray: bool = True

    @classmethod
    def current(cls) -> ClusterSize:
        """Return the size of the cluster that this process is connected to."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has none
        cpus, gpus = (
            [int(node["Resources"].get(name, 0)) for node in nodes] for name in ("CPU", "GPU")
        )
        totals = ray.cluster_resources()  # type: ignore[no-untyped-call]  # as above
        return cls(max(cpus, default=0), max(gpus, default=0), int(totals.get("GPU", 0)))

    @classmethod
    def of_this_machine(cls) -> ClusterSize:
        """Return the size of this machine."""
        gpus = len(get_visible_gpu_ids())
        return cls(len(os.sched_getaffinity(0)), gpus, gpus, uses_ray=False)


MINIMAL_CLUSTER = ClusterSize(max_cpus_per_node=1, max_gpus_per_node=1, gpus=1)
"""Assumed cluster for validating options before Ray is started."""
