"""A fresh Ray cluster and bare actors on it, for the one driver that needs them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_CPUS = 8
SHUTDOWN_SECONDS = 30.0


@contextmanager
def fresh_cluster(num_cpus: int = NUM_CPUS) -> Iterator[Path]:
    """Start a local Ray cluster with so many logical CPUs; give an empty folder for the runs.

    Where all cores are busy there are as many as workers: Ray keeps an idle process for each
    logical CPU, which takes some 2% of a core.

    On leaving, the cluster's processes are waited for, so that none of them takes CPU time from the
    side that comes next.
    """
    import psutil
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False)
    try:
        with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as folder:
            yield Path(folder)
    finally:
        processes = psutil.Process().children(recursive=True)
        ray.shutdown()
        psutil.wait_procs(processes, timeout=SHUTDOWN_SECONDS)


@contextmanager
def fresh_nodes(count: int) -> Iterator[tuple[Path, Any]]:
    """Start a cluster of a head and so many nodes with one CPU each; this process joins it.

    Gives an empty folder for the runs, and the `ray.cluster_utils.Cluster`.
    """
    import ray
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(count):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    try:
        with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as folder:
            yield Path(folder), cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class _Worker:
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def start_actor() -> Any:
    """Ask Ray for one actor with one CPU, without waiting for it. It has a method `call`."""
    import ray

    return ray.remote(num_cpus=1)(_Worker).remote()


@contextmanager
def bare_actors(count: int = 2) -> Iterator[list[Any]]:
    """Yield plain Ray actors without placement group or library; kill them on exit."""
    import ray

    actors = [start_actor() for _ in range(count)]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
