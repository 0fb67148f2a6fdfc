"""Start a run whose workers are Ray actors."""

from __future__ import annotations

from collections.abc import Callable

import ray

from drawbar.train._controller.run import RunSpec
from drawbar.train._data import split
from drawbar.train._driver.controller_thread import ControllerThread
from drawbar.train._history.event_stream import Watcher
from drawbar.train._worker_group.actor_pool import ActorPool
from drawbar.train._worker_group.cluster import (
    check_cluster_fits,
    check_dataset_cpus,
    check_validation_fits,
)
from drawbar.train._worker_group.placement import Placement
from drawbar.train._worker_group.ray_group import RayWorkerGroup
from drawbar.train._worker_group.ray_validator import RayValidator
from drawbar.train._worker_group.thread_group import SubmitCall
from drawbar.train._worker_group.worker_group import WorkerGroup


def start_ray_run(
    spec: RunSpec, make_console: Callable[[str], Watcher], *, use_caller_thread: bool = False
) -> ControllerThread:
    """Check that the cluster has room for a run, and start it in this process.

    Args:
        spec: The run.
        make_console: As in `ControllerThread`.
        use_caller_thread: As in `ControllerThread`.

    Returns:
        The started run.

    Raises:
        InsufficientResourcesError: The cluster cannot hold the workers, datasets, or validations.
        Exception: The run cannot be opened, as in `ControllerThread`.
    """
    check_cluster_fits(spec.scaling_config)
    if spec.datasets:
        check_dataset_cpus(
            spec.scaling_config, split.list_streamed(spec.datasets, spec.dataset_config)
        )
    if spec.validation_task is not None:
        check_validation_fits(spec.validation_task.task_resources)

    payload = ray.put(spec.train_loop)  # before the caller can change an array in it
    parent_placement = Placement.from_current_group(spec.scaling_config)

    def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
        runtime_env = spec.run_config.worker_runtime_env
        setup = spec.backend_config.process_setup_hook
        pool = ActorPool(spec.scaling_config, path, runtime_env, setup, parent_placement)
        return RayWorkerGroup(pool, payload)

    validator = RayValidator(spec.validation_task) if spec.validation_task is not None else None
    return ControllerThread(
        spec,
        make_worker_group,
        make_console,
        validator,
        is_on_ray=True,
        use_caller_thread=use_caller_thread,
    )
