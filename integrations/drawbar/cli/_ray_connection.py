"""The Ray that a command is about: one that runs is joined, else one of its own is started."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.cli._output import CommandError

CONNECT_TIMEOUT_S = 5.0


def connect_ray(
    address: str | None, *, standalone: bool, cpus: int, must_outlive_process: bool
) -> bool:
    """Join a Ray that runs, or start one that ends with this process.

    Tells whether that was to be done; `leave` is to follow then.

    Args:
        address: Of the one to join; if not given, RAY_ADDRESS, or what `ray start` runs here. What
            another program has started for itself ends with that one.
        standalone: Start one in any case.
        cpus: It has so many at least.
        stays: It must not end with this process.

    Raises:
        CommandError: These do not go together, or Ray does not start, or is of another version.
        ConnectionError: There is none at the address.
    """
    import ray

    if address and standalone:
        raise CommandError(f"--standalone is a Ray of its own, found --address {address} too")
    if ray.is_initialized():
        return False  # a program of the user's has called this
    # What Ray says of its own would stand between rank 0's lines.
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    named = address or os.environ.get("RAY_ADDRESS")
    if not standalone and named:
        check_reachable(named)
        _init_ray(named, **settings)
        return True
    if not standalone and (started := find_local_address()):
        with contextlib.suppress(ConnectionError):  # it may have gone
            check_reachable(started)
            _init_ray(started, **settings)
            return True
    if must_outlive_process:
        raise CommandError(
            "--detach needs a Ray that stays: start one by ray start --head, or give --address"
        )
    # Ray has its workers stand back (nice 15), which a user who is not root cannot take back.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with isolate_from_signals():
        _init_ray("local", num_cpus=num_local_cpus(cpus), include_dashboard=False, **settings)
    return True


_is_starting_ray: ContextVar[bool] = ContextVar("_is_starting_ray", default=False)


@contextlib.contextmanager
def isolate_from_signals() -> Iterator[None]:
    """Have the processes of a Ray be in process groups of their own.

    What `timeout`, a shell or a terminal sends to this process's group would end them at once, and
    nobody could end the run in order.
    """
    token = _is_starting_ray.set(True)
    try:
        yield
    finally:
        _is_starting_ray.reset(token)


def _leave_process_group() -> None:
    if _is_starting_ray.get():
        os.setpgrp()


# Ray has no setting for it. These are called where it passes `preexec_fn`, as it does for all.
os.register_at_fork(after_in_child=_leave_process_group)


def num_local_cpus(asked: int) -> int:
    """Give the CPUs of a Ray of the command's own: this machine's, or more if more are asked for.

    Raises:
        CommandError: As many processes as that cannot be here.
    """
    cores = len(os.sched_getaffinity(0))
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    if asked >= most:
        raise CommandError(
            f"{asked} processes are asked for, a CPU of Ray's each; this machine has {cores} CPUs, "
            f"and room for less than {most} processes of any kind. Ask for fewer"
        )
    return max(asked, cores)


def find_local_address() -> str | None:
    """Give the address that `ray start` has noted, and that `ray.init()` goes by."""
    from ray._private.services import find_bootstrap_address

    noted: str | None = find_bootstrap_address(None)
    return noted


def disconnect_ray() -> None:
    """Leave Ray at once: when Python ends, Ray waits half a second more for lines to show."""
    import ray

    ray.shutdown()


def _init_ray(address: str, **settings: Any) -> None:
    import ray

    try:
        ray.init(address=address, **settings)
    except OSError:
        raise
    except Exception as error:  # Ray raises bare ones, too
        where = "start here" if address == "local" else "be joined"
        raise CommandError(f"Ray cannot {where}: {error}") from error


@dataclass(frozen=True)
class ClusterSize:
    """What a cluster has: CPUs and GPUs of the node that has most of them, and GPUs of all."""

    max_cpus_per_node: int
    most_gpus: int
    gpus: int

    @classmethod
    def current(cls) -> ClusterSize:
        """Give that of the Ray that this process has joined."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has none
        cpus, gpus = (
            [int(node["Resources"].get(each, 0)) for node in nodes] for each in ("CPU", "GPU")
        )
        of_all = ray.cluster_resources()  # type: ignore[no-untyped-call]  # as above
        return cls(max(cpus, default=0), max(gpus, default=0), int(of_all.get("GPU", 0)))


MINIMAL_CLUSTER = ClusterSize(max_cpus_per_node=1, most_gpus=1, gpus=1)
"""To check options on, before there is one."""


def check_reachable(address: str) -> None:
    """Look whether somebody listens at `host:port`, since Ray would wait long for that.

    Raises:
        ConnectionError: Nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", say
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"there is no Ray at {address}: {error}") from error
