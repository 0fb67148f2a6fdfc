"""The callback of `drawbar.keras`, under the path that it has in Ray Train."""

from drawbar.keras import ReportCheckpointCallback as ReportCheckpointCallback
