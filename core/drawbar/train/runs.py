"""Find, inspect, verify, and clean up runs in a storage, without Ray.

Example:
    List the runs of a storage:

        from drawbar.train import runs

        for run in runs.list_runs("/shared/runs"):
            print(run.name, run.status, run.metrics)

The `drawbar` command-line tool shows the same information.
"""

from drawbar.train._api import set_public_module
from drawbar.train._config.default_storage import get_default_storage_path
from drawbar.train._history.cleanup import UnusedFile, find_unused_local_files
from drawbar.train._history.find_runs import RunCatalog, find_run, list_runs
from drawbar.train._history.metrics_exporter import MetricsExporter
from drawbar.train._history.rank_times import RankTimesOfRank, RankTimesSample, Straggler
from drawbar.train._history.report_columns import ReportColumns
from drawbar.train._history.report_feed import AttemptRow, FeedPosition, ReportFeed, ReportRow
from drawbar.train._history.run_progress import RunProgress
from drawbar.train._history.run_record import RunRecord
from drawbar.train._protocol.resources import GpuSample, ResourceSample

__all__ = [
    "AttemptRow",
    "FeedPosition",
    "GpuSample",
    "MetricsExporter",
    "RankTimesOfRank",
    "RankTimesSample",
    "ReportColumns",
    "ReportFeed",
    "ReportRow",
    "ResourceSample",
    "RunCatalog",
    "RunProgress",
    "RunRecord",
    "Straggler",
    "UnusedFile",
    "find_run",
    "find_unused_local_files",
    "get_default_storage_path",
    "list_runs",
]

set_public_module(globals())
