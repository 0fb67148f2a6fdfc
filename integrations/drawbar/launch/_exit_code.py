"""What a shell is told of a run that has failed."""

from __future__ import annotations

import contextlib
import re
import signal

from drawbar.train import ProgramFailedError, TrainingFailedError, WorkerGroupError

_KILLED = re.compile(r"killed by (SIG\w+)")


def exit_code_of(error: TrainingFailedError) -> int:
    """Give the exit code of the script that has failed first.

    That is 128 and the signal's number if one has killed it, or the worker that it ran on; 1 if no
    script is to blame, as for a hang.
    """
    if not isinstance(error, WorkerGroupError) or not error.failures:
        return 1
    first = error.failures[0]
    script = error.worker_failures.get(first.rank)
    if isinstance(script, ProgramFailedError):
        return script.exit_code
    killed = _KILLED.match(first.message) if first.kind == "died" else None
    with contextlib.suppress(ValueError):
        return 128 + signal.Signals[killed[1]] if killed else 1
    return 1
