"""`ReportFeed`: reports of a run in the order of its attempts, also while the run is active."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drawbar._base.metrics import Metrics
from drawbar._history.run_locations import locate_run
from drawbar._records.events import JournaledEvent, RunEnded, RunStarted
from drawbar._records.journal import decode_readable_events
from drawbar._records.report_blocks import ReportBlock, decode_block
from drawbar._records.report_ranges import AttemptReports, apply_to_attempts
from drawbar._runs.segment_reader import SegmentReader
from drawbar._storage.filesystem import AnyFileSystem
from drawbar._storage.journal_file import is_locked, strip_torn_line
from drawbar._storage.manifest import DECODE_ERRORS
from drawbar._storage.run_directory import make_run_directory
from drawbar._storage.run_files import TRACKERS_DIRECTORY
from drawbar._storage.storage_path import read_file_or_none


@dataclass(frozen=True)
class ReportRow:
    """Report of one rank.

    Attributes:
        attempt: Number of the attempt.
        rank: Rank that made the report.
        index: Number of the report.
        time: Time of the report, in seconds since the epoch.
        metrics: Reported metrics; nested metrics are dicts.

    Example:
        Print the reports of rank 0 of a run:

            for item in runs.ReportFeed("experiment", rank=0).read():
                if isinstance(item, runs.ReportRow):
                    print(item.index, item.metrics)
    """

    attempt: int
    rank: int
    index: int
    time: float
    metrics: Metrics


@dataclass(frozen=True)
class AttemptRow:
    """Start of an attempt. Later rows belong to it until the next `AttemptRow`.

    Attributes:
        attempt: Number of the attempt.
        first_index: Number of its first report. This attempt replaces report `first_index` and all
            later reports of earlier attempts.
        num_workers: Number of ranks; 0 if they did not start.

    Example:
        Print the first report of each attempt:

            for item in runs.ReportFeed("experiment").read():
                if isinstance(item, runs.AttemptRow):
                    print(item.attempt, item.first_index)
    """

    attempt: int
    first_index: int
    num_workers: int


@dataclass(frozen=True)
class FeedPosition:
    """Position in a run up to which reports were read.

    Attributes:
        attempt: Number of the attempt; -1 is the start of the run.
        next_index: For each rank, the number of its next report in the attempt.
        default_index: Number of the next report of the ranks that are not in `next_index`.

    Example:
        Read only the reports that follow report 9 of attempt 0:

            runs.ReportFeed("experiment", position=runs.FeedPosition(0, default_index=10)).read()
    """

    attempt: int = -1
    next_index: Mapping[int, int] = field(default_factory=dict)
    default_index: int = 0


class ReportFeed:
    """Reports of a run in the order of its attempts, from a position on.

    Each call of `read()` returns the reports that are new since the last call. It reads only new
    lines of the journal and of the segments, so a call without new reports takes constant time. The
    feed never changes the run, apart from `save_state()`, and does not need Ray.

    Args:
        path: Run directory, its URI, or a name in the default storage path.
        storage_filesystem: Filesystem of the path, as for `RunConfig`.
        rank: Rank whose reports are read. Default: all ranks.
        position: Position from which on reports are read. Default: the start of the run.

    Raises:
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.

    Example:
        Print the losses of a run until now, and later the new ones:

            feed = runs.ReportFeed("/shared/runs/experiment", rank=0)
            for row in feed.read():
                if isinstance(row, runs.ReportRow):
                    print(row.index, row.metrics["loss"])
            new_rows = feed.read()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        storage_filesystem: AnyFileSystem | None = None,
        *,
        rank: int | None = None,
        position: FeedPosition | None = None,
    ) -> None:
        start = position or FeedPosition()
        self._directory = make_run_directory(locate_run(path, storage_filesystem).path)
        # While a process of this machine controls the run, all its files are on this machine.
        self._is_local = self._directory.remote_path is None or is_locked(
            self._directory.journal_path
        )
        self._rank = rank
        self._prefix = b"" if rank is None else b'{"rank":%d,' % rank
        self._start: RunStarted | None = None
        self._outcome = ""
        self._journal_offset = 0
        self._attempts: list[AttemptReports] = []
        self._current = -1  # position in the list of attempts
        self._start_attempt = start.attempt
        self._next_index = dict(start.next_index)
        self._default_index = start.default_index
        self._segments: SegmentReader | None = None
        self._items: Iterator[ReportRow | AttemptRow] | None = None

    # -- properties of the run

    @property
    def path(self) -> str:
        """Path or URI of the run directory."""
        return self._directory.uri

    @property
    def local_path(self) -> Path | None:
        """Run directory on this machine; None if the run is in remote storage."""
        return self._directory.local_path if self._directory.remote_path is None else None

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._directory.name

    @property
    def run_id(self) -> str:
        """Identifier of the run, the same for all its starts; "" before the first `read()`."""
        return self._start.run_id if self._start else ""

    @property
    def config(self) -> dict[str, object]:
        """Configuration of the last start as JSON values; {} before the first `read()`."""
        return self._start.config if self._start else {}

    @property
    def has_ended(self) -> bool:
        """True if the last event that was read is the end of the run."""
        return bool(self._outcome)

    @property
    def outcome(self) -> str:
        """Outcome: "finished", "failed", or "stopped"; "" before the end of the run was read."""
        return self._outcome

    @property
    def has_more(self) -> bool:
        """True if the last `read()` has reached its limit, so there may be more reports."""
        return self._items is not None

    # -- reports

    def read(self, limit: int = 10_000) -> list[ReportRow | AttemptRow]:
        """Return the next reports and starts of attempts.

        Reports that a later attempt has replaced are left out, if it has started before they were
        read. Lines that cannot be decoded are left out, too.

        Args:
            limit: Maximum number of rows.

        Returns:
            The rows, in the order of attempts. The reports of a rank are in order.

        Raises:
            OSError: The storage cannot be read.
            UnsupportedFormatError: A newer version of Drawbar has written the journal.

        Example:
            Count the reports of a run:

                feed, count = runs.ReportFeed("experiment"), 0
                while rows := feed.read():
                    count += sum(isinstance(row, runs.ReportRow) for row in rows)
        """
        if self._items is None:
            self._items = self._iter_items()
        try:
            rows = list(itertools.islice(self._items, limit))
        except BaseException:
            self._items = None
            raise
        if len(rows) < limit:
            self._items = None
        return rows

    def _iter_items(self) -> Iterator[ReportRow | AttemptRow]:
        # The journal first: if it has a later attempt, the reports of the current one are complete.
        self._read_journal()
        while True:
            if self._current >= 0:
                yield from self._iter_attempt(self._attempts[self._current])
            following = self._current + 1
            if following >= len(self._attempts):
                return
            attempt = self._attempts[following]
            is_last = following == len(self._attempts) - 1
            if not attempt.num_workers and is_last and not self._outcome:
                return  # the number of workers is not known yet
            self._current = following
            if attempt.attempt > self._start_attempt:
                self._next_index, self._default_index = {}, 0
            if self._segments is not None:
                self._segments.close()
            # Segments of earlier attempts can be in remote storage only.
            self._segments = SegmentReader(
                self._directory,
                attempt.attempt,
                first_index=self._find_first_needed(attempt),
                is_local=self._is_local and is_last,
            )
            if attempt.attempt >= self._start_attempt:
                yield AttemptRow(attempt.attempt, attempt.first, attempt.num_workers)

    def _find_first_needed(self, attempt: AttemptReports) -> int:
        if self._rank is not None:
            return self._next_index.get(self._rank, self._default_index)
        if len(self._next_index) < attempt.num_workers:
            return min([self._default_index, *self._next_index.values()])
        return min(self._next_index.values(), default=self._default_index)

    def _iter_attempt(self, attempt: AttemptReports) -> Iterator[ReportRow]:
        if attempt.attempt < self._start_attempt or self._segments is None:
            return
        for lines in self._segments.read_segments():
            for rank, index, block, row in _sort_reports(self._decode_lines(lines)):
                is_read = index < self._next_index.get(rank, self._default_index)
                if is_read or not attempt.first <= index < attempt.end:
                    continue
                self._next_index[rank] = index + 1
                yield ReportRow(
                    attempt.attempt, rank, index, block.time[row], block.get_metrics(row)
                )

    def _decode_lines(self, lines: Iterable[bytes]) -> Iterator[ReportBlock]:
        for line in lines:
            if line.startswith(self._prefix):
                with contextlib.suppress(*DECODE_ERRORS):
                    yield decode_block(line)

    def _read_journal(self) -> None:
        if self._is_local:
            path = self._directory.journal_path
            data = read_file_or_none(path.parent, path.name, self._journal_offset)
        else:
            data = (self._directory.run_files.read_journal() or b"")[self._journal_offset :]
        lines = strip_torn_line(data or b"")
        self._journal_offset += len(lines)
        for event in decode_readable_events(lines, self._directory.uri)[0]:
            self._apply(event)

    def _apply(self, event: JournaledEvent) -> None:
        apply_to_attempts(self._attempts, event)
        match event:
            case RunStarted():
                self._start, self._outcome = event, ""
            case RunEnded():
                self._outcome = event.outcome
            case _:
                pass

    # -- state of the reader

    def load_state(self, name: str) -> dict[str, Any]:
        """Return the state that `save_state` has stored in the run directory.

        Args:
            name: Name of the state.

        Returns:
            The state; {} if there is none, or if it cannot be decoded.

        Raises:
            OSError: The storage cannot be read.

        Example:
            Read the cursor of a tracker:

                runs.ReportFeed("experiment").load_state("tensorboard")
        """
        data = self._directory.run_files.read(f"{TRACKERS_DIRECTORY}/{name}.json")
        with contextlib.suppress(ValueError):
            state = json.loads(data or b"{}")
            if isinstance(state, dict):
                return state
        return {}

    def save_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Store the state of a reader atomically as `trackers/<name>.json` in the run directory.

        Args:
            name: Name of the state.
            state: JSON values.

        Raises:
            OSError: The storage cannot be written.

        Example:
            Store how many reports were read:

                runs.ReportFeed("experiment").save_state("reader", {"count": 10})
        """
        if self._directory.remote_path is None:
            (self._directory.local_path / TRACKERS_DIRECTORY).mkdir(exist_ok=True)
        data = json.dumps(state, indent=1).encode()
        self._directory.run_files.write(f"{TRACKERS_DIRECTORY}/{name}.json", data)

    def close(self) -> None:
        """Close the open segment.

        Example:
            Close a feed at the end of a block:

                with contextlib.closing(runs.ReportFeed("experiment")) as feed:
                    print(feed.read())
        """
        self._items = None
        if self._segments is not None:
            self._segments.close()


def _sort_reports(
    blocks: Iterable[ReportBlock],
) -> Iterator[tuple[int, int, ReportBlock, int]]:
    """Yield rank, number, block, and row of each report in a segment, in order for each rank.

    Closed segments have one block for each set of metric names of a rank.
    """
    for rank, group in itertools.groupby(blocks, key=lambda block: block.rank):
        reports = [
            (index, block, row) for block in group for row, index in enumerate(block.indices)
        ]
        for index, block, row in sorted(reports, key=lambda report: report[0]):
            yield rank, index, block, row
