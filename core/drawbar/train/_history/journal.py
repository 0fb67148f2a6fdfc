"""What happened in a run, in order: one JSON line for each event, from the controller alone.

The journal is the run's memory. `Result` is built from it, a resumed run reads its history from it,
and a line that a crash cut off is dropped when it is opened again. Every event that a decision
depends on is written before the decision is acted on.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
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
    RunStarted,
)
from drawbar.train._metrics import Metrics, from_json, to_json
from drawbar.train._storage.files import is_open_at
from drawbar.train._storage.journal_file import JournalFile
from drawbar.train._storage.manifest import UNREADABLE
from drawbar.train._storage.run_directory import RunDirectory

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournaledEvent)
_EVENT_TYPES = {kind.__struct_config__.tag for kind in get_args(JournaledEvent)}
_WITH_METRICS = (ReportReceived, CheckpointCommitted, CheckpointValidated)


class Journal(JournalFile):
    """The open journal of a run as its events."""

    def append(self, event: JournaledEvent) -> None:
        """Write an event. It survives this process's death when this returns.

        Raises:
            OSError: It cannot be written, or the journal was deleted or moved in the meantime.
        """
        # Else the events would go into a file that nobody can find, and a checkpoint be promised
        # there.
        if not is_open_at(self._path, self._file.fileno()):
            raise FileNotFoundError(
                f"{self._path.parent}, or the journal in it, was deleted or moved while the run "
                f"went on; what was to be written to it: {_told(event)}"
            )
        if isinstance(event, _WITH_METRICS):
            event = msgspec.structs.replace(event, metrics=to_json(event.metrics))
        self.write(_encoder.encode(event) + b"\n")

    def salvage(self) -> tuple[list[JournaledEvent], bool]:
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
        good: list[bytes] = []
        bad: list[bytes] = []
        # Line by line: each is whole in itself, so one that is damaged takes no other along.
        for line in self._path.read_bytes().splitlines(keepends=True):
            (good if _is_readable(line) else bad).append(line)
        with open(self._path.with_name("journal.damaged"), "ab") as damaged:
            damaged.writelines(bad)
        self.replace(b"".join(good))
        return list(replay(self._path)), False


def _told(event: JournaledEvent) -> str:
    match event:
        case ReportReceived():
            return f"report {event.index} of rank {event.rank}"
        case AttemptEnded():
            return f"the failure of attempt {event.attempt}, {'; '.join(event.failures)}"
        case _:
            return type(event).__name__


def _is_readable(line: bytes) -> bool:
    try:
        _decode(line, "")
    except UNREADABLE:
        return False
    return True


class _Header(msgspec.Struct):
    """Fields by which a line of another format version is recognized."""

    event: str
    format_version: int = JOURNAL_FORMAT


_header_decoder = msgspec.json.Decoder(_Header)


def _decode(line: bytes, place: object) -> JournaledEvent | None:
    """Decode a line. Return None if a newer version of Drawbar has added its type of event.

    Raises:
        UnsupportedFormatError: The line begins a newer format of the journal at `place`.
        Exception: One of `UNREADABLE`: the line is damaged.
    """
    try:
        event = _decoder.decode(line)
    except UNREADABLE:
        header = _header_decoder.decode(line)
        _check_format(header.format_version, place)
        if header.event in _EVENT_TYPES:
            raise
        return None
    if isinstance(event, RunStarted):
        _check_format(event.format_version, place)
    return event


def _check_format(version: int, place: object) -> None:
    if version > JOURNAL_FORMAT:
        raise UnsupportedFormatError.of(place, version, JOURNAL_FORMAT)


def replay(path: Path) -> Iterator[JournaledEvent]:
    """Read the events of a journal in order.

    Omits a truncated last line, and types of events that a newer version of Drawbar has added.

    Raises:
        DamagedRunError: A line in the middle cannot be read. The message names its number.
        UnsupportedFormatError: A newer version of Drawbar has written the journal.
    """
    with open(path, "rb") as file:
        yield from events_in(file, path)


def events_in(lines: Iterable[bytes], place: object) -> Iterator[JournaledEvent]:
    """Read the events from the lines of the journal at `place`; see `replay`."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            event = _decode(line, place)
        except UNREADABLE as error:
            raise DamagedRunError(
                f"line {number} of {place} cannot be read: {error}. The run's checkpoints are "
                'not touched by that; fit() with resume="auto" keeps the damaged lines in '
                "journal.damaged and goes on from the newest intact checkpoint"
            ) from error
        if event is None:
            continue
        if isinstance(event, _WITH_METRICS):
            event = msgspec.structs.replace(event, metrics=from_json(event.metrics))
        yield event


def legible(data: bytes, place: object = "") -> tuple[list[JournaledEvent], list[int]]:
    """Return the events of the readable lines, and the numbers of the unreadable lines.

    Raises:
        UnsupportedFormatError: A newer version of Drawbar has written the journal at `place`.
    """
    events: list[JournaledEvent] = []
    unreadable: list[int] = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            events += events_in([line], place)
        except DamagedRunError:
            unreadable.append(number)
    return events, unreadable


def journal_lost(place: object, newest: str) -> DamagedRunError:
    """Say that there is no event beside checkpoints, of which `newest` is one."""
    return DamagedRunError(
        f"{place} is empty or gone, and {newest} lies beside it: the run's history is lost, its "
        'checkpoints are not; fit() with resume="auto" goes on from the newest intact one'
    )


def events_of(directory: RunDirectory) -> list[JournaledEvent]:
    """Read what happened in a run, wherever it goes on; nothing is written for that.

    Raises:
        FileNotFoundError: There is no run.
        DamagedRunError: Its journal cannot be read, or is lost beside its checkpoints.
    """
    data, place = directory.files.read_journal(), directory.home / directory.journal.name
    events = list(events_in(io.BytesIO(data or b""), place))
    if not events and (found := directory.checkpoints.committed()):
        raise journal_lost(place, found[-1].name)
    if data is None:
        raise FileNotFoundError(
            f"{directory.location} holds no Drawbar run: it has no {directory.journal.name}"
        )
    return events


def committed(events: Iterable[JournaledEvent]) -> set[str]:
    """Give the names of the checkpoints that are there by these events."""
    names: set[str] = set()
    for event in events:
        if isinstance(event, CheckpointCommitted):
            names.add(event.name)
        elif isinstance(event, CheckpointDeleted):
            names.discard(event.name)
    return names


def history(events: Iterable[JournaledEvent]) -> list[ReportReceived]:
    """Give the reports that count, without gap or duplicate, in order.

    An attempt that starts at report k takes the place of whatever earlier attempts reported from k
    on. The metrics of a checkpoint's validation are added to those of its report, on the lowest
    rank.
    """
    reports: list[ReportReceived] = []
    validated: dict[int, Metrics] = {}
    for event in events:
        if isinstance(event, ReportReceived):
            reports.append(event)
        elif isinstance(event, CheckpointValidated):
            validated[event.index] = event.metrics
        elif isinstance(event, AttemptStarted):
            first = event.first_index
            reports = [report for report in reports if report.index < first]
            validated = {index: each for index, each in validated.items() if index < first}
    return _with_validations(reports, validated) if validated else reports


def _with_validations(
    reports: list[ReportReceived], validated: dict[int, Metrics]
) -> list[ReportReceived]:
    lowest: dict[int, int] = {}
    for report in reports:
        # Added to one rank's alone: a table that has them twice would count them twice.
        lowest[report.index] = min(report.rank, lowest.get(report.index, report.rank))
    return [
        msgspec.structs.replace(report, metrics={**report.metrics, **validated[report.index]})
        if report.index in validated and report.rank == lowest[report.index]
        else report
        for report in reports
    ]
