"""Find, inspect, verify, and clean up runs in a storage, without Ray.

Example:
    List the runs of a storage:

        from drawbar.train import runs

        for run in runs.list_runs("/shared/runs"):
            print(run.name, run.status, run.metrics)

The `drawbar` command-line tool shows the same information.
"""

from drawbar._base.api import set_public_module
from drawbar._observe.rank_times import RankTimesOfRank, RankTimesSample, Straggler
from drawbar._observe.resources import GpuSample, ResourceSample
from drawbar._records.run_progress import RunProgress
from drawbar._runs.cleanup import UnusedFile, find_unused_local_files
from drawbar._runs.find_runs import RunCatalog, find_run, list_runs
from drawbar._runs.metrics_exporter import MetricsExporter
from drawbar._runs.report_columns import ReportColumns
from drawbar._runs.report_feed import AttemptRow, FeedPosition, ReportFeed, ReportRow
from drawbar._runs.run_record import RunRecord
from drawbar._storage.default_storage import get_default_storage_path

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
