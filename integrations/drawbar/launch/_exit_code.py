"""What a shell is told of a run that has failed."""

from __future__ import annotations

import contextlib
import re
import signal

from drawbar.train import ProgramFailedError, TrainingFailedError, WorkerGroupError

_KILLED = re.compile(r"killed by (SIG\w+)")


def exit_code_for(error: TrainingFailedError) -> int:
    """Return the exit code of a failed run, as for a shell.

    That is the exit code of the script that failed first. If scripts ended by themselves, for
    example because all of them reject the same argument, the exit code of rank 0 wins, whose
    output is shown. A script or worker that a signal killed has 128 plus the signal
    number. The code is 1 if no script failed, for example after a hang.
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
