"""Warn when a library would use more threads than a worker has CPUs."""

from __future__ import annotations

import os
import warnings
from numbers import Integral

from drawbar.train import ScalingConfig


def worker_threads() -> int:
    """Return the number of threads for this worker, at least 1."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(threads) if threads.isdecimal() else os.cpu_count() or 1


def warn_oversubscribed_threads(name: str, threads: object, scaling_config: ScalingConfig) -> None:
    """Warn in the driver if a library would use more threads than a worker has CPUs.

    Args:
        name: Parameter of the library.
        threads: Value of the parameter; None or not positive for the worker's default.
        scaling_config: Resources of the workers.
    """
    cpus = scaling_config.num_cpus_per_worker
    has_cpu_limit = scaling_config.max_workers > 0 and cpus > 0
    if not has_cpu_limit or not isinstance(threads, Integral) or threads <= max(cpus, 1):
        return
    warnings.warn(
        f"params[{name!r}]={threads} is more than the {cpus:g} CPUs of a worker, so its threads "
        "wait for each other. Remove it, or set "
        f"ScalingConfig(resources_per_worker={{'CPU': {threads}}}).",
        stacklevel=3,
    )
