"""What happened in a run, in order: typed events, one JSON line each, from the controller alone.

The journal is the run's memory. `Result` is built from it, a resumed run reads its history from it,
and a line that a crash cut off is dropped when it is opened again. Every event that a decision
depends on is written before the decision is acted on.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from drawbar.train._decide import AttemptEnd
from drawbar.train._files import write_atomically
from drawbar.train._messages import Ranks, WorkerInfo
from drawbar.train._metrics import from_json, to_json
from drawbar.train._validation import ReportedCheckpointStatus


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    time: float


class RunStarted(_Event, frozen=True, kw_only=True, tag="run_started"):
    """`fit()` was called on this directory. `config` holds the reprs of what was configured."""

    run_id: str
    name: str
    config: dict[str, Any]


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


class CheckpointValidated(_Event, frozen=True, kw_only=True, tag="checkpoint_validated"):
    """A checkpoint's validation has ended; what it says is as in `Validation`."""

    index: int
    name: str
    status: ReportedCheckpointStatus
    metrics: dict[str, Any]
    error: str
    seconds: float


class CheckpointDeleted(_Event, frozen=True, kw_only=True, tag="checkpoint_deleted"):
    """Retention let go of a checkpoint."""

    name: str


class AttemptFailed(_Event, frozen=True, kw_only=True, tag="attempt_failed"):
    """The attempt ended early. `failures` are headlines, the root cause first."""

    attempt: int
    kind: AttemptEnd
    failures: list[str]


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
    | RunEnded
)

_decoder = msgspec.json.Decoder(Event)
_WITH_METRICS = (ReportReceived, CheckpointCommitted, CheckpointValidated)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)


class JournalLockedError(RuntimeError):
    """Another process is writing this journal."""


class Journal:
    """The open journal of a run. One process at a time holds it; the lock goes with the process."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close()
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise JournalLockedError(
                f"{path.parent} is the directory of a run that is going on in another process; "
                "give this run another RunConfig.name, or wait for the other one"
            ) from None
        self._drop_torn_line(path)
        self._encoder = msgspec.json.Encoder()

    def _drop_torn_line(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.truncate(path, whole)

    def append(self, event: Event) -> None:
        """Write an event. It survives this process's death when this returns."""
        if isinstance(event, _WITH_METRICS):
            event = msgspec.structs.replace(event, metrics=to_json(event.metrics))
        line = self._encoder.encode(event) + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, "no space left for the journal")
        except OSError as error:
            self._file.truncate(end)  # no torn line stays in the middle
            raise OSError(error.errno, f"{error.strerror}: {self._file.name}") from error

    def close(self) -> None:
        """Release the lock, also where a forked child has inherited the file, and close it."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


def replay(path: Path) -> Iterator[Event]:
    """Read the events of a journal in order. A last line that was cut off is left out.

    Raises:
        ValueError: A line in the middle cannot be read; the message gives its number.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = _decoder.decode(line)
            except _UNREADABLE as error:
                raise ValueError(f"line {number} of {path} cannot be read: {error}") from error
            if isinstance(event, _WITH_METRICS):
                event = msgspec.structs.replace(event, metrics=from_json(event.metrics))
            yield event


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


def salvage(path: Path) -> tuple[list[Event], bool]:
    """Read what can be read of a journal; tells also whether that was all of it.

    If it was not, the unreadable lines are cut out and kept beside it in `journal.damaged`.
    """
    try:
        return list(replay(path)), True
    except ValueError:
        pass
    good, bad = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            _decoder.decode(line)
        except _UNREADABLE:
            bad.append(line)
        else:
            good.append(line)
    with open(path.with_name("journal.damaged"), "ab") as damaged:
        damaged.writelines(bad)
    write_atomically(path, b"".join(good))
    return list(replay(path)), False
