"""`RunRecord`: what a run's directory tells of it, whoever hosts it, as far as it can be read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._errors import CheckpointError, DamagedRunError, UnsupportedFormatError
from drawbar.train._history.cleanup import UnusedFile, find_unused_files
from drawbar.train._history.events import (
    JournaledEvent,
    ReportReceived,
    RunEnded,
    RunStarted,
)
from drawbar.train._history.html import extract_curves
from drawbar.train._history.journal import (
    decode_readable_events,
    list_committed_names,
    missing_reports,
    select_effective_reports,
)
from drawbar.train._history.timeline import FINAL_STATUSES, RunState, Timeline
from drawbar.train._metrics import Metrics, flatten
from drawbar.train._storage.contents import MANIFEST_FILE
from drawbar.train._storage.external_checkpoints import INDEX_FILE
from drawbar.train._storage.files import compute_tree_size
from drawbar.train._storage.journal_file import JOURNAL_FILE, is_locked, strip_torn_line
from drawbar.train._storage.manifest import Manifest, read_file_or_none
from drawbar.train._storage.run_directory import RunDirectory

INTERRUPTED = "interrupted"
UNKNOWN = "unknown"
_POLL_PERIOD_S = 0.2


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its directory: one that goes on, is over, was cut off, or is damaged.

    Nothing is unpickled, and nothing is written. `find_run` and `list_runs` give one.

    Attributes:
        damage: What could not be read; "" if all could. The rest is told of what could.
    """

    _directory: RunDirectory
    _events: tuple[JournaledEvent, ...]
    damage: str = ""
    _listed_name: str = ""

    @classmethod
    def from_directory(cls, directory: RunDirectory, name: str = "") -> RunRecord:
        """Read as much as possible of a run.

        A journal in a directory of this machine that cannot be opened is damage too.

        Args:
            directory: Directory of the run.
            name: Name of the run in the storage path that lists it. Default: the directory's name.

        Raises:
            FileNotFoundError: There is no run.
            OSError: The storage cannot be read.
        """
        try:
            data = directory.run_files.read_journal()
        except (OSError, DamagedRunError) as error:
            # A storage that does not answer says nothing of the run: only a file that is here is
            # damaged.
            is_mounted = directory.remote_path is None and os.path.isdir(directory.local_path)
            if isinstance(error, OSError) and not is_mounted:
                raise
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            return cls(directory, (), f"its journal cannot be read: {reason}", name)
        if data is None and not any(directory.checkpoints.list_readable()):
            raise FileNotFoundError(
                f"{directory.uri} holds no Drawbar run: it has no {directory.journal_path.name}"
            )
        try:
            events, unreadable = decode_readable_events(data or b"", directory.root / JOURNAL_FILE)
        except UnsupportedFormatError as error:
            return cls(directory, (), str(error), name)
        if not events:
            return cls(directory, (), "its journal is empty or gone", name)
        lines = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        damage = f"its journal cannot be read in line {lines}" if unreadable else ""
        return cls(directory, tuple(events), damage, name)

    # -- what it is

    @property
    def name(self) -> str:
        """Name of the run, with the folders between it and the storage path that lists it."""
        return self._listed_name or self._directory.name

    @property
    def path(self) -> str:
        """The run's directory, or its URI."""
        return self._directory.uri

    @property
    def status(self) -> str:
        """How it stands.

        "starting", "running", "restarting"; "finished", "failed" or "stopped"; "interrupted" if the
        process that hosted it is gone; "unknown" if it has not ended as far as an object store
        says, and no process of this machine hosts it, or if the journal is lost.
        """
        if not self._events:
            return UNKNOWN
        status = RunState.from_events(self._events).status
        if status in FINAL_STATUSES or is_locked(self._directory.journal_path):
            return status
        # The lock is held on the machine of the driver, and an object store has none.
        return INTERRUPTED if self._directory.remote_path is None else UNKNOWN

    @property
    def config(self) -> dict[str, object]:
        """What the last start was configured with, as reprs."""
        starts = [event.config for event in self._events if isinstance(event, RunStarted)]
        return starts[-1] if starts else {}

    # -- what happened

    @property
    def start_time(self) -> float | None:
        """When it first began, in seconds since the epoch."""
        return self._events[0].time if self._events else None

    @property
    def last_event_time(self) -> float | None:
        """When something last happened in it, in seconds since the epoch."""
        return self._events[-1].time if self._events else None

    @property
    def timeline(self) -> Timeline:
        """Its attempts, with their causes of failure."""
        return Timeline.of(self._events)

    @property
    def error(self) -> str:
        """Why the run failed; "" if it did not."""
        ends = [event for event in self._events if isinstance(event, RunStarted | RunEnded)]
        return ends[-1].error if ends and isinstance(ends[-1], RunEnded) else ""

    @property
    def metrics(self) -> Metrics | None:
        """What the lowest rank that has reported, usually rank 0, reported last."""
        reports = self._effective_reports
        lowest = min((report.rank for report in reports), default=0)
        return next((each.metrics for each in reversed(reports) if each.rank == lowest), None)

    def list_report_rows(self) -> list[Metrics]:
        """List all reports that count, each as a row of `Result.metrics_dataframe`."""
        return [
            make_report_row(r)
            for r in sorted(self._effective_reports, key=lambda r: (r.index, r.rank))
        ]

    def get_curves(self) -> dict[str, dict[int, float]]:
        """Give the numbers that the lowest rank reported, by metric and number of the report."""
        return extract_curves(self._effective_reports)

    @property
    def _effective_reports(self) -> list[ReportReceived]:
        return select_effective_reports(self._events)

    # -- what lies there

    def list_checkpoints(self) -> list[Manifest]:
        """List the committed checkpoints, oldest first. Their files are not checked."""
        return self.inspect_checkpoints()[0]

    def inspect_checkpoints(self) -> tuple[list[Manifest], dict[str, str]]:
        """List the committed checkpoints that can be read, oldest first; say why others cannot.

        That is by name: of the file that lists those in other places; of those places; and, unless
        the run goes on, of what the journal says is there.
        """
        found, unread = self._directory.checkpoints.list_readable()
        if self.status in (*FINAL_STATUSES, INTERRUPTED):
            gone = sorted(
                list_committed_names(self._events) - {each.name for each in found} - set(unread)
            )
            unread |= dict.fromkeys(gone, f"it is not there, or has no {MANIFEST_FILE} to be read")
        return found, unread

    def verify_checkpoints(self) -> Iterator[tuple[str, str]]:
        """Check every checkpoint against its manifest and checksums, one after the other.

        Yields:
            The name of each checkpoint, and its damage or "". Checkpoints that are in the journal
            but do not exist are included, and so are the file that lists external checkpoints and
            the journal if they are damaged.
        """
        found, unread = self._directory.checkpoints.list_readable()
        if INDEX_FILE in unread:
            yield INDEX_FILE, unread.pop(INDEX_FILE)
        # While a run is active, checkpoints may be newer than the events that were read.
        is_over = self.status in (*FINAL_STATUSES, INTERRUPTED)
        if is_over and self._events and (lost := missing_reports(self._events, found)):
            reports = f"reports {lost.first} to {lost.until - 1}"
            yield JOURNAL_FILE, f"it lacks {reports}, which were made before {lost.checkpoint}"
        damaged = self._directory.checkpoints.list_damaged()
        names = {each.name for each in found} | unread.keys() | list_committed_names(self._events)
        for name in sorted(names.union(damaged)):
            try:
                self._directory.checkpoints.get_checkpoint(name).verify()
            except OSError as error:
                yield name, f"{error.filename}: {error.strerror}" if error.filename else str(error)
            except (CheckpointError, ImportError, ValueError) as error:
                yield name, str(error)
            else:
                yield name, ""

    def compute_size(self) -> int:
        """Count the bytes of all files of the run, wherever it lies."""
        home = self._directory.root
        if isinstance(home, Path):
            return compute_tree_size(home)
        return sum(file.size for file in home.list_files())

    def find_unused_files(self, num_to_keep: int | None = None) -> Iterator[UnusedFile]:
        """Give what may go, if the run does not go on; nothing is removed yet.

        Of a run in an object store that has not ended, nothing: another machine may be at it.

        That is what was never committed, and, if asked for, old checkpoints. What a user has handed
        over and nobody else has is set aside when the rest is removed.

        Args:
            keep: How many checkpoints are to stay, as `CheckpointConfig.num_to_keep` says: the
                best by the run's own score, and the newest. None keeps all.
        """
        if self.status != UNKNOWN:
            yield from find_unused_files(self._directory, self._events, num_to_keep)

    def read_stacks(self) -> dict[int, str]:
        """Give every rank's stacks as they were last written on this machine; {} if never."""
        folder = self._directory.local_path / "stacks"
        # Written last: without it somebody else's are just being written.
        written = sorted(folder.glob("*/difference.txt"), key=os.path.getmtime)
        files = written[-1].parent.glob("rank_*.txt") if written else ()
        texts = {
            int(file.stem.removeprefix("rank_")): file.read_text(errors="replace")
            for file in files
            if file.stem.removeprefix("rank_").isdecimal() and file.is_file()
        }
        return dict(sorted(texts.items()))

    def read_log(self, rank: int, offset: int = 0) -> bytes | None:
        """Give what a rank has written so far, from a byte on; None if there is no log of it."""
        here = self._directory.get_log_path(rank)
        written = read_file_or_none(here.parent, here.name, offset)
        if written is not None:  # newer than what lies in an object store
            return written
        there = self._directory.run_files.read(os.path.relpath(here, self._directory.local_path))
        return None if there is None else there[offset:]

    def follow_log(self, rank: int) -> Iterator[bytes]:
        """Give what a rank has written, and what it writes until the run is over, as it comes.

        Log and journal are looked at five times a second, each from where it was read to.
        """
        journal, snapshot, read, written = self._directory.journal_path, RunState(), 0, 0
        goes_on = True
        while goes_on:
            # Before the log: all of that is written when the run is over.
            lines = strip_torn_line(read_file_or_none(journal.parent, journal.name, read) or b"")
            read += len(lines)
            for event in decode_readable_events(lines)[0]:
                snapshot.apply(event)
            goes_on = snapshot.status not in FINAL_STATUSES and is_locked(journal)
            new = self.read_log(rank, written) or b""
            written += len(new)
            yield new
            if goes_on:
                time.sleep(_POLL_PERIOD_S)


REPORT_COLUMNS = ("rank", "index", "attempt", "time")
"""What each row of a table of reports has, before its metrics."""


def make_report_row(report: ReportReceived) -> Metrics:
    """Give a report as a row of a table: who made it when, and its metrics, keys joined by "/"."""
    row = {name: getattr(report, name) for name in REPORT_COLUMNS}
    for name, value in flatten(report.metrics).items():
        row[f"metric/{name}" if name in REPORT_COLUMNS else name] = value
    return row
