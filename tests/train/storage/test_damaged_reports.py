"""Tests of journals and reports that have lost lines: errors, resume, and repair."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DamagedRunError, Result, ResumeError, RunConfig
from drawbar.train.runs import find_run
from drawbar.train.testing import check_run, run_in_threads
from tests.train.report_segments import read_reports, write_reports
from tests.train.runs import fit
from tests.train.text_checkpoints import content, save


def three_steps() -> None:
    checkpoint = train.get_checkpoint()
    for text in "abc"[0 if checkpoint is None else "abc".index(content(checkpoint)) + 1 :]:
        train.report({"text": "between"})
        save(text)


def test_resume_of_journal_truncated_at_each_line_leaves_no_unrecorded_gap(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(three_steps, tmp_path)
    original = tmp_path / "run"
    lines = (original / "journal.jsonl").read_bytes().splitlines(keepends=True)
    events = [json.loads(line)["event"] for line in lines]
    start = events.index("attempt_started")
    for num_lines in range(1, len(lines) + 1):
        run = tmp_path / f"after_{num_lines}" / "run"
        shutil.copytree(original, run)
        (run / "journal.jsonl").write_bytes(b"".join(lines[:num_lines]))
        is_complete = num_lines > start
        if is_complete:  # the reports are stored in other files, and have not been truncated
            assert content(Result.from_path(run).checkpoint) == "c"
        else:
            message = r"run, reports \d+ to 5 are missing, although checkpoint_000005 was"
            with pytest.raises(DamagedRunError, match=message):
                Result.from_path(run)
            with pytest.raises(DamagedRunError, match=r'fit\(\) with resume="auto"'):
                check_run(run)
            assert "are missing" in dict(find_run(run).verify_checkpoints())["reports"]
            with pytest.raises(ResumeError, match="contains a run with damaged parts"):
                fit(three_steps, run.parent, resume="never")
        capfd.readouterr()
        # A finished run of another function is only resumed on request.
        result = fit(save_once, run.parent, resume="must" if is_complete else "auto")
        assert ("which are missing" in capfd.readouterr().err) == (not is_complete)
        assert content(result.checkpoint) == "d"
        check_run(run)
        assert result.metrics_dataframe["index"].tolist()[-1] == 6
        assert content(Result.from_path(run).checkpoint) == "d"


def save_once() -> None:
    assert content(train.get_checkpoint()) == "c"
    save("d")


@pytest.mark.parametrize("lost", [range(3, 6), range(1, 3), range(1), range(5, 6)])
def test_resume_after_loss_of_reports_keeps_the_others(
    tmp_path: Path, lost: range, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(three_steps, tmp_path)
    run = tmp_path / "run"
    lines = read_reports(run)
    write_reports(run, [line for n, line in enumerate(lines) if n not in lost])
    missing = f"reports {lost[0]} to {lost[-1]}"
    for read in (Result.from_path, check_run, train.attach):
        with pytest.raises(DamagedRunError, match=f"{missing} are missing"):
            read(run)
    assert missing in dict(find_run(run).verify_checkpoints())["reports"]
    result = fit(save_once, tmp_path, resume="must")
    assert f"its {missing} from before checkpoint_000005, which are missing" in (
        capfd.readouterr().err
    )
    remaining = [n for n in range(7) if n not in lost]
    assert result.metrics_dataframe["index"].tolist() == remaining
    assert Result.from_path(run).metrics_dataframe["index"].tolist() == remaining
    recorded = [
        json.loads(line)
        for line in (run / "journal.jsonl").read_bytes().splitlines()
        if b"reports_lost" in line
    ]
    assert [(event["first"], event["until"]) for event in recorded] == [(lost[0], lost[-1] + 1)]
    check_run(run)
    fit(lambda: None, tmp_path, resume="must")
    assert "missing" not in capfd.readouterr().err


def test_resume_after_two_losses_keeps_the_reports_between_them(tmp_path: Path) -> None:
    fit(three_steps, tmp_path)
    run = tmp_path / "run"
    write_reports(run, [line for n, line in enumerate(read_reports(run)) if n not in (1, 4)])
    with pytest.raises(DamagedRunError, match="reports 1 to 1, 4 to 4 are missing"):
        Result.from_path(run)
    result = fit(save_once, tmp_path, resume="must")
    assert result.metrics_dataframe["index"].tolist() == [0, 2, 3, 5, 6]
    check_run(run)


def test_resume_after_loss_of_a_ranks_first_report_records_it(tmp_path: Path) -> None:
    config = RunConfig(name="run", storage_path=tmp_path)
    run_in_threads(report_three_times, num_workers=2, run_config=config)
    run = tmp_path / "run"
    write_reports(run, read_reports(run)[1:])  # report 0 of rank 0
    with pytest.raises(DamagedRunError, match="reports 0 to 0 are missing"):
        Result.from_path(run)
    run_in_threads(report_three_times, num_workers=2, run_config=config)
    check_run(run)


def report_three_times() -> None:
    for step in range(3):
        train.report({"step": step})


def test_damaged_summary_of_last_segment_is_repaired_by_resume(tmp_path: Path) -> None:
    fit(three_steps, tmp_path)
    (segment,) = (tmp_path / "run" / "reports").iterdir()
    data = bytearray(segment.read_bytes())
    data[60] ^= 0xFF
    segment.write_bytes(data)
    with pytest.raises(DamagedRunError, match="Move the file out of the run directory"):
        Result.from_path(tmp_path / "run")
    fit(save_once, tmp_path, resume="must")
    assert Result.from_path(tmp_path / "run").metrics_dataframe["index"].tolist() == [6]
    assert (tmp_path / "run" / "broken" / segment.name).exists()
    check_run(tmp_path / "run")


def test_damaged_line_of_reports_raises_and_is_kept_in_broken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(three_steps, tmp_path)
    run = tmp_path / "run"
    lines = read_reports(run)
    segment = write_reports(run, [*lines[:2], b"{garbage\n", *lines[3:]])
    message = f"Line 3 of {segment} cannot be read"
    with pytest.raises(DamagedRunError, match=message):
        Result.from_path(run)
    assert re.search(message, find_run(run).damage)
    assert find_run(run).metrics == {"text": "c"}
    result = fit(save_once, tmp_path, resume="must")
    assert message in capfd.readouterr().err
    assert result.metrics_dataframe["index"].tolist() == [0, 1, 3, 4, 5, 6]
    assert b"garbage" in (run / "broken" / segment.name).read_bytes()
    check_run(run)


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"x" + data[1:]])
def test_damaged_closed_segment_is_found(
    tmp_path: Path, damage: Callable[[bytes], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    fit(three_steps, tmp_path)
    run = tmp_path / "run"
    (segment,) = (run / "reports").iterdir()
    assert segment.name == "0-0-6.jsonl.gz"
    segment.write_bytes(damage(segment.read_bytes()))
    with pytest.raises(DamagedRunError, match=f"{segment} cannot be read"):
        _ = Result.from_path(run).metrics_dataframe
    assert "cannot be read" in dict(find_run(run).verify_checkpoints())[f"reports/{segment.name}"]
