"""exit_code_for: exit code of a failed run."""

from __future__ import annotations

import contextlib
import re
import signal

from drawbar.train import ProgramFailedError, TrainingFailedError, WorkerGroupError

_KILLED = re.compile(r"killed by (SIG\w+)")


def exit_code_for(error: TrainingFailedError) -> int:
    """Return the exit code of the script that failed first.

    If several scripts exited by themselves, for example because all of them reject the same
    argument, this is the exit code of rank 0, whose output is shown. For a script or worker that a
    signal killed, it is 128 plus the signal number.

    Args:
        error: Error that `ScriptTrainer.fit()` raised.

    Returns:
        The exit code for a shell; 1 if no script failed, for example after a hang.

    Example:
        ```python
        try:
            ScriptTrainer("train.py").fit()
        except TrainingFailedError as error:
            sys.exit(exit_code_for(error))
        ```
    """
    if not isinstance(error, WorkerGroupError) or not error.failures:
        return 1
    first = error.failures[0]
    if first.kind == "exit":
        exits = [failure for failure in error.failures if failure.kind == "exit"]
        first = next((failure for failure in exits if failure.rank == 0), first)
    script = error.worker_failures.get(first.rank)
    if isinstance(script, ProgramFailedError):
        return script.exit_code
    killed = _KILLED.match(first.message) if first.kind == "died" else None
    with contextlib.suppress(ValueError):
        return 128 + signal.Signals[killed[1]] if killed else 1
    return 1
