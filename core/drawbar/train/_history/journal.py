"""Write and replay the journal: one JSON line per event.

Only the controller writes the journal. `Result` is built from it, and a resumed run reads its
history from it. A line that a crash truncated is dropped when the journal is opened. Every event
that a decision depends on is written before the decision takes effect.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from drawbar.train._errors import DamagedRunError, UnsupportedFormatError
from drawbar.train._history.events import (
    JOURNAL_FORMAT,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    JournaledEvent,
    ReportReceived,
    ReportsLost,
    RunStarted,
    WorkersStarted,
)
from drawbar.train._metrics import Metrics, decode_non_finite, encode_non_finite
from drawbar.train._storage.files import is_current_file
from drawbar.train._storage.journal_file import JournalFile
from drawbar.train._storage.manifest import DECODE_ERRORS, Manifest
from drawbar.train._storage.run_directory import RunDirectory

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournaledEvent)
_EVENT_TYPES = {event_type.__struct_config__.tag for event_type in get_args(JournaledEvent)}
_METRIC_EVENTS = (ReportReceived, CheckpointCommitted, CheckpointValidated)


class Journal(JournalFile):
    """The open journal of a run, as events."""

    def append(self, event: JournaledEvent) -> None:
        """Write an event, so that it survives the death of this process.

        Raises:
            OSError: The journal cannot be written, or was deleted or moved in the meantime.
        """
        # Otherwise events would be written to a deleted file, and a checkpoint would be committed
        # that no journal has.
        if not is_current_file(self._path, self._file.fileno()):
            raise FileNotFoundError(
                f"{self._path.parent} or its journal was deleted or moved during the run, so this "
                f"event cannot be written: {_describe_event(event)}"
            )
        if isinstance(event, _METRIC_EVENTS):
            event = msgspec.structs.replace(event, metrics=encode_non_finite(event.metrics))
        self.append_line(_encoder.encode(event) + b"\n")

    def recover(self) -> tuple[list[JournaledEvent], bool]:
        """Read the readable lines. Return their events, and whether all lines are readable.

        Unreadable lines are moved to `journal.damaged`.

        Raises:
            UnsupportedFormatError: A newer version of Drawbar has written the journal, which stays
                as it is.
        """
        try:
            return list(replay(self._path)), True
        except DamagedRunError:
            pass
        readable_lines: list[bytes] = []
        damaged_lines: list[bytes] = []
        # Lines are independent, so a damaged line does not affect the others.
        for line in self._path.read_bytes().splitlines(keepends=True):
            (readable_lines if _is_readable(line) else damaged_lines).append(line)
        with open(self._path.with_name("journal.damaged"), "ab") as damaged:
            damaged.writelines(damaged_lines)
        self.replace_contents(b"".join(readable_lines))
        return list(replay(self._path)), False


def _describe_event(event: JournaledEvent) -> str:
    match event:
        case ReportReceived():
            return f"report {event.index} of rank {event.rank}"
        case AttemptEnded():
            return f"the failure of attempt {event.attempt}, {'; '.join(event.failure_headlines)}"
        case _:
            return type(event).__name__


def _is_readable(line: bytes) -> bool:
    try:
        _decode(line, "")
    except DECODE_ERRORS:
        return False
    return True


class _Header(msgspec.Struct):
    """Fields by which a line of another format version is recognized."""

    event: str
    format_version: int = JOURNAL_FORMAT


_header_decoder = msgspec.json.Decoder(_Header)


def _decode(line: bytes, path: object) -> JournaledEvent | None:
    """Decode a line. Return None if a newer version of Drawbar has added its type of event.

    Raises:
        UnsupportedFormatError: The line begins a newer format of the journal at `path`.
        Exception: One of `DECODE_ERRORS`: the line is damaged.
    """
    try:
        event: JournaledEvent = _decoder.decode(line)
    except DECODE_ERRORS:
        header = _header_decoder.decode(line)
        _check_format(header.format_version, path)
        if header.event in _EVENT_TYPES:
            raise
        return None
    if isinstance(event, RunStarted):
        _check_format(event.format_version, path)
    return event


def _check_format(version: int, path: object) -> None:
    if version > JOURNAL_FORMAT:
        raise UnsupportedFormatError.of(path, version, JOURNAL_FORMAT)


def replay(path: Path) -> Iterator[JournaledEvent]:
    """Read the events of a journal in order.

    Omits a truncated last line, and types of events that a newer version of Drawbar has added.

    Raises:
        DamagedRunError: A line in the middle cannot be read. The message names its number.
        UnsupportedFormatError: A newer version of Drawbar has written the journal.
    """
    with open(path, "rb") as file:
        yield from decode_events(file, path)


def decode_events(lines: Iterable[bytes], path: object) -> Iterator[JournaledEvent]:
    """Yield the events of lines from the journal at `path`; see `replay`."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            event = _decode(line, path)
        except DECODE_ERRORS as error:
            raise DamagedRunError(
                f"Line {number} of {path} cannot be read: {error}. The checkpoints are not "
                'affected; fit() with resume="auto" moves the damaged lines to journal.damaged '
                "and resumes from the newest intact checkpoint."
            ) from error
        if event is None:
            continue
        if isinstance(event, _METRIC_EVENTS):
            event = msgspec.structs.replace(event, metrics=decode_non_finite(event.metrics))
        yield event


def decode_readable_events(
    data: bytes, path: object = ""
) -> tuple[list[JournaledEvent], list[int]]:
    """Return the events of the readable lines, and the numbers of the unreadable lines.

    Raises:
        UnsupportedFormatError: A newer version of Drawbar has written the journal at `path`.
    """
    events: list[JournaledEvent] = []
    unreadable: list[int] = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            events += decode_events([line], path)
        except DamagedRunError:
            unreadable.append(number)
    return events, unreadable


def make_journal_lost_error(path: object, newest: str) -> DamagedRunError:
    """Return the error for a journal that is lost although checkpoints exist."""
    return DamagedRunError(
        f"{path} is empty or missing, although {newest} exists. The history of the run is lost, "
        'but not its checkpoints; fit() with resume="auto" resumes from the newest intact one.'
    )


def missing_reports(
    events: Sequence[JournaledEvent], manifests: Iterable[Manifest]
) -> ReportsLost | None:
    """Return the reports that a journal lacks although a later checkpoint exists.

    A driver journals the reports of a round before it commits the round's checkpoint. If it is
    killed after the commit, the journal lacks the commit, but no report.

    Args:
        events: Events of the journal.
        manifests: Committed checkpoints.

    Returns:
        None if no report is missing.
    """
    run_ids = {event.run_id for event in events if isinstance(event, RunStarted)}
    journaled = max(kept_indices(events).values(), default=-1)
    # A user may have copied checkpoints of other runs into the directory.
    newer = [
        manifest
        for manifest in manifests
        if manifest.index > journaled and (not run_ids or manifest.run_id in {"", *run_ids})
    ]
    if not newer:
        return None
    newest = max(newer, key=lambda manifest: manifest.index)
    ranks = {
        event.rank
        for event in events
        if isinstance(event, ReportReceived)
        and (event.attempt, event.index) == (newest.attempt, newest.index)
    }
    if len(ranks) >= newest.world_size:
        return None
    first = min(_next_report(events), newest.index)
    if newest.attempt not in {
        event.attempt for event in events if isinstance(event, AttemptStarted)
    }:
        # A later attempt started from a checkpoint and replaced all reports after it.
        first = min(first, journaled + 1)
    return ReportsLost(
        time=time.time(), first=first, until=newest.index + 1, checkpoint=newest.name
    )


def _next_report(events: Sequence[JournaledEvent]) -> int:
    """Return the lowest report number that some rank of the last attempt has not journaled."""
    first, next_reports = 0, dict[int, int]()
    for event in events:
        if isinstance(event, AttemptStarted):
            first, next_reports = event.first_report_index, {}
        elif isinstance(event, WorkersStarted):
            next_reports = dict.fromkeys(range(len(event.workers)), first)
        elif isinstance(event, ReportReceived):
            next_reports[event.rank] = event.index + 1
    return min(next_reports.values(), default=first)


def kept_indices(events: Iterable[JournaledEvent]) -> dict[str, int]:
    """Return the report numbers of the checkpoints that were not deleted, by name."""
    indices: dict[str, int] = {}
    for event in events:
        if isinstance(event, CheckpointCommitted):
            indices[event.name] = event.index
        elif isinstance(event, CheckpointDeleted):
            indices.pop(event.name, None)
    return indices


def require_complete(
    events: Sequence[JournaledEvent], names: Iterable[str], directory: RunDirectory
) -> None:
    """Check that a journal was not truncated.

    Args:
        events: Events of the journal.
        names: Names of the run's checkpoints, listed before the journal was read. A run that is
            active may have committed others since.
        directory: The run's directory.

    Raises:
        DamagedRunError: The journal lacks reports that were made before a checkpoint.
    """
    journaled = {event.name for event in events if isinstance(event, CheckpointCommitted)}
    unknown = [name for name in names if name not in journaled]
    if lost := missing_reports(events, directory.checkpoints.list_committed(unknown)):
        raise DamagedRunError(
            f"In {directory.journal_path}, reports {lost.first} to {lost.until - 1} are missing, "
            f"although {lost.checkpoint} was committed after them. The checkpoints are not "
            'affected; fit() with resume="auto" resumes from the newest intact one and records in '
            "the journal which reports are missing."
        )


def read_events(directory: RunDirectory) -> list[JournaledEvent]:
    """Read the events of a run, also of one that is active. Nothing is written.

    Raises:
        FileNotFoundError: There is no run.
        DamagedRunError: The journal cannot be read, was truncated, or is lost although
            checkpoints exist.
    """
    # The journal of an object store is uploaded after a commit, so it may end before it.
    names = directory.checkpoints.names() if directory.remote_path is None else []
    data, path = directory.run_files.read_journal(), directory.root / directory.journal_path.name
    events = list(decode_events(io.BytesIO(data or b""), path))
    if not events and (manifests := directory.checkpoints.list_committed()):
        raise make_journal_lost_error(path, manifests[-1].name)
    if data is None:
        raise FileNotFoundError(
            f"{directory.uri} is not a Drawbar run: it has no {directory.journal_path.name}. "
            "Pass the directory of a run."
        )
    require_complete(events, names, directory)
    return events


def list_committed_names(events: Iterable[JournaledEvent]) -> set[str]:
    """Return the names of the checkpoints that were committed and not deleted."""
    return set(kept_indices(events))


def select_effective_reports(events: Iterable[JournaledEvent]) -> list[ReportReceived]:
    """Return the reports that count, in order, without duplicates.

    An attempt that starts at report k replaces the reports of earlier attempts from k on. There is
    a gap only where a start has recorded that reports were lost. A checkpoint's validation metrics
    are added to the metrics of its report, on the lowest rank.
    """
    reports: list[ReportReceived] = []
    validated: dict[int, Metrics] = {}
    for event in events:
        if isinstance(event, ReportReceived):
            reports.append(event)
        elif isinstance(event, CheckpointValidated):
            validated[event.index] = event.metrics
        elif isinstance(event, AttemptStarted | ReportsLost):
            first = event.first_report_index if isinstance(event, AttemptStarted) else event.first
            reports = [report for report in reports if report.index < first]
            validated = {index: metrics for index, metrics in validated.items() if index < first}
    return _add_validation_metrics(reports, validated) if validated else reports


def _add_validation_metrics(
    reports: list[ReportReceived], validated: dict[int, Metrics]
) -> list[ReportReceived]:
    lowest: dict[int, int] = {}
    for report in reports:
        # For one rank only: in a table, duplicates would be counted twice.
        lowest[report.index] = min(report.rank, lowest.get(report.index, report.rank))
    return [
        msgspec.structs.replace(report, metrics={**report.metrics, **validated[report.index]})
        if report.index in validated and report.rank == lowest[report.index]
        else report
        for report in reports
    ]
