"""Start a run whose ranks are programs on this machine, without Ray.

Each rank is a thread of this process. Its training function calls `run_program`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._controller.run import RunSpec
from drawbar.train._driver.controller_thread import ControllerThread
from drawbar.train._history.event_stream import Watcher
from drawbar.train._worker import sentinel
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker.worker_env import get_visible_gpu_ids
from drawbar.train._worker_group.capacity import (
    NodeResources,
    check_group_fits,
    count_fitting_bundles,
)
from drawbar.train._worker_group.ranks import assign_local_gpus
from drawbar.train._worker_group.thread_group import SubmitCall, ThreadWorkerGroup
from drawbar.train._worker_group.worker_group import WorkerGroup


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

    def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
        return ThreadWorkerGroup(payload, num_workers, gpu_ids=gpu_ids)

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
    check_group_fits(
        [machine],
        scaling.bundle,
        scaling.min_workers,
        scaling.placement_strategy,
        scaling.label_selectors[: scaling.min_workers],
        can_autoscale=False,
    )
    return min(count_fitting_bundles(machine.total, scaling.bundle), scaling.max_workers)
