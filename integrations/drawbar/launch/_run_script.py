"""What runs on a worker: the script, in a process of its own, with torchrun's variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from drawbar.launch._backend import rendezvous_address
from drawbar.train import get_context
from drawbar.train.backend import run_program

RAY_ENV_PREFIX = "RAY_"
"""What the names of variables begin with that Ray gives to its workers, and not to their children:
a script that starts Ray itself would take itself for a worker."""


def run_script(config: dict[str, Any]) -> None:
    """Run the script as this rank.

    Args:
        config: `arguments`, those of `python`; `environment`, variables besides those of this
            process; `niceness`, that of the shell; `max_restarts`; `sign_seconds`.

    Raises:
        FileNotFoundError: This node does not have the script.
        ProgramFailedError: The script has failed.
    """
    arguments = config["arguments"]
    if arguments[0] != "-m" and not os.path.isfile(arguments[0]):
        raise FileNotFoundError(
            f"node {os.uname().nodename} has no {os.path.abspath(arguments[0])}: put the script "
            "into a folder that all nodes share, or send it with worker_runtime_env"
        )
    # Ray has its workers stand back (nice 15). That of a thread is that of what it starts.
    with contextlib.suppress(PermissionError):  # not everybody may take it back
        os.setpriority(os.PRIO_PROCESS, 0, config["niceness"])
    with rendezvous_address() as (address, port):
        environment = script_env(os.environ, config["environment"])
        environment |= torchelastic_env(config["max_restarts"])
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        run_program(arguments, environment, sign_seconds=config["sign_seconds"])


def script_env(worker_env: Mapping[str, str], extra_env: Mapping[str, str]) -> dict[str, str]:
    """Give the script's variables: this process's without Ray's own, and those chosen for it."""
    kept = {
        name: value for name, value in worker_env.items() if not name.startswith(RAY_ENV_PREFIX)
    }
    if kept.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del kept["PYTHONBREAKPOINT"]  # Ray's debugger is for Ray's workers
    return {**kept, **extra_env}


def torchelastic_env(max_restarts: int) -> dict[str, str]:
    """Give what torchrun sets besides the ranks; libraries take it as a sign that it is there."""
    context = get_context()
    return {
        "TORCHELASTIC_RUN_ID": context.get_run_id(),
        "TORCHELASTIC_RESTART_COUNT": str(context.get_attempt()),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0's script makes the store; torchrun's own would have been the agent's.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
