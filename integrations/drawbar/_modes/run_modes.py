"""Modes of runs: with Ray actors, in threads of this process, or with programs on this machine.

`torchrun_run.py` has the mode for processes that torchrun or another launcher has started.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from dataclasses import dataclass, replace
from functools import partial

from drawbar._base.frames import warn_caller
from drawbar._base.node_resources import NodeResources, count_fitting_bundles
from drawbar._console.slow_phases import print_if_slow
from drawbar._fork_server.forkserver_preload import read_default_modules
from drawbar._handle.run_view import RunView
from drawbar._modes.program_launch import ProgramForkServer, run_with_fork_server
from drawbar._modes.start_run import (
    check_in_place_recovery,
    start_controller,
    start_ray_run,
)
from drawbar._modes.thread_group import ThreadWorkerGroup
from drawbar._modes.validators import ThreadValidator
from drawbar._modes.watchers import make_remote_watchers
from drawbar._process import sentinel
from drawbar._process.rank_assignment import assign_local_gpus, get_local_gpu_ids
from drawbar._process.worker_env import get_visible_gpu_ids
from drawbar._ray_connection.connection import connect_to_ray, has_started_ray, is_ray_client
from drawbar._ray_connection.ray_probe import check_reachable
from drawbar._recovery.failure_config import enable_in_place_recovery
from drawbar._storage.write_checks import check_storage_before_start
from drawbar.train._config.backend import BackendConfig
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._controller.run import RunSpec
from drawbar.train._driver.open_run import get_run_directory
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker_group.capacity import check_group_fits
from drawbar.train._worker_group.cluster import is_connected_to_ray
from drawbar.train._worker_group.worker_group import SubmitCall, WorkerGroup


@dataclass(frozen=True)
class LocalMode:
    """Run the training function in this process.

    Attributes:
        validation_config: Validation of checkpoints in threads, or None.
        use_caller_thread: As in `ControllerThread`.
        num_threads: Number of ranks, each in a separate thread. None means `num_workers=0`: one
            rank, submitted as a call.
    """

    validation_config: ValidationConfig | None
    use_caller_thread: bool
    num_threads: int | None = None

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        """Start a run, whose function is not pickled."""
        gpu_ids = get_local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker))

        def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
            if self.num_threads is None:
                return ThreadWorkerGroup(train_loop, submit_call=submit_call, gpu_ids=[gpu_ids])
            return ThreadWorkerGroup(train_loop, self.num_threads)

        config = self.validation_config
        return start_controller(
            spec,
            make_worker_group,
            ThreadValidator(config) if config is not None else None,
            use_caller_thread=self.use_caller_thread,
        )


@dataclass(frozen=True)
class ProgramMode:
    """Run the training function in one thread of this process per rank, without Ray.

    The function may call `drawbar.train.backend.run_program`, so that the thread waits for a
    program in a child process.

    Attributes:
        use_caller_thread: Whether the thread that calls `fit()` waits for the run.

    Example:
        ```python
        class ProgramTrainer(DataParallelTrainer):
            def get_run_mode(self, *, use_caller_thread):
                return ProgramMode(use_caller_thread=use_caller_thread)
        ```
    """

    use_caller_thread: bool = False

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        """Check that this machine has room for a run, and start it.

        Args:
            spec: Settings of the run.
            train_loop: Training function.

        Returns:
            View of the run.

        Raises:
            InsufficientResourcesError: This machine cannot hold the workers.
            Exception: The run cannot be opened.
        """
        num_workers = _count_workers(spec.scaling_config)
        worker = spec.worker_spec
        # If this process dies, the sentinel kills the programs, which it finds by this variable.
        env_vars = {**worker.env_vars, **sentinel.start_for_driver()}
        spec = replace(spec, worker_spec=replace(worker, env_vars=env_vars))
        gpu_ids = assign_local_gpus(spec.scaling_config.num_gpus_per_worker, num_workers)
        # An empty list turns fork servers off. One rank has no imports to share.
        can_fork = spec.run_config.forkserver_preload != () and hasattr(os, "pidfd_open")
        fork_server = ProgramForkServer()
        if can_fork and num_workers > 1:
            run = partial(run_with_fork_server, fork_server, train_loop.function)
            train_loop = train_loop.with_function(run)
        return start_controller(
            spec,
            lambda path, submit_call: ThreadWorkerGroup(train_loop, num_workers, gpu_ids=gpu_ids),
            use_caller_thread=self.use_caller_thread,
            on_end=lambda run: fork_server.close(),
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


def apply_backend_config(run_config: RunConfig, backend_config: BackendConfig) -> RunConfig:
    """Set recovery in place if the backend config requests it.

    Raises:
        ValueError: The `FailureConfig` does not allow it.
    """
    if not backend_config.recovers_in_place:
        return run_config
    name = type(backend_config).__name__
    failures = enable_in_place_recovery(run_config.failure_config, name)
    return replace(run_config, failure_config=failures)


@dataclass(frozen=True)
class RayMode:
    """Run the training function in Ray actors.

    The controller runs in this process. For detached runs and Ray Client, it runs in an actor.

    Attributes:
        use_caller_thread: As in `ControllerThread`.
    """

    use_caller_thread: bool

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        """Connect to Ray and start a run."""
        _check_before_ray(spec)
        _connect(spec.run_config)
        is_detached = spec.run_config.detached
        if not is_detached and not is_ray_client():
            return start_ray_run(spec, use_caller_thread=self.use_caller_thread)
        # Here, because this module imports Ray, which other runs do not need.
        from drawbar._modes.host_actor import HostedRun
        from drawbar._modes.host_actor_run import start_host_actor_run

        if is_detached:
            _warn_if_driver_owns_ray()
            _warn_if_driver_owns_objects(spec)
        return start_host_actor_run(HostedRun(spec, *make_remote_watchers(spec.run_config)))


def _check_before_ray(spec: RunSpec) -> None:
    """Check the environment, and that this process can write to the storage, before it starts Ray.

    If Ray runs already, the start of the run checks the storage early enough. Storage is not
    checked if the run is controlled by another process, which may have other directories.

    Raises:
        OSError: The storage cannot be written.
        ValueError: `DRAWBAR_FORKSERVER_PRELOAD` is invalid, or the run cannot recover in place.
    """
    read_default_modules()
    check_in_place_recovery(spec)
    is_client = os.environ.get("RAY_ADDRESS", "").startswith("ray://")
    if not (spec.run_config.detached or is_client or is_connected_to_ray()):
        check_storage_before_start(get_run_directory(spec.run_config))


def _connect(config: RunConfig) -> None:
    """Connect to Ray, and print the address of a running cluster.

    Raises:
        ConnectionError: There is no cluster at the address in RAY_ADDRESS.
        PermissionError: The cluster requires another token.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address and not is_connected_to_ray():
        check_reachable(address)
    shows_progress = config.logging_config.level_number <= logging.INFO
    with print_if_slow("starting Ray") if shows_progress else contextlib.nullcontext():
        joined_address = connect_to_ray()
    if joined_address and shows_progress:
        text = "[drawbar] joined the running Ray cluster at"
        print(text, f"{joined_address}. RAY_ADDRESS=local starts a new one.", file=sys.stderr)


def _warn_if_driver_owns_ray() -> None:
    """Warn that the cluster of a detached run ends with this process."""
    if has_started_ray():
        warn_caller(
            "RunConfig.detached=True has no effect, because this process has started its own "
            "Ray, which ends with it. Set RAY_ADDRESS, or call ray.init(address=...), to use "
            "a cluster that keeps running"
        )


def _warn_if_driver_owns_objects(spec: RunSpec) -> None:
    """Warn that objects of a detached run are lost when this process ends."""
    serialized = [
        spec.train_loop,
        *([spec.validation_task.function] if spec.validation_task else []),
    ]
    count = sum(value.num_owned_objects for value in serialized)
    if count:
        warn_caller(
            "the training function, its config, or the validation function refers to objects "
            f"in Ray's object store that this process owns ({count}). When this process ends, "
            "ray.get raises OwnerDiedError in the detached run. Keep this process alive until "
            "the run has fetched them, or put them from an actor that stays alive"
        )
