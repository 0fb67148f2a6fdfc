"""How many threads a library may use on this worker."""

from __future__ import annotations

import os
import warnings
from numbers import Integral

from drawbar.train import ScalingConfig


def worker_threads() -> int:
    """Give the number of threads of this worker's share of the node, at least 1."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(threads) if threads.isdecimal() else os.cpu_count() or 1


def warn_oversubscribed_threads(name: str, threads: object, scaling_config: ScalingConfig) -> None:
    """Warn in the driver if a library is told to use more threads than a worker has CPUs.

    Args:
        name: The library's parameter.
        threads: Its value; None, or not positive, if the worker's own share is used.
        scaling_config: What the workers have.
    """
    cpus = scaling_config.num_cpus_per_worker
    shared = scaling_config.max_workers > 0 and cpus > 0
    if not shared or not isinstance(threads, Integral) or threads <= max(cpus, 1):
        return
    warnings.warn(
        f"params[{name!r}] is {threads}, but a worker has {cpus:g} CPUs, so its threads wait for "
        "each other; leave it out, or give each worker as many CPUs in "
        f"ScalingConfig(resources_per_worker={{'CPU': {threads}}})",
        stacklevel=3,
    )
