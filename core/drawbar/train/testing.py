"""Test utilities for training functions, integrations, and failures.

The API is stable, like the rest of the package. `run_in_threads` runs a training function on
several ranks in threads of this process, without Ray, with real reports, checkpoints, collectives,
and restarts, in milliseconds. `kill_at` kills a process at a named step of a checkpoint commit, and
`check_run` checks the run directory after that. `find_fork_obstacle` tests whether this machine can
fork workers. `BackendContract` contains the tests that the backend of every integration must pass.
"""

from __future__ import annotations

import os
import signal

from drawbar._base.api import set_public_module
from drawbar._fork_server.fork_check import find_fork_obstacle
from drawbar._runs.audit import check_run
from drawbar._storage import fault_points
from drawbar._testing.backend_contract import BackendContract
from drawbar._testing.run_in_threads import run_in_threads

__all__ = [
    "FAULT_POINTS",
    "BackendContract",
    "check_run",
    "find_fork_obstacle",
    "kill_at",
    "run_in_threads",
]

FAULT_POINTS = fault_points.POINTS
"""Steps of a checkpoint commit at which `kill_at` can stop a process, in their order."""


def kill_at(point: str, *, occurrence: int = 1, signal_number: int = signal.SIGKILL) -> None:
    """Kill this process when it reaches a step of a checkpoint commit.

    Call this in the training function for the steps of workers (`persist.*`), and in the driver for
    the steps of the controller (`commit.*`).

    Args:
        point: One of `FAULT_POINTS`.
        occurrence: n, to kill the process when it reaches the step for the n-th time.
        signal_number: Signal that the process sends to itself.

    Raises:
        ValueError: `point` is not in `FAULT_POINTS`.

    Example:
        ```python
        testing.kill_at("commit.renamed", occurrence=2)
        trainer.fit()
        ```
    """
    if point not in FAULT_POINTS:
        raise ValueError(f"point={point!r} must be one of {', '.join(FAULT_POINTS)}")
    remaining = occurrence

    def send_signal() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal_number)

    fault_points.armed_actions[point] = send_signal


set_public_module(globals())
