"""Decide which modules the fork servers of a run import, if its workers are forked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from drawbar._base.frames import warn_caller
from drawbar._fork_server.forkserver_preload import find_other_interpreter, read_default_modules
from drawbar._process.worker_env import (
    compute_thread_count,
    count_available_cores,
    make_thread_env_vars,
)
from drawbar.train._controller.run import RunSpec
from drawbar.train._worker_group.cluster import list_node_resources

if TYPE_CHECKING:
    from drawbar._fork_server.fork_server_spec import ForkServerSpec


def make_fork_server_spec(spec: RunSpec) -> ForkServerSpec | None:
    """Return the spec of the run's fork servers, None if its workers are not forked."""
    from drawbar._fork_server.fork_server_spec import ForkServerSpec, is_secret

    worker = spec.worker_spec
    assert worker.driver_env is not None
    sys_path = worker.driver_env.sys_path
    workers_per_node = max(1, spec.scaling_config.max_workers // len(list_node_resources()))
    cores = count_available_cores()

    modules = spec.run_config.forkserver_preload
    if modules is not None:
        if not modules or _warn_of_other_interpreter():
            return None
        environment = _make_environment(spec, workers_per_node, cores)
        return ForkServerSpec.create(modules, sys_path, environment)

    modules = read_default_modules()
    if modules == () or not _can_fork_by_default(spec):
        return None
    environment = _make_environment(spec, workers_per_node, cores)
    # An import may read a URL, which is no part of a command line if it has a password.
    if any("://" in value and is_secret(name, value) for name, value in environment.items()):
        return None
    if modules is not None:
        return ForkServerSpec.create(modules, sys_path, environment)
    # A first server does not help workers that each have a core and import in parallel.
    modules = spec.backend_config.forkserver_preload if workers_per_node > cores else ()
    return ForkServerSpec.create(modules, sys_path, environment).follow(spec.function)


def _warn_of_other_interpreter() -> bool:
    """Warn if the runtime environment of this job chooses the workers' interpreter."""
    import ray

    from drawbar._fork_server.fork_server_spec import is_fork_command

    job_env = ray.get_runtime_context().runtime_env
    field = find_other_interpreter(job_env)
    if field is None:
        return False
    reason = f"the runtime environment of this Ray job has {field!r}"
    if is_fork_command(job_env.get("py_executable")):
        reason = "fit() is called in a forked worker of another run"
    warn_caller(
        f"forkserver_preload has no effect, because {reason}. The workers start without it."
    )
    return True


def _can_fork_by_default(spec: RunSpec) -> bool:
    """Return whether the workers of a run can be forked that does not request it."""
    import ray

    runtime_envs = ray.get_runtime_context().runtime_env, spec.run_config.worker_runtime_env
    return (
        hasattr(os, "pidfd_open")
        # The setup of a backend comes before all imports, which may depend on it.
        and spec.backend_config.process_setup_hook is None
        and not any(find_other_interpreter(runtime_env) for runtime_env in runtime_envs)
    )


def _make_environment(spec: RunSpec, workers_per_node: int, cores: int) -> dict[str, str]:
    """Return the variables of the driver that the modules may read when they are imported."""
    worker = spec.worker_spec
    threads = compute_thread_count(
        cpus_per_worker=worker.num_cpus, local_world_size=workers_per_node, cores=cores
    )
    environment = {**worker.env_vars, **make_thread_env_vars(threads, {}, worker.env_vars)}
    for name in _list_runtime_env_vars(spec):
        environment.pop(name, None)  # the worker has them, with other values
    return environment


def _list_runtime_env_vars(spec: RunSpec) -> list[str]:
    """Return the names of variables in the runtime environment. They override the driver's."""
    import ray

    names: list[str] = []
    for runtime_env in (
        ray.get_runtime_context().runtime_env,
        spec.run_config.worker_runtime_env,
    ):
        env_vars: Any = (runtime_env or {}).get("env_vars") or {}
        names += env_vars
    return names
