"""Write and replay the journal: one JSON line per event.

Only the controller writes the journal. `Result` is built from it and from the reports, which are
stored in other files (`report_log.py`). A resumed run reads its history from both. A
line that a crash truncated is dropped when the journal is opened. The controller writes an event
before it acts on the event, for example before it deletes a checkpoint.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import msgspec

from drawbar._base.metrics import decode_non_finite, encode_non_finite
from drawbar._process.errors import DamagedRunError, UnsupportedFormatError
from drawbar._records.events import (
    JOURNAL_FORMAT,
    AttemptEnded,
    CheckpointCommitted,
    CheckpointValidated,
    JournaledEvent,
    RunStarted,
)
from drawbar._storage.files import is_current_file
from drawbar._storage.journal_file import JournalFile
from drawbar._storage.manifest import DECODE_ERRORS

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(JournaledEvent)
_EVENT_TYPES = {event_type.__struct_config__.tag for event_type in get_args(JournaledEvent)}
_METRIC_EVENTS = (CheckpointCommitted, CheckpointValidated)


class Journal(JournalFile):
    """Journal file of a run that is open for writing events."""

    def append(self, event: JournaledEvent) -> None:
        """Write an event, so that it survives the death of this process.

        Raises:
            OSError: The journal cannot be written, or was deleted or moved in the meantime.
        """
        self.check_current(_describe_event(event))
        if isinstance(event, _METRIC_EVENTS):
            event = msgspec.structs.replace(event, metrics=encode_non_finite(event.metrics))
        self.append_line(_encoder.encode(event) + b"\n")

    def check_current(self, description: str) -> None:
        """Check that the journal is still at its path.

        Args:
            description: Description of the event, for the error message.

        Raises:
            FileNotFoundError: The journal was deleted or moved in the meantime.
        """
        # The path may no longer refer to the open file. Events in a deleted file would be lost, and
        # checkpoints would be committed without an entry in a journal.
        if not is_current_file(self._path, self._file.fileno()):
            raise FileNotFoundError(
                f"{self._path.parent} or its journal was deleted or moved during the run, so this "
                f"event cannot be written: {description}"
            )

    def recover(self) -> tuple[list[JournaledEvent], bool]:
        """Move unreadable lines to `journal.damaged` and read the other lines.

        Returns:
            The events, and True if all lines were readable.

        Raises:
            UnsupportedFormatError: A newer version of Drawbar has written the journal. The file is
                not changed.
        """
        data = self._path.read_bytes()
        events, unreadable = decode_readable_events(data, self._path)
        if not unreadable:
            return events, True
        lines = dict(enumerate(io.BytesIO(data), start=1))
        with open(self._path.with_name("journal.damaged"), "ab") as damaged:
            damaged.writelines(lines.pop(number) for number in unreadable)
        self.replace_contents(b"".join(lines.values()))
        return events, False


def _describe_event(event: JournaledEvent) -> str:
    match event:
        case AttemptEnded():
            return f"the failure of attempt {event.attempt}, {'; '.join(event.failure_headlines)}"
        case _:
            return type(event).__name__


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
    # Unlike `splitlines`, this does not split a damaged line at "\r".
    for number, line in enumerate(io.BytesIO(data), start=1):
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
