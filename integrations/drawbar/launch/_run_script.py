"""Run the script as one rank on a worker, in a separate process with torchrun's variables."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drawbar.launch._backend import rendezvous_address
from drawbar.launch._error_file import ERROR_FILE_VARIABLE, add_recorded_error
from drawbar.launch._numa import Topology, select_cpus
from drawbar.launch._script_command import ScriptCommand
from drawbar.launch._torchrun_options import TorchrunOptions
from drawbar.train import ProgramFailedError, get_context
from drawbar.train.backend import get_worker_environment, run_program

RAY_ENV_PREFIX = "RAY_"
"""Prefix of variables that Ray sets for its workers. The script does not inherit them: otherwise a
script that starts Ray would behave like a Ray worker."""

RAY_WORKER_VARIABLE = "RAY_RAYLET_PID"
"""Variable that only the worker processes of Ray have."""


def run_script(config: dict[str, Any]) -> None:
    """Run the script as this rank.

    Args:
        config: The script (`command`, a `ScriptCommand`), and additional variables
            (`environment`), in which None removes a variable.

    Raises:
        FileNotFoundError: This node does not have the script.
        ProgramFailedError: The script failed.
    """
    command: ScriptCommand = config["command"]
    arguments = command.arguments
    if not command.is_executable and arguments[0] != "-m" and not os.path.isfile(arguments[0]):
        raise FileNotFoundError(
            f"Script {os.path.abspath(arguments[0])} does not exist on node "
            f"{os.uname().nodename}. Put it on shared storage, or ship it with "
            "RunConfig(worker_runtime_env=...)."
        )
    # An existing Ray cluster starts workers with nice 15. Child processes inherit the value of the
    # thread that starts them.
    with contextlib.suppress(PermissionError):  # lowering it needs a privilege
        os.setpriority(os.PRIO_PROCESS, 0, command.niceness)
    options = command.torchrun_options
    with rendezvous_address() as (address, port), _rank_directory(options) as directory:
        extra_env = {
            name: value for name, value in config["environment"].items() if value is not None
        }
        environment = script_env(get_worker_environment(), extra_env)
        environment |= torchelastic_env(command.max_restarts, options)
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        environment[ERROR_FILE_VARIABLE] = os.path.join(directory, "error.json")
        output = options.make_output(environment, directory)
        cpus = _select_cpus(options, environment)
        if options.virtual_local_rank:
            environment |= _virtual_local_rank_env(environment)
        for name in config["environment"].keys() - extra_env.keys():
            environment.pop(name, None)
        try:
            run_program(
                arguments,
                environment,
                activity_check_seconds=command.activity_check_seconds,
                is_python=not command.is_executable,
                output=output,
                cpus=cpus,
            )
        except ProgramFailedError as error:
            raise add_recorded_error(error, environment[ERROR_FILE_VARIABLE]) from None


@contextlib.contextmanager
def _rank_directory(options: TorchrunOptions) -> Iterator[str]:
    """Return the directory for the files of this rank, which is temporary without `log_dir`."""
    if not options.log_dir:
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as directory:
            yield directory
        return
    context = get_context()
    parts = [part for part in (options.run_id, context.get_run_id()) if part]
    attempt = os.path.join(options.log_dir, "_".join(parts), f"attempt_{context.get_attempt()}")
    path = os.path.join(attempt, str(context.get_world_rank()))
    os.makedirs(path, exist_ok=True)
    yield path


def _select_cpus(options: TorchrunOptions, environment: Mapping[str, str]) -> set[int]:
    """Return the CPUs of this rank; an empty set without `numa_binding`."""
    if not options.numa_binding:
        return set()
    context = get_context()
    gpu_ids = [""] * context.get_local_world_size()
    if context.get_accelerator_ids():
        gpu_ids = environment["CUDA_VISIBLE_DEVICES"].split(",")
    topology = Topology(Path("/sys"), Path("/proc"), frozenset(os.sched_getaffinity(0)))
    return select_cpus(options.numa_binding, gpu_ids, context.get_local_rank(), topology)


def _virtual_local_rank_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a process sees only its own GPU, as local rank 0."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    local_rank = int(environment["LOCAL_RANK"])
    device = str(local_rank) if devices is None else devices.split(",")[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


def script_env(worker_env: Mapping[str, str], extra_env: Mapping[str, str]) -> dict[str, str]:
    """Return the script's environment: the worker's without Ray's variables, and extra ones."""
    is_ray_worker = RAY_WORKER_VARIABLE in worker_env
    inherited = {
        name: value
        for name, value in worker_env.items()
        if not (is_ray_worker and name.startswith(RAY_ENV_PREFIX))
    }
    if inherited.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del inherited["PYTHONBREAKPOINT"]  # Ray's debugger only works in Ray workers
    # As torchrun: a failed collective ends the process, unless the user has set another value.
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **inherited, **extra_env}


def torchelastic_env(max_restarts: int, options: TorchrunOptions) -> dict[str, str]:
    """Return torchrun's variables besides the ranks. Libraries detect torchrun by them."""
    context = get_context()
    return {
        "ROLE_NAME": options.role,
        "TORCHELASTIC_RUN_ID": options.run_id or context.get_run_id(),
        "TORCHELASTIC_RESTART_COUNT": str(context.get_restart_count()),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0's script creates the store. Under torchrun, the agent would provide it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
