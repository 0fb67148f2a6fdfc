"""Events of a run: the journal, the stream to watchers, and the buffer for other processes."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar._modes.event_buffer import MAX_EVENTS, EventBuffer, EventPosition
from drawbar._process.output_lines import OutputLine
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.serialization import serialize
from drawbar._records.event_stream import EventStream
from drawbar._records.events import (
    AttemptEndCause,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    FirstReportReceived,
    JournaledEvent,
    PreemptionAnnounced,
    ProgramStarted,
    RanksRecovered,
    RunEnded,
    RunStarted,
    UserFunctionStarted,
    WorkersStarted,
)
from drawbar._records.journal import Journal, replay
from drawbar._records.live_events import (
    ControllerFailed,
    Event,
    LinePrinted,
    Notice,
    ValidationsPending,
    WorkersFailed,
)
from drawbar._records.report_log import ReportLog
from drawbar._records.timeline import RunState
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import (
    DamagedRunError,
    PreemptionInfo,
    ReportedCheckpointStatus,
    RunInProgressError,
    WorkerFailure,
)
from tests.train.event_factories import attempt_started, committed, reported, workers_started

HERE = WorkerInfo(node_id="n", node_ip="127.0.0.1", hostname="h", pid=1, gpu_ids=("0", "1"))
ALONE = Ranks(
    world_rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1
)

ONE_OF_EACH: list[JournaledEvent] = [
    RunStarted(time=0.5, run_id="ab", name="run", config={"scaling": {"num_workers": 2}}),
    AttemptStarted(time=1.0, attempt=0, first_report_index=0, resume_checkpoint=None),
    WorkersStarted(time=1.5, attempt=0, workers=[(HERE, ALONE)]),
    UserFunctionStarted(time=2.0, attempt=0, rank=0),
    ProgramStarted(time=2.0, attempt=0, rank=0, pid=2),
    FirstReportReceived(time=3.0, attempt=0, rank=0),
    CheckpointCommitted(
        time=4.0,
        attempt=0,
        index=0,
        name="c",
        nbytes=9,
        seconds=0.1,
        metrics={"a": [-math.inf, "ü\n"]},
    ),
    CheckpointValidated(
        time=4.5,
        index=0,
        name="c",
        status=ReportedCheckpointStatus.VALIDATED,
        metrics={"b": math.inf},
        error="",
        seconds=0.5,
    ),
    CheckpointDeleted(time=5.0, name="c"),
    AttemptEnded(time=6.0, attempt=0, cause="worker", failure_headlines=["rank 0: ValueError"]),
    RunEnded(time=7.0, outcome="failed", error="rank 0: ValueError"),
]


def write(path: Path, events: list[JournaledEvent]) -> None:
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


def recover(path: Path) -> tuple[list[JournaledEvent], bool]:
    journal = Journal(path)
    try:
        return journal.recover()
    finally:
        journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "journal.jsonl", ONE_OF_EACH)
    return tmp_path / "journal.jsonl"


def test_journal_replays_every_event_type(path: Path) -> None:
    assert list(replay(path)) == ONE_OF_EACH


def test_append_writes_event_before_it_returns(path: Path) -> None:
    journal = Journal(path)
    journal.append(RunEnded(time=8.0, outcome="finished"))
    assert list(replay(path))[-1] == RunEnded(time=8.0, outcome="finished")
    journal.close()


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_journal_with_torn_last_line_drops_it(path: Path, cut: int) -> None:
    os.truncate(path, path.stat().st_size - cut)
    assert list(replay(path)) == ONE_OF_EACH[:-1]
    assert recover(path) == (ONE_OF_EACH[:-1], True)
    write(path, [ONE_OF_EACH[0]])
    assert list(replay(path)) == [*ONE_OF_EACH[:-1], ONE_OF_EACH[0]]


@pytest.mark.parametrize("data", [b"", b"{", b'{"event":"run_ended","time":1.0,"outcome":"x"}'])
def test_journal_without_complete_line_is_empty(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(data)
    assert list(replay(path)) == []
    assert recover(path) == ([], True)


DAMAGES = [
    b"{garbage}\n",
    b"\n",
    b"\xff\xfe\x00\n",
    b"null\n",
    b"one line\rwith a carriage return\n",
    b'{"event":"run_ended"}\n',
    b'{"event":"run_ended","time":1.0,"outcome":"\xff"}\n',
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_replay_of_damaged_line_raises_with_line_number(path: Path, damage: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))
    with pytest.raises(DamagedRunError, match=f"Line 4 of {path} cannot be read"):
        list(replay(path))


@pytest.mark.parametrize("damage", DAMAGES)
def test_recover_keeps_all_but_damaged_line(path: Path, damage: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], damage, *lines[3:]]))
    assert recover(path) == (ONE_OF_EACH, False)
    assert path.with_name("journal.damaged").read_bytes() == damage
    assert recover(path) == (ONE_OF_EACH, True)


def test_replay_ignores_new_event_types_and_new_fields(path: Path) -> None:
    first, *rest = path.read_bytes().splitlines(keepends=True)
    added = b'{"event":"new","time":[]}\n'
    lines = [first[:-2] + b',"added":{"x":1}}\n', added, *rest, added]
    path.write_bytes(b"".join(lines))
    assert list(replay(path)) == ONE_OF_EACH
    assert recover(path) == (ONE_OF_EACH, True)
    assert path.read_bytes() == b"".join(lines)


def test_recover_handles_damaged_and_torn_lines(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"oops\n", *lines[:-1], lines[-1][:-5]]))
    assert recover(path) == (ONE_OF_EACH[:-1], False)


def test_recover_twice_keeps_both_damaged_lines(path: Path) -> None:
    for damage in (b"first\n", b"second\n"):
        path.write_bytes(damage + path.read_bytes())
        recover(path)
    damaged = b"".join(file.read_bytes() for file in path.parent.glob("journal.damaged*"))
    assert sorted(damaged.split()) == [b"first", b"second"]


def test_journal_opened_twice_raises_run_in_progress_error(path: Path) -> None:
    journal = Journal(path)
    with pytest.raises(RunInProgressError, match=f"{path.parent} is in use by a run in this"):
        Journal(path)
    journal.close()
    Journal(path).close()


def test_recovered_journal_is_still_locked(path: Path) -> None:
    path.write_bytes(b"garbage\n" + path.read_bytes())
    journal = Journal(path)
    assert journal.recover() == (ONE_OF_EACH, False)
    with pytest.raises(RunInProgressError):
        Journal(path)
    journal.append(ONE_OF_EACH[-1])
    journal.close()
    assert list(replay(path)) == [*ONE_OF_EACH, ONE_OF_EACH[-1]]


def test_journal_lock_is_released_when_process_dies(path: Path) -> None:
    code = (
        "import os, pathlib, sys; from drawbar._records.journal import *;"
        "journal = Journal(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    Journal(path).close()


def test_journal_lock_is_not_kept_by_forked_child(path: Path) -> None:
    """Close the journal while a forked child, such as a data loader process, outlives the run."""
    code = """
import os, pathlib, sys
from drawbar._records.journal import Journal
path = pathlib.Path(sys.argv[1])
journal = Journal(path)
child_reads, parent_writes = os.pipe()
if os.fork() == 0:
    os.close(parent_writes)
    os.read(child_reads, 1)  # until the parent has ended
    os._exit(0)
journal.close()
Journal(path).close()
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self.journaled: list[int] = []
        self.is_closed = False

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.journaled.append(len(list(replay(self.path))))

    def close(self) -> None:
        self.is_closed = True


class Broken(Recorder):
    def on_event(self, event: Event) -> None:
        raise ValueError("cannot handle events")

    def close(self) -> None:
        raise ValueError("cannot close")


@pytest.fixture
def new_path(tmp_path: Path) -> Path:
    """Path of a journal without events."""
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(new_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(new_path)) as journal:
        yield journal


@pytest.fixture
def reports(new_path: Path, journal: Journal) -> Iterator[ReportLog]:
    with contextlib.closing(ReportLog(RunDirectory(new_path.parent), journal)) as reports:
        yield reports


def test_emit_journals_event_before_watchers_see_it(
    new_path: Path, journal: Journal, reports: ReportLog
) -> None:
    watcher = Recorder(new_path)
    stream = EventStream(journal, reports, RunState())
    stream.add(watcher)
    events: list[Event] = [attempt_started(0), Notice("wait"), workers_started(2)]
    for event in events:
        stream.emit(event)
    assert watcher.events == events
    assert watcher.journaled == [1, 1, 2]
    assert list(replay(new_path)) == [events[0], events[2]]


def test_emit_updates_run_state(journal: Journal, reports: ReportLog) -> None:
    stream = EventStream(journal, reports, RunState())
    stream.emit(workers_started(2))
    stream.emit(reported(1, 0, {"loss": 1}))
    before = stream.copy_state()
    stream.emit(ControllerFailed())
    assert (before.status, before.last_metrics) == ("running", {1: {"loss": 1}})
    assert stream.copy_state().status == "failed"


def test_emit_with_failing_watcher_reaches_other_watchers(
    new_path: Path, journal: Journal, reports: ReportLog, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Recorder(new_path)
    stream = EventStream(journal, reports, RunState())
    stream.add(Broken(new_path))
    stream.add(watcher)
    stream.emit(RunEnded(time=0, outcome="finished"))
    assert watcher.events == [RunEnded(time=0, outcome="finished")]
    assert "Broken failed to handle the event RunEnded" in caplog.text
    stream.add(Broken(new_path))
    stream.close()
    assert watcher.is_closed
    assert caplog.text.count("Broken failed to close") == 2


def test_emit_with_failed_journal_write_reaches_no_watcher(
    new_path: Path, journal: Journal, reports: ReportLog
) -> None:
    watcher = Recorder(new_path)
    stream = EventStream(journal, reports, RunState())
    stream.add(watcher)
    new_path.unlink()
    with pytest.raises(FileNotFoundError):
        stream.emit(RunEnded(time=0, outcome="finished"))
    assert watcher.events == []
    assert stream.copy_state().status == "starting"


START = EventPosition(0, 0)
FAILURE = WorkerFailure(rank=1, kind="died", type_name="WorkerDied", message="killed by SIGKILL")


def test_get_events_after_returns_events_in_order_once() -> None:
    event_buffer = EventBuffer()
    event_buffer.on_event(attempt_started(0))
    event_buffer.on_event(LinePrinted(0, OutputLine(text="a line")))
    events, position = event_buffer.get_events_after(START, 0)
    assert events == [attempt_started(0), LinePrinted(0, OutputLine(text="a line"))]
    assert event_buffer.get_events_after(position, 0) == ([], position)
    event_buffer.on_event(Notice("more"))
    assert event_buffer.get_events_after(position, 0)[0] == [Notice("more")]


@pytest.mark.parametrize(
    "event",
    [
        attempt_started(1, "/runs/mnist/checkpoint_000001"),
        workers_started(2),
        committed("checkpoint_000003"),
        CheckpointValidated(
            time=0,
            index=3,
            name="checkpoint_000003",
            status=ReportedCheckpointStatus.VALIDATED,
            metrics={"loss": 0.5},
            error="",
            seconds=1.5,
        ),
        Notice("waiting for CPU=4"),
        LinePrinted(1, OutputLine(text="bad batch", stream="stderr")),
        WorkersFailed("worker", [FAILURE], is_final=False),
        PreemptionAnnounced(time=0, attempt=0, info=PreemptionInfo(None, {"n": [0]})),
        RanksRecovered.of(
            0, [FAILURE], Counter[AttemptEndCause]({"worker": 1}), 0.4, "max_failures: 2 of 3 left"
        ),
        ValidationsPending("checkpoint_000003"),
        ControllerFailed(),
        RunEnded(time=0, outcome="finished"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_get_events_after_returns_serializable_console_events(event: Event) -> None:
    event_buffer = EventBuffer()
    event_buffer.on_event(event)
    assert serialize(event_buffer.get_events_after(START, 0)[0]).deserialize() == [event]


def test_get_events_after_returns_only_latest_report_of_rank_0() -> None:
    event_buffer = EventBuffer()
    for index in range(1000):
        event_buffer.on_event(reported(0, index, {"loss": index}))
        event_buffer.on_event(reported(1, index, {}))
    events, position = event_buffer.get_events_after(START, 0)
    assert events == [reported(0, 999, {"loss": 999})]
    assert event_buffer.get_events_after(position, 0)[0] == []


def test_get_events_after_without_position_returns_current_status() -> None:
    event_buffer = EventBuffer()
    event_buffer.on_event(attempt_started(0))
    event_buffer.on_event(workers_started(2))
    event_buffer.on_event(Notice("received by no client"))
    event_buffer.on_event(reported(0, 7, {"loss": 1}))
    events, position = event_buffer.get_events_after(None, 0)
    assert events == [workers_started(2), reported(0, 7, {"loss": 1})]
    assert event_buffer.get_events_after(position, 0)[0] == []


def test_get_events_after_overflow_counts_lost_events() -> None:
    event_buffer = EventBuffer()
    for number in range(MAX_EVENTS + 5):
        event_buffer.on_event(Notice(str(number)))
    events, _ = event_buffer.get_events_after(START, 0)
    assert events[0] == Notice("5 lines are not shown because they arrived too fast")
    assert events[1] == Notice("5")
    assert len(events) == MAX_EVENTS + 1


def test_get_events_after_waits_for_next_event_or_wake_clients() -> None:
    event_buffer = EventBuffer()
    for act in (lambda: event_buffer.on_event(Notice("now")), event_buffer.wake_clients):
        threading.Timer(0.05, act).start()
        event_buffer.get_events_after(
            event_buffer.get_events_after(None, 0)[1], timeout=60
        )  # without a wake-up, the test times out
