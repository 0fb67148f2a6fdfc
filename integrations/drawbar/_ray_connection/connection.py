"""Connect this process to Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from drawbar._base import ray_compat as _ray_compat
from drawbar._ray_connection.ray_probe import (
    check_reachable,
    find_local_address,
    find_running_cluster,
)

_connect_lock = threading.Lock()  # ray.init() is not safe from several threads


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
