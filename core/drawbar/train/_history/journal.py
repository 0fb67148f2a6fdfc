"""Write and replay the journal: one JSON line per event.

Only the controller writes the journal. `Result` is built from it, and a resumed run reads its
history from it. A line that a crash truncated is dropped when the journal is opened. The controller
writes an event before it acts on the event, for example before it deletes a checkpoint.
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
    """Journal file of a run that is open for writing events."""

    def append(self, event: JournaledEvent) -> None:
        """Write an event, so that it survives the death of this process.

        Raises:
            OSError: The journal cannot be written, or was deleted or moved in the meantime.
        """
        # The path may no longer refer to the open file. Events in a deleted file would be lost, and
        # checkpoints would be committed without an entry in a journal.
        if not is_current_file(self._path, self._file.fileno()):
            raise FileNotFoundError(
                f"{self._path.parent} or its journal was deleted or moved during the run, so this "
                f"event cannot be written: {_describe_event(event)}"
            )
        if isinstance(event, _METRIC_EVENTS):
            event = msgspec.structs.replace(event, metrics=encode_non_finite(event.metrics))
        self.append_line(_encoder.encode(event) + b"\n")

    def recover(self) -> tuple[list[JournaledEvent], bool]:
        """Move unreadable lines to `journal.damaged` and read the other lines.

        Returns:
            The events, and True if all lines were readable.

        Raises:
            UnsupportedFormatError: A newer version of Drawbar has written the journal. The file is
                not changed.
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
    """Fields of a line that show whether a newer version of Drawbar has written it."""

    event: str
    format_version: int = JOURNAL_FORMAT


_header_decoder = msgspec.json.Decoder(_Header)


def _decode(line: bytes, path: object) -> JournaledEvent | None:
    """Decode a line. Return None for a type of event that a newer version of Drawbar has added.

    Raises:
        UnsupportedFormatError: The line states that the journal at `path` has a newer format.
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
        DamagedRunError: A complete line cannot be read. The message contains the line number.
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


def find_missing_reports(
    events: Sequence[JournaledEvent], manifests: Iterable[Manifest]
) -> ReportsLost | None:
    """Find reports that are not in the journal, although a later checkpoint was committed.

    The controller first writes the reports of a round to the journal. It then commits the round's
    checkpoint and writes the commit to the journal. If the driver is killed between these two
    steps, the commit is not in the journal, but no report is missing.

    Args:
        events: Events of the journal.
        manifests: Committed checkpoints.

    Returns:
        The range of missing reports; None if no report is missing.
    """
    run_ids = {event.run_id for event in events if isinstance(event, RunStarted)}
    latest_index = max(get_checkpoint_indices(events).values(), default=-1)
    # A user may have copied checkpoints of other runs into the directory.
    newer = [
        manifest
        for manifest in manifests
        if manifest.index > latest_index and (not run_ids or manifest.run_id in {"", *run_ids})
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
        # The attempt that saved this checkpoint is not in the journal. It may have resumed from the
        # latest checkpoint in the journal and replaced all reports after that checkpoint.
        first = min(first, latest_index + 1)
    return ReportsLost(
        time=time.time(), first=first, until=newest.index + 1, checkpoint=newest.name
    )


def _next_report(events: Sequence[JournaledEvent]) -> int:
    """Return the first report that the journal does not have for all ranks of the last attempt."""
    first, next_reports = 0, dict[int, int]()
    for event in events:
        if isinstance(event, AttemptStarted):
            first, next_reports = event.first_report_index, {}
        elif isinstance(event, WorkersStarted):
            next_reports = dict.fromkeys(range(len(event.workers)), first)
        elif isinstance(event, ReportReceived):
            next_reports[event.rank] = event.index + 1
    return min(next_reports.values(), default=first)


def get_checkpoint_indices(events: Iterable[JournaledEvent]) -> dict[str, int]:
    """Return the name and report number of each committed checkpoint that was not deleted."""
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
        names: Names of the run's checkpoints. List them before you read the journal, because an
            active run may commit other checkpoints in the meantime.
        directory: The run's directory.

    Raises:
        DamagedRunError: The journal does not contain all reports before a checkpoint.
    """
    journaled = {event.name for event in events if isinstance(event, CheckpointCommitted)}
    unknown = [name for name in names if name not in journaled]
    if lost := find_missing_reports(events, directory.checkpoints.list_committed(unknown)):
        raise DamagedRunError(
            f"In {directory.journal_path}, reports {lost.first} to {lost.until - 1} are missing, "
            f"although {lost.checkpoint} was committed after them. The checkpoints are not "
            'affected; fit() with resume="auto" resumes from the newest intact one and records in '
            "the journal which reports are missing."
        )


def read_events(directory: RunDirectory) -> list[JournaledEvent]:
    """Read the events of an ended or active run without writing any file.

    Raises:
        FileNotFoundError: There is no run.
        DamagedRunError: The journal cannot be read, was truncated, or is lost although
            checkpoints exist.
    """
    # In an object store, the journal is uploaded after each commit, so the latest commit may not be
    # in it yet.
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
    return set(get_checkpoint_indices(events))


def select_effective_reports(events: Iterable[JournaledEvent]) -> list[ReportReceived]:
    """Return the reports that no later attempt has replaced, in order.

    An attempt that starts at report k replaces report k and all later reports of earlier attempts.
    Report numbers are contiguous, except where a `ReportsLost` event records a gap. The validation
    metrics of a checkpoint are added to the report of the lowest rank.
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
        # Add the metrics to one rank only. Otherwise a sum or count over all rows of
        # `Result.metrics_dataframe` would include them once per rank.
        lowest[report.index] = min(report.rank, lowest.get(report.index, report.rank))
    return [
        msgspec.structs.replace(report, metrics={**report.metrics, **validated[report.index]})
        if report.index in validated and report.rank == lowest[report.index]
        else report
        for report in reports
    ]
