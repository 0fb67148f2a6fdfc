"""Send the reports of a run to a tracker, from the cursor in the run directory on."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._points import Point, PointMaker, Ranks
from drawbar.train.runs import AttemptRow, ReportFeed

POLL_PERIOD_S = 1.0
MAX_RETRY_DELAY_S = 60.0
BATCH_ROWS = 5_000

_logger = logging.getLogger("drawbar.trackers")


class Sender:
    """Reports of one run on their way to one tracker. Not thread-safe.

    Args:
        open_feed: Function that returns a feed for the options `rank` and `position`.
        connect: Function that connects to the tracker from a cursor on.
        state_name: Name of the cursor in the run directory.
        ranks: Ranks whose reports are sent.
    """

    def __init__(
        self,
        open_feed: Callable[..., ReportFeed],
        connect: Callable[[TrackedRun, Cursor], Connection],
        state_name: str,
        ranks: Ranks,
    ) -> None:
        self._open_feed = open_feed
        self._connect = connect
        self._state_name = state_name
        self._ranks = ranks
        self._points = PointMaker(ranks)
        self._feed: ReportFeed | None = None
        self._connection: Connection | None = None
        self._lock: IO[bytes] | None = None

    def open(self, *, from_start: bool = False) -> None:
        """Connect to the tracker, and continue after the points that it has.

        Args:
            from_start: Whether to ignore the cursor, because the tracker's data was deleted.

        Raises:
            RuntimeError: Another process sends the reports to the same destination.
        """
        rank = self._ranks if isinstance(self._ranks, int) else None
        with contextlib.closing(self._open_feed(rank=rank)) as feed:
            feed.read(limit=1)  # the description of the run
            if feed.local_path is not None:
                self._lock = _lock(feed.local_path / "trackers" / f"{self._state_name}.lock")
            state = feed.load_state(self._state_name)
            run = TrackedRun(feed.run_id, feed.name, feed.path, feed.local_path, feed.config)
        is_same = state.get("run_id") == run.run_id and state.get("ranks") == self._ranks
        cursor = Cursor.from_json(state) if is_same and not from_start else Cursor()
        self._run_id = run.run_id
        self._connection = self._connect(run, cursor)
        position = self._connection.cursor.to_feed_position(self._ranks)
        self._feed = self._open_feed(rank=rank, position=position)
        self._points = PointMaker(self._ranks)

    def send(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Send all new reports. Return the number of points.

        Args:
            should_stop: Function that returns True when sending must stop.
        """
        assert self._feed is not None
        assert self._connection is not None
        num_points = 0
        while not should_stop():
            before = self._connection.cursor
            num_points += self._send_batch(self._feed, self._connection)
            if self._connection.cursor is not before and self._connection.flush():
                self._save_cursor()
            if not self._feed.has_more:
                break
        return num_points

    def _send_batch(self, feed: ReportFeed, connection: Connection) -> int:
        points: list[Point] = []
        num_points = 0
        for row in feed.read(BATCH_ROWS):
            if not isinstance(row, AttemptRow):
                points += self._points.add(row)
                continue
            points += self._points.start_attempt(row)
            if row.attempt != connection.cursor.attempt:
                num_points += _write(connection, points)
                points = []
                if connection.cursor.end > row.first_index:
                    connection.rewind(row.first_index)
                connection.cursor = connection.cursor.start_attempt(row, self._ranks)
        if feed.has_ended and not feed.has_more:
            points += self._points.finish()
        return num_points + _write(connection, points)

    def _save_cursor(self) -> None:
        assert self._feed is not None
        assert self._connection is not None
        state: dict[str, Any] = {
            "run_id": self._run_id,
            "ranks": self._ranks,
            **self._connection.cursor.to_json(),
        }
        self._feed.save_state(self._state_name, state)

    def close(self) -> None:
        """Disconnect from the tracker, and store the cursor."""
        feed, connection = self._feed, self._connection
        if feed is None or connection is None:
            return
        connection.close(feed.outcome)
        self._save_cursor()
        self.abandon()

    def abandon(self) -> None:
        """Forget the connection after an error. The cursor is unchanged."""
        feed, self._feed, self._connection = self._feed, None, None
        if feed is not None:
            feed.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _lock(path: Path) -> IO[bytes]:
    """Lock a file until it is closed or the process ends. Children do not keep the lock."""
    path.parent.mkdir(exist_ok=True)
    file = path.open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RuntimeError(
            "another process sends the reports of this run to the same destination: the active run "
            "itself, or `drawbar track`. Wait until it has ended."
        ) from error
    return file


def _write(connection: Connection, points: list[Point]) -> int:
    numbers = [point for point in points if point.values]
    if numbers:
        connection.write(numbers)
    if points:
        connection.cursor = connection.cursor.add(points)
    return len(numbers)


class SenderThread:
    """Thread that sends reports until the run ends. An error never leaves it.

    Args:
        sender: Reports and tracker.
        warn: Function that logs the first error.
    """

    def __init__(self, sender: Sender, warn: Callable[[str], None]) -> None:
        self._sender = sender
        self._warn = warn
        self._has_warned = False
        self._wake = threading.Event()
        self._is_ending = False
        self._deadline = float("inf")
        # A daemon thread: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="drawbar-tracker", daemon=True)
        self._thread.start()

    def finish(self, timeout: float) -> None:
        """Wait until the remaining reports are sent, or until the timeout.

        Args:
            timeout: Maximum time in seconds.
        """
        self._deadline = time.monotonic() + timeout
        self._is_ending = True
        self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._warn_once(f"it has not received all reports within {timeout:g} s")

    def _run(self) -> None:
        delay, is_open = POLL_PERIOD_S, False
        while True:
            # Read before the reports: after the end of the run, all of them are in the files.
            is_ending = self._is_ending
            try:
                if not is_open:
                    self._sender.open()
                    is_open = True
                self._sender.send(self._is_over)
                if is_ending:
                    self._sender.close()
                    return
                delay = POLL_PERIOD_S
            except BaseException as error:  # libraries also raise SystemExit
                self._warn_once(f"{type(error).__name__}: {error}")
                _logger.debug("A tracker failed", exc_info=True)
                self._sender.abandon()
                is_open, delay = False, min(2 * delay, MAX_RETRY_DELAY_S)
                if is_ending:  # this was the last attempt
                    return
            self._wake.wait(delay)

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(reason)
