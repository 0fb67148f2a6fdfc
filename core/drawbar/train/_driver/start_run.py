"""Start a run in this process: on Ray, in threads, or with programs on this machine.

Only `start_ray_run` imports Ray.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace

from drawbar._modes.program_launch import ProgramForkServer
from drawbar._process import sentinel
from drawbar._process.worker_env import get_visible_gpu_ids
from drawbar._records.event_stream import Watcher
from drawbar.train._config.forkserver_preload import read_default_modules
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._controller.run import RunSpec
from drawbar.train._driver import preflight
from drawbar.train._driver.controller_thread import ControllerThread
from drawbar.train._driver.fork_servers import make_fork_server_spec
from drawbar.train._driver.open_run import get_run_directory
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker_group.capacity import (
    NodeResources,
    check_group_fits,
    count_fitting_bundles,
)
from drawbar.train._worker_group.cluster import (
    check_cluster_fits,
    check_validation_fits,
    has_started_ray,
    is_connected_to_ray,
)
from drawbar.train._worker_group.ranks import assign_local_gpus, get_local_gpu_ids
from drawbar.train._worker_group.thread_group import SubmitCall, ThreadWorkerGroup
from drawbar.train._worker_group.validators import RayValidator, ThreadValidator
from drawbar.train._worker_group.worker_group import WorkerGroup


def check_before_ray(spec: RunSpec) -> None:
    """Check the environment, and that this process can write to the storage, before it starts Ray.

    If Ray runs already, the start of the run checks the storage early enough. Storage is not
    checked if the run is controlled by another process, which may have other directories.

    Raises:
        OSError: The storage cannot be written.
        ValueError: `DRAWBAR_FORKSERVER_PRELOAD` is invalid.
    """
    read_default_modules()
    is_client = os.environ.get("RAY_ADDRESS", "").startswith("ray://")
    if not (spec.run_config.detached or is_client or is_connected_to_ray()):
        preflight.check_storage_before_start(get_run_directory(spec.run_config))


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
    import ray

    from drawbar.train._worker_group.actor_pool import ActorPool
    from drawbar.train._worker_group.placement import Placement
    from drawbar.train._worker_group.ray_group import RayWorkerGroup

    check_cluster_fits(spec.scaling_config)
    if spec.data_source is not None:
        spec.data_source.check(spec.scaling_config)
    if spec.validation_task is not None:
        check_validation_fits(spec.validation_task.task_resources)

    payload = ray.put(spec.train_loop)  # before the caller can change an array in it
    parent_placement = Placement.from_current_group(spec.scaling_config)
    fork_server = make_fork_server_spec(spec)

    def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
        runtime_env = spec.run_config.worker_runtime_env
        setup = spec.backend_config.process_setup_hook
        pool = ActorPool(
            spec.scaling_config, path, runtime_env, setup, parent_placement, fork_server
        )
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


def start_local_run(
    spec: RunSpec,
    payload: TrainLoop,
    validation_config: ValidationConfig | None,
    make_console: Callable[[str], Watcher],
    *,
    use_caller_thread: bool,
    num_threads: int | None = None,
) -> ControllerThread:
    """Start a run whose training function runs in this process.

    Args:
        spec: The run.
        payload: The training function, which is not pickled.
        validation_config: Validation of checkpoints in threads, or None.
        make_console: As in `ControllerThread`.
        use_caller_thread: As in `ControllerThread`.
        num_threads: Number of ranks, each in a separate thread. None means `num_workers=0`: one
            rank, submitted as a call.

    Returns:
        The started run.

    Raises:
        Exception: The run cannot be opened, as in `ControllerThread`.
    """
    if spec.data_source is not None:
        spec.data_source.check(spec.scaling_config)
    gpu_ids = get_local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker))

    def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
        if num_threads is None:
            return ThreadWorkerGroup(payload, submit_call=submit_call, gpu_ids=[gpu_ids])
        return ThreadWorkerGroup(payload, num_threads)

    validator = ThreadValidator(validation_config) if validation_config is not None else None
    return ControllerThread(
        spec, make_worker_group, make_console, validator, use_caller_thread=use_caller_thread
    )


def start_program_run(
    spec: RunSpec,
    payload: TrainLoop,
    make_console: Callable[[str], Watcher],
    *,
    use_caller_thread: bool = False,
) -> ControllerThread:
    """Check that this machine has room for a run, and start it.

    Args:
        spec: The run.
        payload: Training function that runs a program.
        make_console: As in `ControllerThread`.
        use_caller_thread: As in `ControllerThread`.

    Returns:
        The started run.

    Raises:
        InsufficientResourcesError: This machine cannot hold the workers.
        Exception: The run cannot be opened, as in `ControllerThread`.
    """
    num_workers = _count_workers(spec.scaling_config)
    worker = spec.worker_spec
    # If this process dies, the sentinel kills the programs, which it finds by this variable.
    env_vars = {**worker.env_vars, **sentinel.start_for_driver()}
    spec = replace(spec, worker_spec=replace(worker, env_vars=env_vars))
    gpu_ids = assign_local_gpus(spec.scaling_config.num_gpus_per_worker, num_workers)
    # An empty list turns fork servers off. One rank has no imports to share.
    can_fork = spec.run_config.forkserver_preload != () and hasattr(os, "pidfd_open")
    fork_server = ProgramForkServer() if can_fork and num_workers > 1 else None

    def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
        return ThreadWorkerGroup(payload, num_workers, gpu_ids=gpu_ids, fork_server=fork_server)

    return ControllerThread(
        spec, make_worker_group, make_console, None, use_caller_thread=use_caller_thread
    )


def _count_workers(scaling: ScalingConfig) -> int:
    """Return the number of workers. An elastic run has as many as fit on this machine."""
    machine = NodeResources(
        node_id="",
        hostname=os.uname().nodename,
        total={
            "CPU": len(os.sched_getaffinity(0)),
            "GPU": len(get_visible_gpu_ids()),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
    )
    check_group_fits([machine], scaling)
    return min(count_fitting_bundles(machine.total, scaling.bundle), scaling.max_workers)


# -- detached runs


_STACKLEVEL = 5  # the user's call of `fit()` or `start()`


def check_not_detached(config: RunConfig) -> None:
    """Reject `detached=True` for a run in this process.

    Raises:
        ValueError: The run is detached.
    """
    if config.detached:
        raise ValueError(
            "RunConfig.detached=True needs workers that outlive this process, but "
            "ScalingConfig.num_workers=0 runs the function in this process. Set num_workers=1"
        )


def warn_if_driver_owns_ray() -> None:
    """Warn that the cluster of a detached run ends with this process."""
    if has_started_ray():
        warnings.warn(
            "RunConfig.detached=True has no effect, because this process has started its own "
            "Ray, which ends with it. Set RAY_ADDRESS, or call ray.init(address=...), to use "
            "a cluster that keeps running",
            stacklevel=_STACKLEVEL,
        )


def warn_if_driver_owns_objects(spec: RunSpec) -> None:
    """Warn that objects of a detached run are lost when this process ends."""
    serialized = [
        spec.train_loop,
        *([spec.validation_task.function] if spec.validation_task else []),
    ]
    count = sum(value.num_owned_objects for value in serialized)
    if count:
        warnings.warn(
            "the training function, its config, or the validation function refers to objects "
            f"in Ray's object store that this process owns ({count}). When this process ends, "
            "ray.get raises OwnerDiedError in the detached run. Keep this process alive until "
            "the run has fetched them, or put them from an actor that stays alive",
            stacklevel=_STACKLEVEL,
        )
