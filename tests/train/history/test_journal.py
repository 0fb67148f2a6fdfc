"""Tests of drawbar.train._history.journal."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar.train import DamagedRunError, RunInProgressError
from drawbar.train._history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    FirstReportReceived,
    JournaledEvent,
    RunEnded,
    RunStarted,
    UserFunctionStarted,
    WorkersStarted,
)
from drawbar.train._history.journal import Journal, replay
from drawbar.train._protocol.assignment import Ranks, WorkerInfo
from drawbar.train._storage.manifest import ReportedCheckpointStatus

HERE = WorkerInfo(node_id="n", node_ip="127.0.0.1", hostname="h", pid=1, gpu_ids=("0", "1"))
ALONE = Ranks(
    world_rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1
)

ONE_OF_EACH: list[JournaledEvent] = [
    RunStarted(time=0.5, run_id="ab", name="run", config={"scaling": {"num_workers": 2}}),
    AttemptStarted(time=1.0, attempt=0, first_report_index=0, resume_checkpoint=None),
    WorkersStarted(time=1.5, attempt=0, workers=[(HERE, ALONE)]),
    UserFunctionStarted(time=2.0, attempt=0, rank=0),
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
        "import os, pathlib, sys; from drawbar.train._history.journal import *;"
        "journal = Journal(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    Journal(path).close()


def test_journal_lock_is_not_kept_by_forked_child(path: Path) -> None:
    """Close the journal while a forked child, such as a data loader process, outlives the run."""
    code = """
import os, pathlib, sys
from drawbar.train._history.journal import Journal
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
