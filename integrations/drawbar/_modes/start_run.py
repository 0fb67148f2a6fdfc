"""Start a controller in this process, with the features that every run has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from drawbar._failure_analysis.failure_history import FailureHistory
from drawbar._handle.in_process_run import InProcessRun
from drawbar._handle.run_view import RunView
from drawbar._modes.cluster_checks import check_cluster_fits, check_validation_fits
from drawbar._modes.control_socket import ControlSocket
from drawbar._modes.fork_servers import make_fork_server_spec
from drawbar._modes.validators import RayValidator
from drawbar._modes.watchers import make_watchers
from drawbar.train._controller.run import MakeWatcher, RunSpec
from drawbar.train._worker_group.validator import Validator
from drawbar.train._worker_group.worker_group import SubmitCall, WorkerGroup

if TYPE_CHECKING:
    from drawbar._async_save.memory_replication import MemoryReplication
    from drawbar._health_manager.health_manager import HealthManager


def start_controller(
    spec: RunSpec,
    make_worker_group: Callable[[str, SubmitCall], WorkerGroup],
    validator: Validator | None = None,
    *,
    watchers: Sequence[MakeWatcher] | None = None,
    is_on_ray: bool = False,
    use_caller_thread: bool = False,
    on_end: Callable[[RunView], object] | None = None,
) -> InProcessRun:
    """Open a run and start its controller in a thread of this process.

    Args:
        spec: The run.
        make_worker_group: As in `ControllerThread`.
        validator: As in `ControllerThread`.
        watchers: As in `ControllerThread`. Default: all watchers of a run in this process.
        is_on_ray: As in `ControllerThread`.
        use_caller_thread: As in `ControllerThread`.
        on_end: As in `ControllerThread`.

    Returns:
        The started run.

    Raises:
        Exception: The workers cannot read the data, or the run cannot be opened, as in
            `ControllerThread`.
    """
    if not is_on_ray and spec.run_config.health_config is not None:
        raise ValueError(
            "RunConfig.health_config needs workers that are Ray actors. Set "
            "ScalingConfig(num_workers=1) or more, without torchrun, or remove health_config."
        )
    if not is_on_ray and spec.run_config.checkpoint_config.memory_replication:
        raise ValueError(
            "CheckpointConfig(memory_replication=True) needs workers that are Ray actors on "
            "several nodes, which copy checkpoints to each other. Set ScalingConfig(num_workers=2) "
            "or more, without torchrun, or memory_replication=False."
        )
    if not is_on_ray and spec.run_config.failure_config.recovery == "in_place":
        setting, _ = name_in_place_setting(spec)
        raise ValueError(
            f"{setting} needs workers that are Ray actors, which can be replaced. Set "
            "ScalingConfig(num_workers=2) or more, without torchrun."
        )
    if spec.data_source is not None:
        spec.data_source.check(spec.scaling_config)
    if watchers is None:
        is_live = spec.scaling_config.max_workers > 0
        watchers = make_watchers(spec.run_config, is_live=is_live, is_on_ray=is_on_ray)
    return InProcessRun(
        spec,
        make_worker_group,
        watchers,
        ControlSocket,
        FailureHistory,
        validator=validator,
        is_on_ray=is_on_ray,
        use_caller_thread=use_caller_thread,
        on_end=on_end,
    )


def name_in_place_setting(spec: RunSpec) -> tuple[str, str]:
    """Return the setting that requests recovery in place, and the one without it."""
    if spec.backend_config.recovers_in_place:
        name = type(spec.backend_config).__name__
        return name, f"another config than {name}"
    return "FailureConfig(recovery='in_place')", "recovery='restart'"


def check_in_place_recovery(spec: RunSpec) -> None:
    """Check that a run on Ray can recover in place, if it is set to.

    Raises:
        ValueError: It cannot.
    """
    if spec.run_config.failure_config.recovery != "in_place":
        return
    (setting, alternative), scaling = name_in_place_setting(spec), spec.scaling_config
    if scaling.max_workers < 2:
        raise ValueError(
            f"{setting} needs a rank that survives, but ScalingConfig.num_workers is "
            f"{scaling.max_workers}. Set num_workers=2 or more, or {alternative}."
        )
    if scaling.elasticity_enabled:
        raise ValueError(
            f"{setting} needs a fixed number of workers, but num_workers is "
            f"{scaling.num_workers!r}. Set one number, or {alternative}."
        )
    if spec.data_source is not None:
        raise ValueError(
            f"{setting} works with drawbar.torch.prepare_data_loader(), but the trainer has "
            f"datasets. Load the data in the training function, or set {alternative}."
        )
    spec.backend_config.check_in_place_recovery(scaling)


def start_ray_run(
    spec: RunSpec,
    *,
    watchers: Sequence[MakeWatcher] | None = None,
    use_caller_thread: bool = False,
) -> InProcessRun:
    """Check that the cluster has room for a run, and start it in this process.

    Args:
        spec: The run.
        watchers: As in `start_controller`.
        use_caller_thread: As in `ControllerThread`.

    Returns:
        The started run.

    Raises:
        InsufficientResourcesError: The cluster cannot hold the workers, datasets, or validations.
        Exception: The run cannot be opened, as in `ControllerThread`.
    """
    import ray  # not at the top: runs without Ray import this module, too

    from drawbar.train._worker_group.actor_pool import ActorPool
    from drawbar.train._worker_group.placement import Placement
    from drawbar.train._worker_group.ray_group import RayWorkerGroup

    check_cluster_fits(spec.scaling_config)
    if spec.validation_task is not None:
        check_validation_fits(spec.validation_task.task_resources)

    train_loop = ray.put(spec.train_loop)  # before the caller can change an array in it
    parent_placement = Placement.from_current_group(spec.scaling_config)
    fork_server = make_fork_server_spec(spec)

    health, replication = _make_health_manager(spec), _make_memory_replication(spec)
    start_stores = None if replication is None else replication.start_stores
    if watchers is None:
        watchers = make_watchers(spec.run_config, is_on_ray=True)
    watchers = [*watchers, *(each.watch for each in (health, replication) if each is not None)]

    def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
        runtime_env = spec.run_config.worker_runtime_env
        setup = spec.backend_config.process_setup_hook
        pool = ActorPool(
            spec.scaling_config,
            path,
            runtime_env,
            setup,
            parent_placement,
            fork_server,
            keeps_spares=spec.run_config.failure_config.recovery == "in_place",
        )
        if health is not None:
            from drawbar._health_manager.checked_group import CheckedWorkerGroup

            return CheckedWorkerGroup(pool, train_loop, health, start_stores)
        return RayWorkerGroup(pool, train_loop, start_stores)

    return start_controller(
        spec,
        make_worker_group,
        RayValidator(spec.validation_task) if spec.validation_task is not None else None,
        watchers=watchers,
        is_on_ray=True,
        use_caller_thread=use_caller_thread,
    )


def _make_health_manager(spec: RunSpec) -> HealthManager | None:
    if spec.run_config.health_config is None:
        return None
    from drawbar._health_manager.health_manager import HealthManager  # few runs need it

    return HealthManager(spec.run_config, spec.scaling_config)


def _make_memory_replication(spec: RunSpec) -> MemoryReplication | None:
    if not spec.run_config.checkpoint_config.memory_replication:
        return None
    from drawbar._async_save.memory_replication import MemoryReplication  # few runs need it

    return MemoryReplication(spec.run_config.worker_runtime_env)
