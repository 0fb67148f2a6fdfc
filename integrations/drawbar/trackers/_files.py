"""`FileTracker`: base class of the trackers that write files."""

from __future__ import annotations

import os
from abc import ABC
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from drawbar.trackers._connection import TrackedRun
from drawbar.trackers._points import Ranks
from drawbar.trackers._tracker import Tracker
from drawbar.train import RunConfig


class FileTracker(Tracker, ABC):
    """Tracker that writes files to the run directory, or to another directory.

    Args:
        log_dir: Directory for the files of several runs; None is the run directory.
        ranks: Reports to send, as for `Tracker`.
        finish_timeout: Maximum time in seconds for which the end of the run waits.
    """

    directory_name: ClassVar[str]
    """Name of the directory in the run directory."""

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None,
        *,
        ranks: Ranks,
        finish_timeout: float | timedelta,
    ) -> None:
        super().__init__(ranks=ranks, finish_timeout=finish_timeout)
        if log_dir is not None and "://" in os.fspath(log_dir):
            raise ValueError(
                f"log_dir={os.fspath(log_dir)!r} is a URI, but {type(self).__name__} files are "
                "written to a local or mounted directory. Set log_dir to a path without a scheme."
            )
        # Absolute: the controller of a detached run has another working directory.
        self.log_dir = None if log_dir is None else Path(log_dir).expanduser().absolute()

    def get_options(self) -> dict[str, str | None]:
        """Return the destination."""
        return {"log_dir": None if self.log_dir is None else str(self.log_dir)}

    def check_run_config(self, run_config: RunConfig) -> None:
        """Check that there is a local directory for the files that no other tracker uses.

        Args:
            run_config: Configuration of the run.

        Raises:
            ValueError: The run is in remote storage and `log_dir` is not set, or another tracker
                has the same destination.
        """
        super().check_run_config(run_config)
        path = os.fspath(run_config.storage_path or "")
        if self.log_dir is None and ("://" in path or run_config.storage_filesystem is not None):
            raise ValueError(self._describe_missing_directory(path))

    def _get_directory(self, run: TrackedRun) -> Path:
        if self.log_dir is not None:
            return self.log_dir / run.name
        if run.local_path is None:
            raise ValueError(self._describe_missing_directory(run.path))
        return run.local_path / self.directory_name

    def _describe_missing_directory(self, path: str) -> str:
        name = type(self).__name__
        return (
            f"{name}() writes to the run directory, but {path or 'storage_filesystem'} is remote "
            f"storage. Set {name}(log_dir=...) to a local or mounted directory."
        )


def sync_path(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
