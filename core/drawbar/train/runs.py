"""Runs as they lie in a storage, read without Ray: found, looked at, checked, cleaned up after.

    for run in runs.list_runs("/shared/runs"):
        print(run.name, run.status, run.metrics)

The command `drawbar` shows what this tells.
"""

from drawbar.train._api import set_public_module
from drawbar.train._history.cleanup import UnusedFile, find_unused_local_files
from drawbar.train._history.find_runs import find_run, list_runs
from drawbar.train._history.run_record import RunRecord

__all__ = ["RunRecord", "UnusedFile", "find_run", "find_unused_local_files", "list_runs"]

set_public_module(globals())
