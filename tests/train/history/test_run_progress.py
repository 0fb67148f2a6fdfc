"""Progress of a run: percent, rate, ETA, and the journal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import runs
from drawbar.train._controller.attempt_events import ProgressRecorder
from drawbar.train._history.events import ProgressRecorded
from drawbar.train._history.live_events import Event, ProgressReceived
from drawbar.train._history.run_progress import RateWindow
from drawbar.train._history.timeline import RunState
from drawbar.train._protocol.messages import Message, ProgressSet
from drawbar.train._worker.instrumentation import check_unit
from drawbar.train._worker.progress_sender import ProgressSender
from tests.train.event_factories import attempt_started
from tests.train.runs import fit


def test_progress_sender_sends_first_and_last_of_many_updates() -> None:
    messages: list[Message] = []
    sender = ProgressSender(0, messages.append)
    for step in range(100_001):
        sender.set(step, 100_000, "steps")
    sent = [message.done for message in messages if isinstance(message, ProgressSet)]
    assert (sent[0], sent[-1]) == (0, 100_000)
    assert len(sent) < 100
    assert sent == sorted(set(sent))


def test_progress_sender_without_total_sends_last_update_at_flush() -> None:
    messages: list[Message] = []
    sender = ProgressSender(0, messages.append)
    for step in range(10):
        sender.set(step, None, "steps")
    sender.flush()
    sender.flush()
    assert [message.done for message in messages if isinstance(message, ProgressSet)][-1] == 9


def test_progress_sender_of_other_rank_sends_nothing() -> None:
    messages: list[Message] = []
    ProgressSender(1, messages.append).set(1, 1, "steps")
    assert not messages


def test_run_progress_percent_reaches_100_only_at_the_end() -> None:
    almost = runs.RunProgress(done=10**9 - 1, total=10**9)
    assert str(almost) == "99 %, 999,999,999/1,000,000,000 steps"
    assert almost.percent is not None
    assert almost.percent < 100
    assert runs.RunProgress(done=7, total=5).percent == 100
    assert runs.RunProgress(done=7, total=5).eta_seconds == 0
    assert runs.RunProgress(done=7).percent is None


def test_run_progress_eta_is_remaining_steps_by_rate() -> None:
    progress = runs.RunProgress(done=400, total=1000, rate=12.5)
    assert progress.eta_seconds == 48
    assert str(progress) == "40 %, 400/1,000 steps, 12.5 steps/s, ETA 00:48"
    assert runs.RunProgress(done=400, total=1000).eta_seconds is None


def test_rate_window_uses_recent_updates_and_restarts_if_counter_decreases() -> None:
    window = RateWindow()
    for second in range(100):
        window.add(second, second if second < 50 else 50 + 10 * (second - 50))
    assert window.get_rate() == 10
    window.add(100, 3)
    assert window.get_rate() is None
    window.add(102, 7)
    assert window.get_rate() == 2


def test_progress_recorder_journals_first_progress_and_the_last_once() -> None:
    emitted: list[Event] = []
    recorder = ProgressRecorder(0, emitted.append)
    for second in range(20):
        recorder.on_progress(ProgressSet(done=second, total=20, unit="steps", time=second))
    recorder.record()
    recorder.record()
    recorded = [event for event in emitted if isinstance(event, ProgressRecorded)]
    assert [event.progress.done for event in recorded] == [0, 19]
    assert recorded[-1].progress.eta_seconds == 1
    assert len([event for event in emitted if isinstance(event, ProgressReceived)]) == 20


def test_run_state_after_restart_has_progress_without_eta() -> None:
    state = RunState()
    state.apply(ProgressReceived(runs.RunProgress(done=5, total=10, rate=1.0)))
    state.apply(attempt_started(1))
    assert state.progress == runs.RunProgress(done=5, total=10)


@pytest.mark.parametrize("unit", ["", "  ", "\ud800", "a\nb", "\x1b[31m", "x" * 41])
def test_set_progress_with_unprintable_unit_raises(unit: str) -> None:
    with pytest.raises(ValueError, match="unit must have 1 to 40 printable characters") as raised:
        check_unit(unit)
    assert str(raised.value).isprintable()


def test_set_progress_in_finished_and_failed_runs_is_stored(tmp_path: Path) -> None:
    def function() -> None:
        for done, total, error in (
            (-1, None, ValueError),
            (float("nan"), None, ValueError),
            (True, None, TypeError),
            (1, 0, ValueError),
        ):
            with pytest.raises(error):
                train.set_progress(done, total)
        for step in range(1, 5):
            train.set_progress(step, 8, unit="epochs")
        train.report({"loss": 1.0})

    def fail() -> None:
        function()
        raise ValueError("broken")

    fit(function, tmp_path)
    with pytest.raises(train.WorkerGroupError):
        fit(fail, tmp_path, name="failed")
    for name in ("run", "failed"):
        progress = runs.find_run(tmp_path / name).progress
        assert progress is not None
        assert (progress.done, progress.total, progress.unit) == (4, 8, "epochs")
        assert progress.to_dict()["percent"] == 50


def test_progress_of_killed_driver_is_in_journal(tmp_path: Path) -> None:
    script = f"""
import os, signal
from drawbar import train

def function():
    train.set_progress(3, 10)
    with train.checkpoint_dir() as path:
        (path / "model").write_text("x")
        train.set_progress(4, 10)
        train.report({{}}, checkpoint=path)
    os.kill(os.getpid(), signal.SIGKILL)

train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path={str(tmp_path)!r}),
).fit()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    progress = runs.find_run(tmp_path / "run").progress
    assert progress is not None
    assert progress.done == 4


def test_progress_of_ended_run_has_no_rate(tmp_path: Path) -> None:
    def function() -> None:
        for done in range(3):
            train.set_progress(done, 10)
            train.report({})

    fit(function, tmp_path)
    progress = runs.find_run(tmp_path / "run").progress
    assert progress is not None
    assert (progress.done, progress.rate, progress.eta_seconds) == (2, None, None)


def test_progress_too_large_count_raises(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="finite, found inf"):
        fit(lambda: train.set_progress(10**5000), tmp_path)
