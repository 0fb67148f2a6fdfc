"""exit_code_for: exit code of a failed run."""

from __future__ import annotations

import re
import signal

from drawbar.train import ProgramFailedError, TrainingFailedError, WorkerGroupError
from drawbar.train.backend import EXIT_DO_NOT_RETRY

_KILLED = re.compile(r"killed by (SIG\w+)")


def exit_code_for(error: TrainingFailedError) -> int:
    """Return the exit code of the script that failed first.

    If several scripts exited by themselves, for example because all of them reject the same
    argument, this is the exit code of rank 0, whose output is shown. For a script or worker that a
    signal killed, it is 128 plus the signal number. It is 70 if another start of the run would fail
    again (`TrainingFailedError.should_retry`), and the script has not called `sys.exit()`.

    Args:
        error: Error that `ScriptTrainer.fit()` raised.

    Returns:
        The exit code for a shell; 1 or 70 if no script failed, for example after a hang.

    Example:
        ```python
        try:
            ScriptTrainer("train.py").fit()
        except TrainingFailedError as error:
            sys.exit(exit_code_for(error))
        ```
    """
    failures = error.failures if isinstance(error, WorkerGroupError) else []
    is_exit = bool(failures) and failures[0].kind == "exit"
    if not error.should_retry and not is_exit:
        return EXIT_DO_NOT_RETRY
    if not isinstance(error, WorkerGroupError) or not failures:
        return 1
    first = failures[0]
    if is_exit:
        exits = (failure for failure in failures if failure.kind == "exit")
        first = min(exits, key=lambda failure: failure.rank != 0)
    script = error.worker_failures.get(first.rank)
    if isinstance(script, ProgramFailedError):
        return script.exit_code
    killed = _KILLED.match(first.message) if first.kind == "died" else None
    return 128 + signal.Signals[killed[1]] if killed else 1
