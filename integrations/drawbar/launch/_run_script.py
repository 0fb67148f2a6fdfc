"""Run the script as one rank on a worker, in a separate process with torchrun's variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from drawbar.launch._backend import rendezvous_address
from drawbar.train import get_context
from drawbar.train.backend import get_worker_environment, run_program

RAY_ENV_PREFIX = "RAY_"
"""Prefix of variables that Ray sets for its workers. The script does not inherit them: otherwise a
script that starts Ray would behave like a Ray worker."""

RAY_WORKER_VARIABLE = "RAY_RAYLET_PID"
"""Variable that only the worker processes of Ray have."""


def run_script(config: dict[str, Any]) -> None:
    """Run the script as this rank.

    Args:
        config: Options of the script: `arguments` of `python`, additional variables
            (`environment`), in which None removes a variable, `niceness` of the driver's shell,
            `max_restarts`, and the interval between heartbeats (`activity_check_seconds`).

    Raises:
        FileNotFoundError: This node does not have the script.
        ProgramFailedError: The script failed.
    """
    arguments = config["arguments"]
    if arguments[0] != "-m" and not os.path.isfile(arguments[0]):
        raise FileNotFoundError(
            f"Script {os.path.abspath(arguments[0])} does not exist on node "
            f"{os.uname().nodename}. Put it on shared storage, or ship it with "
            "RunConfig(worker_runtime_env=...)."
        )
    # An existing Ray cluster starts workers with nice 15. Child processes inherit the value of the
    # thread that starts them.
    with contextlib.suppress(PermissionError):  # lowering it needs a privilege
        os.setpriority(os.PRIO_PROCESS, 0, config["niceness"])
    with rendezvous_address() as (address, port):
        rank_env = get_worker_environment() | torchelastic_env(config["max_restarts"])
        rank_env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        environment = script_env(rank_env, config["environment"])
        run_program(arguments, environment, activity_check_seconds=config["activity_check_seconds"])


def script_env(
    worker_env: Mapping[str, str], extra_env: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the script's environment: the worker's without Ray's variables, and extra ones.

    Extra variables that are None are removed.
    """
    is_ray_worker = RAY_WORKER_VARIABLE in worker_env
    inherited = {
        name: value
        for name, value in worker_env.items()
        if not (is_ray_worker and name.startswith(RAY_ENV_PREFIX))
    }
    if inherited.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del inherited["PYTHONBREAKPOINT"]  # Ray's debugger only works in Ray workers
    merged = {**inherited, **extra_env}
    return {name: value for name, value in merged.items() if value is not None}


def torchelastic_env(max_restarts: int) -> dict[str, str]:
    """Return torchrun's variables besides the ranks. Libraries detect torchrun by them."""
    context = get_context()
    return {
        "TORCHELASTIC_RUN_ID": context.get_run_id(),
        "TORCHELASTIC_RESTART_COUNT": str(context.get_attempt()),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0's script creates the store. Under torchrun, the agent would provide it.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
