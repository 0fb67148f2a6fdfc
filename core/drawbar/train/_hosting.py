"""How a run gets its `Host`, in the driver or in an actor: with Ray workers, or with none."""

from __future__ import annotations

import math
from collections.abc import Callable

import ray

from drawbar.train import _data, _environment, _placement
from drawbar.train._console import Console
from drawbar.train._host import Host, Spawn
from drawbar.train._local import LocalWorkerGroup
from drawbar.train._spec import RunSpec
from drawbar.train._validation import ValidationConfig
from drawbar.train._validator import RayValidator, ThreadValidator
from drawbar.train._worker import Payload
from drawbar.train._worker_group import RayWorkerGroup, WorkerGroup


def host_workers(
    spec: RunSpec, make_console: Callable[[str], Console], *, jobs_wait: bool = False
) -> Host:
    """Check that the cluster has room for a run, and host it in this process.

    Args:
        spec: What is to run; it has workers.
        make_console: As for `Host`.
        jobs_wait: As for `Host`.

    Raises:
        ValueError: The cluster cannot hold what the run needs.
        Exception: Whatever keeps a `Host` from starting.
    """
    _placement.check_cluster(spec.scaling_config)
    lazy = _data.lazy(spec.datasets, spec.dataset_config)
    _placement.check_data(spec.scaling_config, lazy)
    if spec.validation is not None:
        _placement.check_validation(spec.validation.resources)

    payload = ray.put(spec.payload)  # before the caller can go on, and change an array

    def make_group(path: str, spawn: Spawn) -> WorkerGroup:
        runtime_env = spec.run_config.worker_runtime_env
        setup = spec.backend_config.process_setup
        return RayWorkerGroup(spec.scaling_config, path, payload, runtime_env, setup)

    validator = RayValidator(spec.validation) if spec.validation is not None else None
    return Host(spec, make_group, make_console, validator, jobs_wait=jobs_wait)


def host_function(
    spec: RunSpec,
    payload: Payload,
    validation_config: ValidationConfig | None,
    make_console: Callable[[str], Console],
    *,
    jobs_wait: bool,
    threads: int | None = None,
) -> Host:
    """Host a run whose function runs in this very process.

    Args:
        spec: What is to run.
        payload: The function itself; nothing is pickled.
        validation_config: How its checkpoints are validated, in threads.
        make_console: As for `Host`.
        jobs_wait: As for `Host`.
        threads: How many ranks there are, each in a thread of its own. None is `num_workers=0`: one
            rank, as a job of the host.

    Raises:
        Exception: Whatever keeps a `Host` from starting.
    """
    gpu_ids = _environment.local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker))

    def make_group(path: str, spawn: Spawn) -> WorkerGroup:
        if threads is None:
            return LocalWorkerGroup(payload, spawn=spawn, gpu_ids=gpu_ids)
        return LocalWorkerGroup(payload, threads)

    validator = ThreadValidator(validation_config) if validation_config is not None else None
    return Host(spec, make_group, make_console, validator, jobs_wait=jobs_wait)
