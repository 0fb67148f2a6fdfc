"""TensorBoard: write event files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._files import FileTracker, sync_path
from drawbar.trackers._points import Point, Ranks

if TYPE_CHECKING:
    from tensorboardX.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."
_RUN_FILE = ".drawbar-run-id"


class TensorBoard(FileTracker):
    """Write the reports of a run to TensorBoard event files.

    The step is the number of the report. If a new attempt replaces reports, the default server of
    TensorBoard can show the earlier ones, too. Each point is on disk before Drawbar records that it
    was sent.

    Args:
        log_dir: Directory for the event files of several runs. Each run has a directory in it with
            the name of the run; two runs cannot have the same. Default: `tensorboard` in the run
            directory.
        ranks: Reports to send: a rank, such as 0; the "mean", "min", or "max" over all
            ranks; or "all", which adds a prefix such as "rank_3/" to the metric names.
        finish_timeout: Maximum time in seconds, or a timedelta, for which the end of the run waits
            for the tracker.

    Raises:
        ImportError: tensorboardX is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid.

    Example:
        ```python
        run_config = RunConfig(name="mnist", callbacks=[TensorBoard()])
        ```
    """

    kind = "tensorboard"
    package = "tensorboardX"
    directory_name = "tensorboard"

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        ranks: Ranks = 0,
        finish_timeout: float | timedelta = 30,
    ) -> None:
        super().__init__(log_dir, ranks=ranks, finish_timeout=finish_timeout)

    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        """Connect to the run of the tracker."""
        directory = self._get_directory(run)
        if self.log_dir is not None:
            _reserve_directory(directory, run)
        return _EventFiles(directory, cursor)


def _reserve_directory(directory: Path, run: TrackedRun) -> None:
    """Check that a directory has no event files of another run: this run would hide them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _RUN_FILE
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(run.run_id)
    run_id = path.read_text()
    if not run_id:  # the process that created the file was killed
        path.write_text(run.run_id)
    elif run_id != run.run_id:
        raise ValueError(
            f"{directory} has the event files of another run named {run.name!r} (id {run_id}), "
            f"which the files of this run (id {run.run_id}) would hide. Set another name or "
            "log_dir, or delete the directory"
        )


class _EventFiles(Connection):
    """Event files in a directory. Each connection and each rewind starts a new file.

    A file starts with the number of the report from which on points in earlier files are replaced.

    Args:
        log_dir: Directory of the files.
        cursor: Stored position. Ranks may have later points in the file; they are written again.
    """

    def __init__(self, log_dir: Path, cursor: Cursor) -> None:
        super().__init__(cursor.go_back())
        self._log_dir = log_dir
        self._resend_index = self.cursor.resend_index
        self._file: RecordWriter | None = None

    def _get_file(self) -> RecordWriter:
        if self._file is None:
            self._file = self._start_file(self._resend_index)
        return self._file

    def _start_file(self, first_index: int) -> RecordWriter:
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        self._log_dir.mkdir(parents=True, exist_ok=True)
        path = _make_file_path(self._log_dir)
        file = RecordWriter(str(path))
        now = time.time()
        file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=now, step=first_index, session_log=start)
        file.write(event.SerializeToString())
        file.flush()
        sync_path(self._log_dir)
        return file

    def write(self, points: Sequence[Point]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        file = self._get_file()
        for point in points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            event = Event(wall_time=point.time, step=point.index, summary=Summary(value=values))
            file.write(event.SerializeToString())

    def rewind(self, first_index: int) -> None:
        self.close(outcome="")
        self._file = self._start_file(first_index)

    def flush(self) -> bool:
        # Also without new points: a new file ends the validity of points that were replaced.
        self._get_file().flush()  # with fsync
        return True

    def close(self, outcome: str) -> None:
        if self._file is not None:
            self._file.flush()
            self._file.close()
            self._file = None


def _make_file_path(log_dir: Path) -> Path:
    """Return a path that is sorted after all event files: TensorBoard reads them in this order."""
    existing = [path.name for path in log_dir.iterdir() if path.name.startswith(_PREFIX)]
    seconds = time.time()
    last = max(existing, default="").removeprefix(_PREFIX).split(".")[0]
    if last.isdecimal() and int(last) >= int(seconds):
        seconds = int(last) + 1  # also if the clock was set back
    return log_dir / f"{_PREFIX}{int(seconds):010d}.drawbar.{os.getpid()}"
