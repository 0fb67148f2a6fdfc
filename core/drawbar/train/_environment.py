"""What a worker's process finds in its environment before the user's code runs.

A Ray worker inherits the environment of its node's raylet, not the driver's: a token set in the
shell or a notebook never arrives, and Ray sets OMP_NUM_THREADS to the CPUs it counts, often 1. So
the worker gets, in this order: the driver's variables by a documented filter, those of its runtime
environment, thread counts from its share of the node, and torchrun's rank variables. These are pure
functions over mappings, but for what the process itself has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import ray

from drawbar.train._messages import Ranks, WorkerInfo
from drawbar.train._ranks import gpu_order

DEFAULT_FORWARDED = (
    # Models, data sets and tokenizers
    *("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_*"),
    # Experiment trackers
    *("WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "CLEARML_*", "DATABRICKS_*", "TENSORBOARD_*"),
    # Storage and its credentials
    *("AWS_*", "GOOGLE_*", "GCS_*", "AZURE_*", "S3_*", "FSSPEC_*"),
    # Communication
    *("NCCL_*", "GLOO_*", "UCC_*", "UCX_*", "FI_*"),
    # Frameworks
    *("TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "TRITON_*", "CUDA_*", "CUBLAS_*"),
    *("CUDNN_*", "XLA_*", "JAX_*", "TF_*", "KERAS_*", "XGBOOST_*", "LIGHTGBM_*"),
    *("ACCELERATE_*", "FSDP_*", "DS_*", "DEEPSPEED_*", "LIGHTNING_*", "PL_*"),
    # Threads and seeds. PYTHONHASHSEED reaches only the worker's child processes.
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "VECLIB_*", "PYTHONHASHSEED"),
)
"""Glob patterns of the driver's variables that workers get; `RunConfig.forward_env` adds more."""

_DEVICES = "Ray gives each worker its own devices"
_RANKS = "it is set for each worker from its own place in the group"
_STARTUP = "Python reads it only as a process starts; send code with worker_runtime_env instead"

NEVER_FORWARDED: Mapping[str, str] = MappingProxyType(
    {
        "*_VISIBLE_DEVICES": _DEVICES,  # CUDA, NVIDIA, HIP, ROCR, ASCEND_RT, QBRUNTIME, TT
        "*_VISIBLE_CORES": _DEVICES,  # NEURON_RT
        "*_VISIBLE_CHIPS": _DEVICES,  # TPU
        "*_VISIBLE_MODULES": _DEVICES,  # HABANA
        "GPU_DEVICE_ORDINAL": _DEVICES,
        "ONEAPI_DEVICE_SELECTOR": _DEVICES,
        "ZE_AFFINITY_MASK": _DEVICES,
        "FURIOSA_DEVICES": _DEVICES,
        "RBLN_DEVICES": _DEVICES,
        "RAY_*": "it describes the driver's own connection to Ray",
        "RANK": _RANKS,
        "LOCAL_RANK": _RANKS,
        "NODE_RANK": _RANKS,
        "GROUP_RANK": _RANKS,
        "ROLE_RANK": _RANKS,
        "ROLE_NAME": _RANKS,
        "WORLD_SIZE": _RANKS,
        "LOCAL_WORLD_SIZE": _RANKS,
        "GROUP_WORLD_SIZE": _RANKS,
        "ROLE_WORLD_SIZE": _RANKS,
        "MASTER_ADDR": _RANKS,
        "MASTER_PORT": _RANKS,
        "TORCHELASTIC_*": _RANKS,
        "PET_*": _RANKS,  # the options of a torchrun that the driver itself runs under
        "TF_CONFIG": _RANKS,
        "PYTHONPATH": _STARTUP,
        "PYTHONHOME": _STARTUP,
    }
)
"""Glob patterns that no worker ever gets from the driver, each with the reason."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""The variables from which numerical libraries take their number of threads."""


def forwarded(environ: Mapping[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """Choose the driver's environment variables that the workers get.

    In a driver that Ray started itself (a Ray job, a task, a Tune trial), OMP_NUM_THREADS is Ray's
    and not the user's; it is then forwarded only if `extra` names it exactly.

    Args:
        environ: The driver's environment.
        extra: The user's own names, or patterns such as "MY_*", besides `DEFAULT_FORWARDED`. A name
            that is not set in `environ` is left out.

    Raises:
        ValueError: `extra` names a variable of `NEVER_FORWARDED`. A wider pattern that covers one
            is fine: the variable is left out.
    """
    for name in extra:
        if (reason := _never(name)) is not None:
            raise ValueError(
                f"RunConfig.forward_env names {name!r}, which is never forwarded: {reason}"
            )
    chosen = {
        name: value
        for name, value in environ.items()
        if _matches(name, (*DEFAULT_FORWARDED, *extra)) and _never(name) is None
    }
    if "RAY_RAYLET_PID" in environ and "OMP_NUM_THREADS" not in extra:
        chosen.pop("OMP_NUM_THREADS", None)
    return chosen


def by_runtime_env() -> dict[str, str]:
    """Give the variables that the job's runtime environment, or the workers', has set here.

    They were meant for the run's processes, so they go before what the driver's shell has set.
    """
    if "RAY_RAYLET_PID" not in os.environ or not ray.is_initialized():
        return {}  # not a process that Ray has started
    named: Mapping[str, str] = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return {name: os.environ[name] for name in named if name in os.environ and not _never(name)}


def torchrun_variables(ranks: Ranks) -> dict[str, str]:
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


def thread_count(*, cpus_per_worker: float | None, local_world_size: int, cores: int) -> int:
    """Say how many threads a worker's numerical libraries should use, at least 1.

    Args:
        cpus_per_worker: The CPUs that the user asked for per worker, or None if they did not say:
            then the workers of a node share all its cores.
        local_world_size: Workers of this run on the node.
        cores: Cores that the worker's process may use; see `available_cores`.
    """
    share = cores // local_world_size if cpus_per_worker is None else int(cpus_per_worker)
    return max(1, min(share, cores))


def thread_variables(
    count: int, environ: Mapping[str, str], forwarded: Mapping[str, str]
) -> dict[str, str]:
    """Give the thread variables that a worker must set so that its libraries use `count` threads.

    Args:
        count: From `thread_count`.
        environ: The worker's environment. Its OMP_NUM_THREADS is replaced, since Ray sets one in
            every worker; any other one was set by whoever runs the node, and stays.
        forwarded: What the user chose: forwarded from the driver or set in the runtime environment.
            It wins. A chosen OMP_NUM_THREADS also holds for the other libraries, as it does without
            Ray.
    """
    omp = forwarded.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": threads per nesting level
    kept = forwarded.keys() | (environ.keys() - {"OMP_NUM_THREADS"})
    return {name: omp or str(count) for name in THREAD_VARIABLES if name not in kept}


def local_gpu_ids(count: int) -> tuple[str, ...]:
    """Give the ids of the first GPUs that this process sees: `count`, or as many as there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = Path("/dev").glob("nvidia[0-9]*")
        ids = sorted((each.name.removeprefix("nvidia") for each in devices), key=int)
    else:
        ids = [each.strip() for each in visible.split(",") if each.strip()]
    return tuple(ids[:count])


def visible_devices(workers_on_node: Sequence[WorkerInfo]) -> str:
    """Give CUDA_VISIBLE_DEVICES for the workers of one node: all their GPUs, "" if they have none.

    Each worker sees the GPUs of all, so that local rank i uses the i-th device and NCCL can reach a
    neighbour's memory directly.
    """
    gpu_ids = {gpu_id for worker in workers_on_node for gpu_id in worker.gpu_ids}
    return ",".join(sorted(gpu_ids, key=gpu_order))


def available_cores(
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
    return max(1, int(min([float(affinity or 1), *_cgroup_quotas(cgroup_root, membership)])))


def _cgroup_quotas(root: Path, membership: Path) -> list[float]:
    """Read the CPU quotas, in cores, of this process's cgroup and of all groups above it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folders = [root / group, *(root / parent for parent in Path(group).parents)]
    quotas = []
    for folder in folders:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(float(quota) / float(period))  # "max 100000": no limit here
        except (OSError, ValueError):
            continue
    return quotas


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _never(name: str) -> str | None:
    return next((why for p, why in NEVER_FORWARDED.items() if fnmatchcase(name, p)), None)
