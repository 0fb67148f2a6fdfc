"""Runs as they lie in a storage, read without Ray: found, looked at, checked, cleaned up after.

    for run in runs.list_runs("/shared/runs"):
        print(run.name, run.status, run.metrics)

The command `drawbar` shows what this tells.
"""

from drawbar.train._history.cleaning import Leftover, leftovers_here
from drawbar.train._history.finding import find_run, list_runs
from drawbar.train._history.record import RunRecord
from drawbar.train._public import as_public

__all__ = ["Leftover", "RunRecord", "find_run", "leftovers_here", "list_runs"]

as_public(globals())
