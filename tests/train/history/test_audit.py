"""Tests of drawbar.train.testing.check_run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import CheckpointConfig, DamagedRunError, FailureConfig, RunConfig
from drawbar.train.testing import check_run, run_in_threads
from tests.train.report_segments import Line, edit_reports


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run of two ranks that failed once, after the second of its three checkpoints."""

    def function() -> None:
        context, checkpoint = train.get_context(), train.get_checkpoint()
        for step in range(2 if checkpoint else 0, 3):
            with train.checkpoint_dir() as path:
                (path / f"rank_{context.get_world_rank()}").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
            if step == 1:
                train.report({"extra": True})
                raise ValueError("once")

    config = RunConfig(
        name="run",
        storage_path=tmp_path,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    run_in_threads(function, run_config=config)
    return tmp_path / "run"


def test_check_run_accepts_restarted_run(run: Path) -> None:
    check_run(run)


def edit(run: Path, change: Callable[[list[Line]], list[Line]]) -> None:
    journal = run / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in change(lines)))


def repeat_event(count: int, event: str, **fields: Any) -> Callable[[list[Line]], list[Line]]:
    """Return an edit that makes the matching events occur `count` times."""

    def matches(line: Line) -> bool:
        return all(line.get(key) == value for key, value in {"event": event, **fields}.items())

    return lambda lines: [
        copy for line in lines for copy in [line] * (count if matches(line) else 1)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (repeat_event(0, "attempt_started", attempt=1), "attempt 1 has reports, but was not start"),
        (repeat_event(2, "attempt_started", attempt=1), "attempt 1 follows 1"),
        (repeat_event(2, "checkpoint", index=1), "checkpoint 1 follows 1"),
        (
            repeat_event(0, "checkpoint_deleted"),
            "a committed checkpoint is lost: Checkpoint .* does not exist",
        ),
    ],
)
def test_check_run_rejects_invalid_journal(
    run: Path, change: Callable[[list[Line]], list[Line]], message: str
) -> None:
    edit(run, change)
    with pytest.raises(AssertionError, match=message):
        check_run(run)


def repeat_report(count: int, rank: int, index: int) -> Callable[[list[Line]], list[Line]]:
    """Return an edit that makes a report occur `count` times."""
    return lambda lines: [
        copy
        for line in lines
        for copy in [line] * (count if (line["rank"], line["index"]) == (rank, index) else 1)
    ]


@pytest.mark.parametrize(("rank", "index"), [(0, 0), (1, 1), (0, 2)])
def test_check_run_rejects_missing_report(run: Path, rank: int, index: int) -> None:
    edit_reports(run, 0, repeat_report(0, rank, index))
    missing = f"reports {index} to {index} are missing"
    # The report after the last checkpoint was replaced by the restart.
    if index < 2:
        with pytest.raises(DamagedRunError, match=missing):
            check_run(run)
    else:
        check_run(run)
    edit_reports(run, 1, repeat_report(0, 1, 2))
    with pytest.raises(DamagedRunError, match=r"\d to 2 are missing"):
        check_run(run)


def test_check_run_rejects_repeated_report(run: Path) -> None:
    edit_reports(run, 0, repeat_report(2, rank=0, index=1))
    with pytest.raises(AssertionError, match="rank 0 in attempt 0 have a gap or a duplicate"):
        check_run(run)


def test_check_run_accepts_ranks_that_leave_and_rejoin(tmp_path: Path) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / f"rank_{train.get_context().get_world_rank()}").touch()
            train.report({}, checkpoint=path)

    for workers in (1, 3, 2, 3):
        config = RunConfig(name="run", storage_path=tmp_path)
        run_in_threads(function, num_workers=workers, run_config=config)
        check_run(tmp_path / "run")
    edit_reports(tmp_path / "run", 1, repeat_report(0, rank=2, index=1))
    with pytest.raises(DamagedRunError, match="reports 1 to 1 are missing"):
        check_run(tmp_path / "run")


def test_check_run_rejects_changed_checkpoint(run: Path) -> None:
    (run / "checkpoint_000002" / "rank_1").write_text("9")
    with pytest.raises(AssertionError, match=r"a committed checkpoint is lost: .* was changed"):
        check_run(run)
