"""Tests of drawbar.train._history.event_stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar.train._history.event_stream import EventStream
from drawbar.train._history.events import RunEnded
from drawbar.train._history.journal import Journal, replay
from drawbar.train._history.live_events import ControllerFailed, Event, Notice
from drawbar.train._history.report_log import ReportLog
from drawbar.train._history.timeline import RunState
from drawbar.train._storage.run_directory import RunDirectory
from tests.train.event_factories import attempt_started, reported, workers_started


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self.journaled: list[int] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.journaled.append(len(list(replay(self.path))))

    def close(self) -> None:
        pass


class Broken(Recorder):
    def on_event(self, event: Event) -> None:
        raise ValueError("cannot handle events")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(path)) as journal:
        yield journal


@pytest.fixture
def reports(path: Path, journal: Journal) -> Iterator[ReportLog]:
    with contextlib.closing(ReportLog(RunDirectory(path.parent), journal)) as reports:
        yield reports


def test_emit_journals_event_before_watchers_see_it(
    path: Path, journal: Journal, reports: ReportLog
) -> None:
    watcher = Recorder(path)
    stream = EventStream(journal, reports, RunState(), [watcher])
    events: list[Event] = [attempt_started(0), Notice("wait"), workers_started(2)]
    for event in events:
        stream.emit(event)
    assert watcher.events == events
    assert watcher.journaled == [1, 1, 2]
    assert list(replay(path)) == [events[0], events[2]]


def test_emit_updates_run_state(journal: Journal, reports: ReportLog) -> None:
    stream = EventStream(journal, reports, RunState(), [])
    stream.emit(workers_started(2))
    stream.emit(reported(1, 0, {"loss": 1}))
    before = stream.copy_state()
    stream.emit(ControllerFailed())
    assert (before.status, before.last_metrics) == ("running", {1: {"loss": 1}})
    assert stream.copy_state().status == "failed"


def test_emit_with_failing_watcher_reaches_other_watchers(
    path: Path, journal: Journal, reports: ReportLog, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Recorder(path)
    stream = EventStream(journal, reports, RunState(), [Broken(path), watcher])
    stream.emit(RunEnded(time=0, outcome="finished"))
    assert watcher.events == [RunEnded(time=0, outcome="finished")]
    assert "Broken failed to handle the event RunEnded" in caplog.text


def test_emit_with_failed_journal_write_reaches_no_watcher(
    path: Path, journal: Journal, reports: ReportLog
) -> None:
    watcher = Recorder(path)
    stream = EventStream(journal, reports, RunState(), [watcher])
    path.unlink()
    with pytest.raises(FileNotFoundError):
        stream.emit(RunEnded(time=0, outcome="finished"))
    assert watcher.events == []
    assert stream.copy_state().status == "starting"
