"""Environment variables, thread counts, and CPU limits of a worker process.

A Ray worker inherits the environment of its node's raylet, not the driver's: a token set in the
shell or a notebook is missing, and Ray sets OMP_NUM_THREADS to the CPUs of the actor, often 1.
Drawbar therefore sets, in this order: the driver's variables (filtered, see the documentation),
the variables of the runtime environment, thread counts for the worker's part of the node, and
torchrun's rank variables.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drawbar._process.driver_env import get_exclusion_reason
from drawbar._process.ranks import Ranks

_GPU_DEVICES = "nvidia[0-9]*"
_NO_GPU = ("-1", "NoDevFiles")

THREAD_ENV_VARS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Environment variables that set the number of threads of numerical libraries."""


def get_runtime_env_vars() -> dict[str, str]:
    """Return the variables that the runtime environment of the job or worker has set.

    They are meant for the run's processes, so they override the driver's variables.
    """
    if "RAY_RAYLET_PID" not in os.environ:
        return {}  # not a Ray process
    import ray

    if not ray.is_initialized():
        return {}
    env_vars: Mapping[str, str] = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return {
        name: os.environ[name]
        for name in env_vars
        if name in os.environ and not get_exclusion_reason(name)
    }


def make_worker_env(
    ranks: Ranks, env_vars: Mapping[str, str], num_cpus: float | None
) -> dict[str, str]:
    """Return the environment variables of a rank, to be set before user code runs.

    Args:
        ranks: Ranks of the worker.
        env_vars: Variables that all workers of the run have.
        num_cpus: Number of CPUs that the user set for each worker; None if not set.
    """
    threads = compute_thread_count(
        cpus_per_worker=num_cpus,
        local_world_size=ranks.local_world_size,
        cores=count_available_cores(),
    )
    user_env = {**env_vars, **get_runtime_env_vars()}
    # Ranks come last: the driver may have forwarded RANK from its own torchrun.
    return {
        **user_env,
        **make_thread_env_vars(threads, os.environ, user_env),
        **make_torchrun_env_vars(ranks),
    }


def set_env_vars(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, if their values differ.

    Setting a variable can make the C library move its table, which native threads (for example of
    an S3 client) read without a lock. So unchanged variables are not set, and none is cleared.
    """
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def make_torchrun_env_vars(ranks: Ranks) -> dict[str, str]:
    """Return the rank variables that torchrun sets, for code that reads them.

    These are the variables of `torch.distributed.elastic.agent.server.local_elastic_agent` for one
    role, plus NODE_RANK, which Lightning reads. Integrations with a rendezvous set MASTER_ADDR,
    MASTER_PORT, and TORCHELASTIC_* later.
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
    """Return the ranks of this process from the variables that torchrun sets.

    Args:
        environ: Environment of the process.

    Raises:
        KeyError: RANK, WORLD_SIZE, LOCAL_RANK, or LOCAL_WORLD_SIZE is not set.
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
    """Return the number of threads for a worker's numerical libraries, at least 1.

    Args:
        cpus_per_worker: CPUs per worker that the user requested. None divides the cores of the node
            among its workers.
        local_world_size: Number of workers of this run on the node.
        cores: Cores that the worker process may use; see `count_available_cores`.
    """
    # At most the available cores: Ray's CPU count can be set to any number.
    count = cores // local_world_size if cpus_per_worker is None else int(cpus_per_worker)
    return max(1, min(count, cores))


def make_thread_env_vars(
    count: int, environ: Mapping[str, str], forwarded: Mapping[str, str]
) -> dict[str, str]:
    """Return the thread variables to set so that numerical libraries use `count` threads.

    Args:
        count: Result of `compute_thread_count`.
        environ: Environment of the worker. Its OMP_NUM_THREADS is replaced, because Ray sets it in
            every worker. Other variables were set by the node's administrator and are kept.
        forwarded: Variables of the user, from the driver or the runtime environment. They take
            precedence. OMP_NUM_THREADS then also applies to the other libraries, as without Ray.
    """
    # Ray sets OMP_NUM_THREADS to the CPUs of the actor (ray-project/ray#30496).
    omp = forwarded.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": threads per nesting level
    unchanged = forwarded.keys() | (environ.keys() - {"OMP_NUM_THREADS"})
    return {name: omp or str(count) for name in THREAD_ENV_VARS if name not in unchanged}


def count_available_cores(
    *, cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the number of cores that this process may use, at least 1.

    The limits are the CPU affinity and the cgroup's quota; 1.5 cores count as 1. In a container,
    `os.cpu_count` and psutil return the cores of the machine, which are too many.

    Args:
        cgroup_root: Mount point of the cgroup v2 filesystem. Quotas of cgroup v1 are not read.
        membership: File that names the cgroup of this process.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min([float(affinity or 1), *_read_cgroup_quotas(cgroup_root, membership)])))


def get_visible_gpu_ids() -> tuple[str, ...]:
    """Return the IDs of the NVIDIA GPUs that this process can use.

    Returns:
        The entries of `CUDA_VISIBLE_DEVICES`, or the numbers from 0 if it is not set.

    Example:
        >>> can_use_gpu = len(get_visible_gpu_ids()) >= num_workers
    """
    # CUDA is not queried, because that would allocate memory on every GPU.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        # In a container, the number of a device file may differ from the number that CUDA uses.
        return tuple(str(index) for index, _ in enumerate(Path("/dev").glob(_GPU_DEVICES)))
    ids = [gpu_id.strip() for gpu_id in visible.split(",") if gpu_id.strip()]
    # CUDA ignores an invalid entry and all entries after it.
    return tuple(itertools.takewhile(lambda gpu_id: gpu_id not in _NO_GPU, ids))


def _read_cgroup_quotas(root: Path, membership: Path) -> list[float]:
    """Return the CPU quotas, in cores, of this process's cgroup and all its parents."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    # All quotas apply, and a container's limit is often set on a parent group.
    directories = [root / group, *(root / parent for parent in Path(group).parents)]
    quotas = []
    for directory in directories:
        try:
            quota, period = (directory / "cpu.max").read_text().split()
            quotas.append(
                float(quota) / float(period)
            )  # "max 100000" means no limit and raises ValueError
        except (OSError, ValueError):
            continue
    return quotas


@dataclass(eq=False)
class _SavedEnvironment:
    """Environment variables and working directory to restore after a run in this process."""

    env_vars: dict[str, str]
    directory: str


_saved_environments: list[_SavedEnvironment] = []
_lock = threading.Lock()


@contextlib.contextmanager
def preserve_environment() -> Iterator[None]:
    """Restore the environment and working directory of this process at the end of the block.

    Inside the block, `breakpoint()` starts pdb instead of Ray's debugger. If blocks overlap, the
    last one to end restores the state from before the first one.
    """
    with _lock:
        saved = _SavedEnvironment(dict(os.environ), os.getcwd())
        _saved_environments.append(saved)
    if saved.env_vars.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]  # Ray's debugger only works in its workers
    try:
        yield
    finally:
        with _lock:
            _restore(saved)


def _restore(saved: _SavedEnvironment) -> None:
    later = _saved_environments[_saved_environments.index(saved) + 1 :]
    _saved_environments.remove(saved)
    if later:
        # Another run still uses the environment. It restores the saved state when it ends.
        later[0].env_vars, later[0].directory = saved.env_vars, saved.directory
        return
    # Not with `clear()` and `update()`: a native thread that reads a variable in between would
    # read freed memory.
    for name in os.environ.keys() - saved.env_vars.keys():
        os.environ.pop(name, None)
    set_env_vars(saved.env_vars)
    os.chdir(saved.directory)
