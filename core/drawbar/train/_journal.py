"""What happened in a run, in order: typed events, one JSON line each, from the controller alone.

The journal is the run's memory. `Result` is built from it, a resumed run reads its history from it,
and a line that a crash cut off is dropped when it is opened again. Every event that a decision
depends on is written before the decision is acted on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from drawbar.train._checks import check_stays_inside
from drawbar.train._decide import AttemptEnd
from drawbar.train._errors import DamagedRunError, JournalLockedError
from drawbar.train._files import is_open_at, write_atomically
from drawbar.train._manifest import UNREADABLE, Manifest
from drawbar.train._messages import Ranks, WorkerInfo
from drawbar.train._metrics import from_json, to_json
from drawbar.train._retry import explained, in_bytes
from drawbar.train._validation import ReportedCheckpointStatus, Validation

PROBE_S = 1.0  # `is_held` takes the lock for a moment, and flock() knows no timeout
RETRY_S = 0.01


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


class AttemptFailed(_Event, frozen=True, kw_only=True, tag="attempt_failed"):
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
    | AttemptFailed
    | RanksQuiet
    | RunEnded
)

_decoder = msgspec.json.Decoder(Event)
_WITH_METRICS = (ReportReceived, CheckpointCommitted, CheckpointValidated)


class Journal:
    """The open journal of a run. One process at a time holds it; the lock goes with the process.

    Args:
        path: Its file, which is made if it is not there.

    Raises:
        JournalLockedError: Another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_locked(path)
        self._drop_torn_line()
        self._encoder = msgspec.json.Encoder()

    def _drop_torn_line(self) -> None:
        data = self._path.read_bytes()
        whole = whole_lines(data)
        if whole != data:
            os.truncate(self._path, len(whole))

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
        self._replace(b"".join(good))
        return list(replay(self._path)), False

    def catch_up(self, other: bytes | None) -> None:
        """Take over the journal of another place, unless this one only goes on from that.

        None: there is none in that place, so this one becomes empty. Its last line may be torn.
        """
        there = None if other is None else whole_lines(other)
        if there is None or not self._path.read_bytes().startswith(there):
            self._replace(there or b"")

    def _replace(self, data: bytes) -> None:
        write_atomically(self._path, data)
        replaced, self._file = self._file, _open_locked(self._path)
        replaced.close()

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
        line = self._encoder.encode(event) + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(end)  # no torn line stays in the middle
            raise explained(error, f"writing {in_bytes(len(line))} to {self._file.name}") from error

    def close(self) -> None:
        """Release the lock, also where a forked child has inherited the file, and close it."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def _told(event: Event) -> str:
    match event:
        case ReportReceived():
            return f"report {event.index} of rank {event.rank}"
        case AttemptFailed():
            return f"the failure of attempt {event.attempt}, {'; '.join(event.failures)}"
        case _:
            return type(event).__name__


def _open_locked(path: Path) -> IO[bytes]:
    """Open the journal and take its lock; if it was replaced meanwhile, take the new one's.

    Its folder may be gone: who ends a run on a remote storage removes its work folder.
    """
    deadline = time.monotonic() + PROBE_S
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by Journal.close()
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            if time.monotonic() < deadline:
                time.sleep(RETRY_S)
                continue
            raise JournalLockedError(
                f"{path.parent} is the directory of a run that is going on in another process; "
                "give this run another RunConfig.name, or wait for the other one"
            ) from None
        if is_open_at(path, file.fileno()):
            return file
        file.close()


def whole_lines(data: bytes) -> bytes:
    """Give what was read of a journal, perhaps while it was written, without a torn last line."""
    return data[: data.rfind(b"\n") + 1]


def _is_readable(line: bytes) -> bool:
    try:
        _decoder.decode(line)
    except UNREADABLE:
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether some process, on a node that shares this file, is writing the journal."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


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


def committed_names(journal: bytes) -> set[str]:
    """Give the names of all checkpoints that a journal knows of, as far as it can be read."""
    names = set()
    with contextlib.suppress(DamagedRunError):
        for event in events_in(journal.splitlines(keepends=True), "the journal"):
            if isinstance(event, CheckpointCommitted):
                names.add(event.name)
    return names


def journal_lost(place: object, newest: str) -> DamagedRunError:
    """Say that there is no event beside checkpoints, of which `newest` is one."""
    return DamagedRunError(
        f"{place} is empty or gone, and {newest} lies beside it: the run's history is lost, its "
        'checkpoints are not; fit() with resume="auto" goes on from the newest intact one'
    )


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
