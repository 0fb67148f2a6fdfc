"""Runs as they lie in a storage, read without Ray: found, looked at, checked.

    for run in runs.list_runs("/shared/runs"):
        print(run.name, run.status, run.metrics)

The command `drawbar` shows what this tells.
"""

from drawbar.train._history.finding import find_run, list_runs
from drawbar.train._history.record import RunRecord
from drawbar.train._public import as_public

__all__ = ["RunRecord", "find_run", "list_runs"]

as_public(globals())
