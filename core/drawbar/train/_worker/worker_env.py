"""What a worker's process finds in its environment before the user's code runs.

A Ray worker inherits the environment of its node's raylet, not the driver's: a token set in the
shell or a notebook never arrives, and Ray sets OMP_NUM_THREADS to the CPUs it counts, often 1. So
the worker gets, in this order: the driver's variables by a documented filter, those of its runtime
environment, thread counts from its share of the node, and torchrun's rank variables. These are pure
functions over mappings, but for what the process itself has.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._config.forwarded_env import get_exclusion_reason
from drawbar.train._messages import Ranks

THREAD_ENV_VARS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""The variables from which numerical libraries take their number of threads."""


def get_runtime_env_vars() -> dict[str, str]:
    """Give the variables that the job's runtime environment, or the workers', has set here.

    They were meant for the run's processes, so they go before what the driver's shell has set.
    """
    if "RAY_RAYLET_PID" not in os.environ:
        return {}  # not a process that Ray has started
    import ray

    if not ray.is_initialized():
        return {}
    named: Mapping[str, str] = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return {
        name: os.environ[name]
        for name in named
        if name in os.environ and not get_exclusion_reason(name)
    }


def set_env_vars(values: Mapping[str, str]) -> None:
    """Set variables of this process, those that have another value.

    A new one makes the C library move its table, which native threads, such as those of an S3
    client, read without a lock: what is there already must not be set again, let alone cleared.
    """
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def make_torchrun_env_vars(ranks: Ranks) -> dict[str, str]:
    """Give a worker's ranks by the variables that torchrun sets, for code that knows torchrun.

    The list is that of `torch.distributed.elastic.agent.server.local_elastic_agent`, for one role,
    plus NODE_RANK, which Lightning reads. MASTER_ADDR, MASTER_PORT and TORCHELASTIC_*
    follow at the rendezvous, from the integration that makes one.
    """
    values: dict[str, int] = {
        "RANK": ranks.world_rank,
        "WORLD_SIZE": ranks.world_size,
        "LOCAL_RANK": ranks.local_rank,
        "LOCAL_WORLD_SIZE": ranks.local_world_size,
        "NODE_RANK": ranks.node_rank,
        "GROUP_RANK": ranks.node_rank,
        "GROUP_WORLD_SIZE": ranks.num_nodes,
        "ROLE_RANK": ranks.world_rank,
        "ROLE_WORLD_SIZE": ranks.world_size,
    }
    return {name: str(value) for name, value in values.items()} | {"ROLE_NAME": "default"}


def read_ranks_from_env(environ: Mapping[str, str]) -> Ranks:
    """Give the ranks that a launcher has given this process, by the variables that torchrun sets.

    Raises:
        KeyError: One of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE is not set.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(environ[name]) for name in names)
    return Ranks(
        world_rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=int(environ.get("GROUP_RANK", rank // local_size)),
        num_nodes=int(environ.get("GROUP_WORLD_SIZE", -(-size // local_size))),
    )


def compute_thread_count(
    *, cpus_per_worker: float | None, local_world_size: int, cores: int
) -> int:
    """Say how many threads a worker's numerical libraries should use, at least 1.

    Args:
        cpus_per_worker: The CPUs that the user asked for per worker, or None if they did not say:
            then the workers of a node share all its cores.
        local_world_size: Workers of this run on the node.
        cores: Cores that the worker's process may use; see `count_available_cores`.
    """
    # Never more than there are: the CPUs that Ray counts are what somebody has declared.
    share = cores // local_world_size if cpus_per_worker is None else int(cpus_per_worker)
    return max(1, min(share, cores))


def make_thread_env_vars(
    count: int, environ: Mapping[str, str], forwarded: Mapping[str, str]
) -> dict[str, str]:
    """Give the thread variables that a worker must set so that its libraries use `count` threads.

    Args:
        count: From `compute_thread_count`.
        environ: The worker's environment. Its OMP_NUM_THREADS is replaced, since Ray sets one in
            every worker; any other one was set by whoever runs the node, and stays.
        forwarded: What the user chose: forwarded from the driver or set in the runtime environment.
            It wins. A chosen OMP_NUM_THREADS also holds for the other libraries, as it does without
            Ray.
    """
    # Ray sets it to the CPUs that it counts for the actor (ray-project/ray#30496).
    omp = forwarded.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": threads per nesting level
    kept = forwarded.keys() | (environ.keys() - {"OMP_NUM_THREADS"})
    return {name: omp or str(count) for name in THREAD_ENV_VARS if name not in kept}


def count_available_cores(
    *, cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Count the cores that this process may use, at least 1: its affinity and its cgroup's quota.

    `os.cpu_count` and psutil count the whole machine's, which in a container is too many. A quota
    of 1.5 cores counts as 1.

    Args:
        cgroup_root: Where the cgroup v2 file system is mounted; no quota is found in any other.
        membership: The file that names this process's cgroup.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min([float(affinity or 1), *_read_cgroup_quotas(cgroup_root, membership)])))


def _read_cgroup_quotas(root: Path, membership: Path) -> list[float]:
    """Read the CPU quotas, in cores, of this process's cgroup and of all groups above it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    # All of them hold, and a container's limit is often set on a group further up.
    folders = [root / group, *(root / parent for parent in Path(group).parents)]
    quotas = []
    for folder in folders:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(float(quota) / float(period))  # "max 100000": no limit here
        except (OSError, ValueError):
            continue
    return quotas


@dataclass(eq=False)
class _SavedEnvironment:
    """What a run in this process has found, and gives back."""

    environment: dict[str, str]
    folder: str


_saved_environments: list[_SavedEnvironment] = []
_lock = threading.Lock()


@contextlib.contextmanager
def preserve_environment() -> Iterator[None]:
    """Give this process its environment and folder back, and `breakpoint()` to pdb inside.

    Of several that overlap, the last to end gives back what the first has found.
    """
    with _lock:
        found = _SavedEnvironment(dict(os.environ), os.getcwd())
        _saved_environments.append(found)
    if found.environment.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]  # Ray's own debugger is for its workers
    try:
        yield
    finally:
        with _lock:
            _restore(found)


def _restore(found: _SavedEnvironment) -> None:
    later = _saved_environments[_saved_environments.index(found) + 1 :]
    _saved_environments.remove(found)
    if later:
        # Restored now, it would take away what the other run has set: that one gives it back.
        later[0].environment, later[0].folder = found.environment, found.folder
        return
    # One by one, not by `clear()` and `update()`: a native thread that reads a variable in between
    # would read freed memory.
    for name in os.environ.keys() - found.environment.keys():
        os.environ.pop(name, None)
    set_env_vars(found.environment)
    os.chdir(found.folder)
