"""Tests of drawbar.train.Result for finished, failed, interrupted, and resumed runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawbar import train
from drawbar.train import (
    CheckpointConfig,
    DamagedRunError,
    FailureConfig,
    Result,
    TrainingFailedError,
    WorkerGroupError,
    runs,
)
from tests.train.runs import fit

if TYPE_CHECKING:
    from tests.train.conftest import Drivers


def save(**metrics: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(str(metrics))
        train.report(metrics, checkpoint=path)


def save_three() -> str:
    for loss in (3.0, 1.0, 2.0):
        train.report({"warmup": True})
        save(loss=loss, eval={"acc": 10 - loss})
    train.report({"last": 1})
    return "done"


def names(result: Result) -> list[str]:
    return [Path(checkpoint).name for checkpoint, _ in result.best_checkpoints]


def test_result_of_finished_run(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    assert result.path == str(tmp_path / "run")
    assert result.metrics == {"last": 1}
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(tmp_path / "run" / "checkpoint_000005")
    assert (result.error, result.return_value, result.return_values) == (None, "done", ["done"])
    assert str(result.timeline).endswith("finished")


def test_result_of_run_without_reports_is_empty(tmp_path: Path) -> None:
    result = fit(lambda: None, tmp_path)
    assert (result.metrics, result.checkpoint, result.best_checkpoints) == (None, None, [])
    assert result.get_best_checkpoint("loss", "min") is None
    assert list(result.metrics_dataframe.columns) == ["rank", "index", "attempt", "time"]
    assert len(result.metrics_dataframe) == 0


@pytest.mark.parametrize(
    ("config", "worst_to_best"),
    [
        ({}, [1, 3, 5]),
        ({"num_to_keep": 2}, [3, 5]),
        ({"checkpoint_score_attribute": "loss"}, [3, 5, 1]),
        ({"checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"}, [1, 5, 3]),
        ({"checkpoint_score_attribute": "eval/acc", "num_to_keep": 1}, [5, 3]),  # and the newest
    ],
)
def test_best_checkpoints_are_sorted_by_score(
    tmp_path: Path, config: dict[str, Any], worst_to_best: list[int]
) -> None:
    result = fit(save_three, tmp_path, checkpoint_config=CheckpointConfig(**config))
    assert names(result) == [f"checkpoint_{index:06d}" for index in worst_to_best]
    assert names(Result.from_path(result.path)) == names(result)
    on_disk = sorted(path.name for path in Path(result.path).glob("checkpoint_*"))
    assert on_disk == sorted(names(result))


@pytest.mark.parametrize(
    ("metric", "mode", "index"),
    [("loss", "min", 3), ("loss", "max", 1), ("eval/acc", "max", 3), ("eval/acc", "min", 1)],
)
def test_get_best_checkpoint_by_any_metric(
    tmp_path: Path, metric: str, mode: Any, index: int
) -> None:
    best = fit(save_three, tmp_path).get_best_checkpoint(metric, mode)
    assert best is not None
    assert Path(best).name == f"checkpoint_{index:06d}"


def test_get_best_checkpoint_skips_non_numeric_metrics(tmp_path: Path) -> None:
    def function() -> None:
        for value in (2.0, math.nan, None, "low", 3.0):
            save(loss=value)
        save(other=0.0)

    best = fit(function, tmp_path).get_best_checkpoint("loss", "min")
    assert best is not None
    assert Path(best).name == "checkpoint_000000"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_get_best_checkpoint_prefers_newest_of_equal_ones(tmp_path: Path, mode: Any) -> None:
    def function() -> None:
        for _ in range(3):
            save(loss=1.0)

    result = fit(function, tmp_path)
    best = result.get_best_checkpoint("loss", mode)
    assert best == result.best_checkpoints[-1][0]


def test_get_best_checkpoint_by_other_metric_prefers_newest_of_equal_ones(tmp_path: Path) -> None:
    def function() -> None:
        save(accuracy=0.9, loss=1.0)
        save(accuracy=0.8, loss=1.0)

    ranking = CheckpointConfig(checkpoint_score_attribute="accuracy")
    best = fit(function, tmp_path, checkpoint_config=ranking).get_best_checkpoint("loss", "min")
    assert best is not None
    assert Path(best).name == "checkpoint_000001"


def test_get_best_checkpoint_with_unknown_metric_lists_metrics(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    message = "has the metric 'los'. There are 'eval/acc', 'loss'; did you mean 'loss'"
    with pytest.raises(KeyError, match=re.escape(message)):
        result.get_best_checkpoint("los", "min")


def test_retention_with_unknown_score_warns_and_keeps_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/ac")
    result = fit(save_three, tmp_path, checkpoint_config=config)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "eval/ac'" in line]
    assert len(warnings) == 1
    assert "checkpoint_000001 does not have this metric" in warnings[0]
    assert "There are 'eval/acc', 'loss'; did you mean 'eval/acc'? No checkpoint" in warnings[0]
    assert len(result.best_checkpoints) == 3
    caplog.clear()
    assert len(Result.from_path(result.path).best_checkpoints) == 3
    assert "did you mean 'eval/acc'? best_checkpoints are sorted by age" in caplog.text


def test_get_best_checkpoint_with_invalid_mode_raises(tmp_path: Path) -> None:
    lowest: Any = "lowest"
    with pytest.raises(ValueError, match=r"mode='lowest' must be \"min\" or \"max\""):
        fit(save_three, tmp_path).get_best_checkpoint("loss", lowest)


def test_metrics_dataframe_has_one_row_per_report(tmp_path: Path) -> None:
    frame = fit(save_three, tmp_path).metrics_dataframe
    head = ["rank", "index", "attempt", "time"]
    assert list(frame.columns) == [*head, "warmup", "loss", "eval/acc", "last"]
    assert list(frame["index"]) == list(range(7))
    assert list(frame["loss"].dropna()) == [3.0, 1.0, 2.0]
    assert set(frame["rank"]) == set(frame["attempt"]) == {0}
    assert frame["time"].is_monotonic_increasing


def test_metrics_dataframe_renames_metrics_named_like_columns(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"rank": 64, "index": "a", "time": {"step": 0.5}, "attempt": 7})

    frame = fit(function, tmp_path).metrics_dataframe
    assert frame.loc[0, ["rank", "index", "attempt"]].tolist() == [0, 0, 0]
    assert frame.loc[0, "metric/rank"] == 64
    assert frame.loc[0, "metric/index"] == "a"
    assert frame.loc[0, "metric/attempt"] == 7
    assert frame.loc[0, "time/step"] == 0.5


def test_metrics_dataframe_without_pandas_raises_import_error(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    code = (
        "import sys; sys.modules['pandas'] = None\n"  # makes `import pandas` fail
        "from drawbar.train import Result\n"
        "result = Result.from_path(sys.argv[1])\n"
        "print(result.metrics)\n"
        "result.metrics_dataframe\n"
    )
    command = [sys.executable, "-c", code, result.path]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout == "{'last': 1}\n"
    assert "ModuleNotFoundError: pandas is not installed; run: pip install " in process.stderr


def test_result_from_path_equals_original_result(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    reread = Result.from_path(Path(result.path))
    assert reread.metrics == result.metrics
    assert reread.checkpoint == result.checkpoint
    assert reread.best_checkpoints == result.best_checkpoints
    assert (reread.return_values, reread.return_value, reread.error) == ([], None, None)
    assert reread.metrics_dataframe.equals(result.metrics_dataframe)


def test_result_excludes_checkpoint_written_after_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path, open(path / "rows", "w") as still_open:
            still_open.write("buffered")
            train.report({}, checkpoint=path)

    assert fit(function, tmp_path).checkpoint is None
    file = tmp_path / "run" / "checkpoint_000000" / "rows"
    assert (
        f"not part of the result: {file} has 8 bytes, but had 0 bytes at the commit" in caplog.text
    )


def test_result_of_failed_run_has_error_and_checkpoints(tmp_path: Path) -> None:
    def function() -> None:
        save(loss=1.0)
        raise ValueError("boom")

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path)
    result = Result.from_path(tmp_path / "run")
    assert type(result.error) is TrainingFailedError
    assert result.error.error_message == raised.value.error_message
    assert result.error.path == result.path
    assert names(result) == ["checkpoint_000000"]
    assert "ValueError: boom" in repr(result)


def test_result_of_interrupted_run_has_everything_before(tmp_path: Path, drivers: Drivers) -> None:
    def function() -> None:
        save(loss=1.0)
        train.report({"loss": 0.5})
        os._exit(9)

    with drivers(lambda: fit(function, tmp_path)) as driver:
        assert driver.wait(300) == 9
    result = Result.from_path(tmp_path / "run")
    assert result.error is None
    assert names(result) == ["checkpoint_000000"]
    assert [attempt.outcome for attempt in result.timeline.attempts] == ["unfinished"]


def test_result_of_active_run_can_be_read(tmp_path: Path) -> None:
    def function() -> list[str]:
        save(loss=1.0)
        return names(Result.from_path(train.get_context().get_storage()))

    assert fit(function, tmp_path).return_value == ["checkpoint_000000"]


def test_result_of_resumed_run_has_no_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(WorkerGroupError):
        fit(fail, tmp_path)
    assert fit(lambda: save(loss=1.0), tmp_path).error is None
    assert [
        attempt.attempt for attempt in Result.from_path(tmp_path / "run").timeline.attempts
    ] == [
        0,
        1,
    ]


def fail_once_after_a_checkpoint() -> None:
    start = train.get_checkpoint()
    for step in range(2 if start else 0, 4):
        save(step=step) if step == 1 else train.report({"step": step})
        if start is None and step == 2:
            raise ValueError("once")


def test_metrics_dataframe_after_restart_has_no_gap_or_duplicate(tmp_path: Path) -> None:
    result = fit(
        fail_once_after_a_checkpoint, tmp_path, failure_config=FailureConfig(max_failures=1)
    )
    frame = result.metrics_dataframe
    assert frame["step"].tolist() == frame["index"].tolist() == [0, 1, 2, 3]
    assert frame["attempt"].tolist() == [0, 0, 1, 1]


def test_timeline_has_times_of_each_attempt(tmp_path: Path) -> None:
    result = fit(
        fail_once_after_a_checkpoint, tmp_path, failure_config=FailureConfig(max_failures=1)
    )
    first, second = result.timeline.attempts
    assert (first.attempt, first.world_size, first.num_checkpoints) == (0, 1, 1)
    assert first.outcome.startswith("failed: rank 0: ValueError: once")
    assert (second.attempt, second.num_checkpoints, second.outcome) == (1, 0, "finished")
    for attempt in (first, second):
        times = [
            attempt.start_time,
            attempt.workers_ready_time,
            attempt.function_start_time,
            attempt.first_report_time,
        ]
        assert times == sorted(time for time in times if time is not None)
        assert attempt.total_seconds is not None
        assert attempt.startup_seconds is not None
        assert 0 <= attempt.startup_seconds <= attempt.total_seconds
    assert len(str(result.timeline).splitlines()) == 2


def test_result_of_damaged_journal_raises_and_run_resumes(tmp_path: Path) -> None:
    fit(save_three, tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:4], b"garbage\n", *lines[4:]]))
    with pytest.raises(DamagedRunError, match=f"Line 5 of {journal} cannot be read"):
        Result.from_path(tmp_path / "run")
    assert len(names(fit(lambda: None, tmp_path, resume="must"))) == 3


@pytest.mark.parametrize("path", [".", "none", "a file"])
def test_result_from_path_without_run_raises(tmp_path: Path, path: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.* is not a Drawbar run"):
        Result.from_path(tmp_path / path)


def test_result_repr_is_short_and_has_path(tmp_path: Path) -> None:
    lines = repr(fit(save_three, tmp_path)).splitlines()
    assert lines[0] == "Result("
    assert lines[1:3] == [f"  path='{tmp_path}/run',", "  metrics={'last': 1},"]
    assert len(lines) == 5


class TestInANotebook:
    def test_card_shows_status_metrics_curves_and_checkpoints(self, tmp_path: Path) -> None:
        html = fit(save_three, tmp_path)._repr_html_()
        assert "<b>run</b> finished" in html
        assert html.count("<svg") == 2
        assert "from 1 to 3, reports 1 to 5" in html
        for name in ("checkpoint_000001", "checkpoint_000003", "checkpoint_000005"):
            assert f'<td style="text-align: left">{name}</td>' in html
        assert "loss 2, eval/acc 8" in html

    def test_card_draws_curve_for_metric_reported_twice(self, tmp_path: Path) -> None:
        def function() -> None:
            for step in range(1000):
                train.report({"step": step, "loss": math.nan, "flag": True, "a": {"<c>": "<svg"}})

        html = fit(function, tmp_path)._repr_html_()
        assert html.count("<svg") == 1
        assert "from 0 to 999, reports 0 to 999" in html
        assert "&lt;c&gt;" in html
        assert "<c>" not in html
        assert len(html) < 10_000

    def test_card_of_failed_run_shows_error(self, tmp_path: Path) -> None:
        def function() -> None:
            raise ValueError("<no>")

        with pytest.raises(WorkerGroupError):
            fit(function, tmp_path)
        html = Result.from_path(tmp_path / "run")._repr_html_()
        assert "<b>run</b> failed" in html
        assert "ValueError: &lt;no&gt;" in html


def test_report_from_file_whose_name_is_not_utf_8_is_recorded(tmp_path: Path) -> None:
    def function() -> None:
        exec(compile("train.report({'loss': 1})", os.fsdecode(b"/\xff.py"), "exec"), globals())

    assert fit(function, tmp_path).metrics == {"loss": 1}
    assert "/\\\\udcff.py:1 in" in (tmp_path / "run" / "journal.jsonl").read_text()


def test_curves_contain_only_finite_numbers(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"n": 10**400, "loss": float("nan"), "best": True, "at": {"lr": 2}})

    fit(function, tmp_path)
    assert runs.find_run(tmp_path / "run").get_curves() == {"at/lr": {0: 2.0}}


def add_later_fields(value: Any) -> Any:
    """Add a field to each object of a journal line, except to dicts with arbitrary keys."""
    match value:
        case dict():
            arbitrary_keys = ("metrics", "config", "seconds", "environment", "versions")
            added = {k: v if k in arbitrary_keys else add_later_fields(v) for k, v in value.items()}
            return {**added, "later": {"x": [1]}}
        case list():
            return [add_later_fields(item) for item in value]
    return value


def test_run_with_later_events_and_fields_is_read_and_resumed(tmp_path: Path) -> None:
    fit(save_three, tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = [add_later_fields(json.loads(line)) for line in journal.read_bytes().splitlines()]
    later = {"event": "later", "attempt": "a", "time": None}
    journal.write_text("".join(f"{json.dumps(line)}\n{json.dumps(later)}\n" for line in lines))
    before = journal.read_bytes()

    result = Result.from_path(tmp_path / "run")
    assert (result.metrics, names(result)) == ({"last": 1}, [f"checkpoint_00000{n}" for n in "135"])
    record = runs.find_run(tmp_path / "run")
    assert (record.status, record.damage, len(record.timeline.attempts)) == ("finished", "", 1)
    assert [damage for _, damage in record.verify_checkpoints()] == ["", "", ""]
    handle = train.attach(tmp_path / "run")
    assert (handle.status, handle.wait().metrics) == ("finished", {"last": 1})

    assert len(names(fit(save_three, tmp_path, resume="must"))) == 6
    assert journal.read_bytes().startswith(before)
    assert not journal.with_name("journal.damaged").exists()
