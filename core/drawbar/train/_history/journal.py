"""What happened in a run, in order: typed events, one JSON line each, from the controller alone.

The journal is the run's memory. `Result` is built from it, a resumed run reads its history from it,
and a line that a crash cut off is dropped when it is opened again. Every event that a decision
depends on is written before the decision is acted on.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from drawbar.train._errors import DamagedRunError
from drawbar.train._messages import Ranks, WorkerInfo
from drawbar.train._metrics import from_json, to_json
from drawbar.train._storage.files import check_stays_inside, is_open_at
from drawbar.train._storage.journal_file import JournalFile
from drawbar.train._storage.manifest import (
    UNREADABLE,
    Manifest,
    ReportedCheckpointStatus,
    Validation,
)
from drawbar.train._storage.run_directory import RunDirectory

AttemptEnd = Literal[
    "worker", "hang", "preemption", "resize", "startup", "configuration", "divergence", "storage"
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    time: float


class RunStarted(_Event, frozen=True, kw_only=True, tag="run_started"):
    """`fit()` was called on this directory. `config` holds the reprs of what was configured."""

    run_id: str
    name: str
    config: dict[str, Any]
    detached: bool = False


class AttemptStarted(_Event, frozen=True, kw_only=True, tag="attempt_started"):
    """The workers are about to start. Reports are numbered from `first_index` on.

    Reports of earlier attempts with that number or a higher one are no longer part of the history.
    """

    attempt: int
    first_index: int
    checkpoint: str | None


class WorkersStarted(_Event, frozen=True, kw_only=True, tag="workers_started"):
    """Every worker process is up and has its ranks."""

    attempt: int
    workers: list[tuple[WorkerInfo, Ranks]]


class UserFunctionStarted(_Event, frozen=True, kw_only=True, tag="function_started"):
    """The first line of the training function ran on this rank."""

    attempt: int
    rank: int


class ReportReceived(_Event, frozen=True, kw_only=True, tag="report"):
    """One rank's `report()`."""

    attempt: int
    rank: int
    index: int
    metrics: dict[str, Any]


class CheckpointCommitted(_Event, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint is committed. `seconds`: from the last rank's report to the commit."""

    attempt: int
    index: int
    name: str
    nbytes: int
    seconds: float
    metrics: dict[str, Any]

    def __post_init__(self) -> None:
        check_stays_inside(self.name)

    @staticmethod
    def of(manifest: Manifest, *, seconds: float) -> CheckpointCommitted:
        """Give the event of this checkpoint's commit."""
        return CheckpointCommitted(
            time=manifest.time,
            attempt=manifest.attempt,
            index=manifest.index,
            name=manifest.name,
            nbytes=manifest.nbytes,
            seconds=seconds,
            metrics=manifest.metrics,
        )


class CheckpointValidated(_Event, frozen=True, kw_only=True, tag="checkpoint_validated"):
    """A checkpoint's validation has ended; what it says is as in `Validation`."""

    index: int
    name: str
    status: ReportedCheckpointStatus
    metrics: dict[str, Any]
    error: str
    seconds: float

    @staticmethod
    def of(manifest: Manifest, validation: Validation) -> CheckpointValidated:
        """Give the event of the end of this checkpoint's validation."""
        return CheckpointValidated(
            time=time.time(),
            index=manifest.index,
            name=manifest.name,
            status=validation.status,
            metrics=validation.metrics,
            error=validation.error,
            seconds=validation.seconds,
        )


class CheckpointDeleted(_Event, frozen=True, kw_only=True, tag="checkpoint_deleted"):
    """Retention let go of a checkpoint."""

    name: str

    def __post_init__(self) -> None:
        check_stays_inside(self.name)


class AttemptEnded(_Event, frozen=True, kw_only=True, tag="attempt_failed"):
    """The attempt ended early. `failures` are headlines, the root cause first."""

    attempt: int
    kind: AttemptEnd
    failures: list[str]


class RanksQuiet(_Event, frozen=True, kw_only=True, tag="ranks_quiet"):
    """Which ranks give no sign of life now, and what is said of each; none: all do again."""

    attempt: int
    ranks: dict[int, str]


class RunEnded(_Event, frozen=True, kw_only=True, tag="run_ended"):
    """The run is over: "finished", "failed" or "stopped"."""

    outcome: str
    error: str = ""


Event = (
    RunStarted
    | AttemptStarted
    | WorkersStarted
    | UserFunctionStarted
    | ReportReceived
    | CheckpointCommitted
    | CheckpointValidated
    | CheckpointDeleted
    | AttemptEnded
    | RanksQuiet
    | RunEnded
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)
_WITH_METRICS = (ReportReceived, CheckpointCommitted, CheckpointValidated)


class Journal(JournalFile):
    """The open journal of a run as its events."""

    def append(self, event: Event) -> None:
        """Write an event. It survives this process's death when this returns.

        Raises:
            OSError: It cannot be written, or the journal was deleted or moved in the meantime.
        """
        if not is_open_at(self._path, self._file.fileno()):
            raise FileNotFoundError(
                f"{self._path.parent}, or the journal in it, was deleted or moved while the run "
                f"went on; what was to be written to it: {_told(event)}"
            )
        if isinstance(event, _WITH_METRICS):
            event = msgspec.structs.replace(event, metrics=to_json(event.metrics))
        self.write(_encoder.encode(event) + b"\n")

    def salvage(self) -> tuple[list[Event], bool]:
        """Read what can be read; tells also whether that was all.

        If it was not, the unreadable lines are cut out and kept beside it in `journal.damaged`.
        """
        try:
            return list(replay(self._path)), True
        except DamagedRunError:
            pass
        good: list[bytes] = []
        bad: list[bytes] = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            (good if _is_readable(line) else bad).append(line)
        with open(self._path.with_name("journal.damaged"), "ab") as damaged:
            damaged.writelines(bad)
        self.replace(b"".join(good))
        return list(replay(self._path)), False


def _told(event: Event) -> str:
    match event:
        case ReportReceived():
            return f"report {event.index} of rank {event.rank}"
        case AttemptEnded():
            return f"the failure of attempt {event.attempt}, {'; '.join(event.failures)}"
        case _:
            return type(event).__name__


def _is_readable(line: bytes) -> bool:
    try:
        _decoder.decode(line)
    except UNREADABLE:
        return False
    return True


def replay(path: Path) -> Iterator[Event]:
    """Read the events of a journal in order. A last line that was cut off is left out.

    Raises:
        DamagedRunError: A line in the middle cannot be read; the message gives its number.
    """
    with open(path, "rb") as file:
        yield from events_in(file, path)


def events_in(lines: Iterable[bytes], place: object) -> Iterator[Event]:
    """Do the same with the lines of a journal that lies in some place."""
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            event = _decoder.decode(line)
        except UNREADABLE as error:
            raise DamagedRunError(
                f"line {number} of {place} cannot be read: {error}. The run's checkpoints are "
                'not touched by that; fit() with resume="auto" keeps the damaged lines in '
                "journal.damaged and goes on from the newest intact checkpoint"
            ) from error
        if isinstance(event, _WITH_METRICS):
            event = msgspec.structs.replace(event, metrics=from_json(event.metrics))
        yield event


def journal_lost(place: object, newest: str) -> DamagedRunError:
    """Say that there is no event beside checkpoints, of which `newest` is one."""
    return DamagedRunError(
        f"{place} is empty or gone, and {newest} lies beside it: the run's history is lost, its "
        'checkpoints are not; fit() with resume="auto" goes on from the newest intact one'
    )


def events_of(directory: RunDirectory) -> list[Event]:
    """Read what happened in a run, wherever it goes on; nothing is written for that.

    Raises:
        FileNotFoundError: There is no run.
        DamagedRunError: Its journal cannot be read, or is lost beside its checkpoints.
    """
    data, place = directory.read_journal(), directory.home / directory.journal.name
    events = list(events_in(io.BytesIO(data or b""), place))
    if not events and (found := directory.checkpoints.committed()):
        raise journal_lost(place, found[-1].name)
    if data is None:
        raise FileNotFoundError(
            f"{directory.location} holds no Drawbar run: it has no {directory.journal.name}"
        )
    return events


def history(events: Iterable[Event]) -> list[ReportReceived]:
    """Give the reports that count, without gap or duplicate, in order.

    An attempt that starts at report k takes the place of whatever earlier attempts reported from k
    on. The metrics of a checkpoint's validation are added to those of its report, on the lowest
    rank.
    """
    reports: list[ReportReceived] = []
    validated: dict[int, dict[str, Any]] = {}
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
    reports: list[ReportReceived], validated: dict[int, dict[str, Any]]
) -> list[ReportReceived]:
    lowest: dict[int, int] = {}
    for report in reports:
        lowest[report.index] = min(report.rank, lowest.get(report.index, report.rank))
    return [
        msgspec.structs.replace(report, metrics={**report.metrics, **validated[report.index]})
        if report.index in validated and report.rank == lowest[report.index]
        else report
        for report in reports
    ]
