"""The callback of `drawbar.keras`, under the path that it has in Ray Train."""

from drawbar.keras import ReportCheckpointCallback as ReportCheckpointCallback

__path__: list[str] = []  # Python looks for replacements of other names; see _base/import_paths.py
