"""What a run's directory tells of it: finished, failed, cut off, and gone on."""

from __future__ import annotations

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
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from drawbar.train._history.html import iter_numbers

if TYPE_CHECKING:
    from tests.train.conftest import Drivers


def fit(function: Any, folder: Path, **config: Any) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=folder, **config),
    ).fit()


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


def test_a_finished_run(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    assert result.path == str(tmp_path / "run")
    assert result.metrics == {"last": 1}
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(tmp_path / "run" / "checkpoint_000005")
    assert (result.error, result.return_value, result.return_values) == (None, "done", ["done"])
    assert str(result.timeline).endswith("finished")


def test_a_run_that_never_reported(tmp_path: Path) -> None:
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
def test_best_checkpoints_are_sorted_by_the_score(
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
def test_the_best_checkpoint_by_any_metric(
    tmp_path: Path, metric: str, mode: Any, index: int
) -> None:
    best = fit(save_three, tmp_path).get_best_checkpoint(metric, mode)
    assert best is not None
    assert Path(best).name == f"checkpoint_{index:06d}"


def test_the_best_checkpoint_skips_what_has_no_number(tmp_path: Path) -> None:
    def function() -> None:
        for value in (2.0, math.nan, None, "low", 3.0):
            save(loss=value)
        save(other=0.0)

    best = fit(function, tmp_path).get_best_checkpoint("loss", "min")
    assert best is not None
    assert Path(best).name == "checkpoint_000000"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equally_good_checkpoints_the_newest_is_best(tmp_path: Path, mode: Any) -> None:
    def function() -> None:
        for _ in range(3):
            save(loss=1.0)

    result = fit(function, tmp_path)
    best = result.get_best_checkpoint("loss", mode)
    assert best == result.best_checkpoints[-1][0]


def test_a_metric_that_no_checkpoint_has_is_told_with_those_there_are(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    there_are = "has the metric 'los'. There are 'eval/acc', 'loss'; did you mean 'loss'"
    with pytest.raises(KeyError, match=re.escape(there_are)):
        result.get_best_checkpoint("los", "min")


def test_a_score_that_no_checkpoint_has_is_told_and_deletes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/ac")
    result = fit(save_three, tmp_path, checkpoint_config=config)
    told = [line for line in capfd.readouterr().err.splitlines() if "eval/ac'" in line]
    assert len(told) == 1
    assert "checkpoint_000001 does not have this metric" in told[0]
    assert "There are 'eval/acc', 'loss'; did you mean 'eval/acc'? Until" in told[0]
    assert len(result.best_checkpoints) == 3
    caplog.clear()
    assert len(Result.from_path(result.path).best_checkpoints) == 3
    assert "did you mean 'eval/acc'? best_checkpoints are sorted by age" in caplog.text


def test_a_mode_that_does_not_exist_is_told(tmp_path: Path) -> None:
    lowest: Any = "lowest"
    with pytest.raises(ValueError, match=r"mode='lowest' must be"):
        fit(save_three, tmp_path).get_best_checkpoint("loss", lowest)


def test_a_row_per_report_with_the_metrics_flat(tmp_path: Path) -> None:
    frame = fit(save_three, tmp_path).metrics_dataframe
    head = ["rank", "index", "attempt", "time"]
    assert list(frame.columns) == [*head, "warmup", "loss", "eval/acc", "last"]
    assert list(frame["index"]) == list(range(7))
    assert list(frame["loss"].dropna()) == [3.0, 1.0, 2.0]
    assert set(frame["rank"]) == set(frame["attempt"]) == {0}
    assert frame["time"].is_monotonic_increasing


def test_a_metric_named_like_a_column_has_a_name_of_its_own(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"rank": 64, "index": "a", "time": {"step": 0.5}, "attempt": 7})

    frame = fit(function, tmp_path).metrics_dataframe
    assert frame.loc[0, ["rank", "index", "attempt"]].tolist() == [0, 0, 0]
    assert frame.loc[0, "metric/rank"] == 64
    assert frame.loc[0, "metric/index"] == "a"
    assert frame.loc[0, "metric/attempt"] == 7
    assert frame.loc[0, "time/step"] == 0.5


def test_without_pandas_the_error_says_what_to_install(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    code = (
        "import sys; sys.modules['pandas'] = None\n"  # which makes `import pandas` fail
        "from drawbar.train import Result\n"
        "result = Result.from_path(sys.argv[1])\n"
        "print(result.metrics)\n"
        "result.metrics_dataframe\n"
    )
    command = [sys.executable, "-c", code, result.path]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout == "{'last': 1}\n"
    assert (
        'ImportError: Result.metrics_dataframe needs pandas. Run: pip install "drawbar[data]"'
        in (process.stderr)
    )


def test_a_result_is_read_again_from_its_path(tmp_path: Path) -> None:
    result = fit(save_three, tmp_path)
    again = Result.from_path(Path(result.path))
    assert again.metrics == result.metrics
    assert again.checkpoint == result.checkpoint
    assert again.best_checkpoints == result.best_checkpoints
    assert (again.return_values, again.return_value, again.error) == ([], None, None)
    assert again.metrics_dataframe.equals(result.metrics_dataframe)


def test_a_checkpoint_whose_file_was_still_written_is_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        with train.checkpoint_dir() as folder, open(folder / "rows", "w") as still_open:
            still_open.write("buffered")
            train.report({}, checkpoint=folder)

    assert fit(function, tmp_path).checkpoint is None
    file = tmp_path / "run" / "checkpoint_000000" / "rows"
    assert f"not part of the result: {file} has 8 bytes, but the commit has 0" in caplog.text


def test_a_failed_run_has_its_error_and_its_checkpoints(tmp_path: Path) -> None:
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


def test_a_run_that_was_cut_off_has_everything_until_then(tmp_path: Path, drivers: Drivers) -> None:
    def function() -> None:
        save(loss=1.0)
        train.report({"loss": 0.5})
        os._exit(9)

    with drivers(lambda: fit(function, tmp_path)) as driver:
        assert driver.wait(60) == 9
    result = Result.from_path(tmp_path / "run")
    assert result.error is None
    assert names(result) == ["checkpoint_000000"]
    assert [attempt.outcome for attempt in result.timeline.attempts] == ["unfinished"]


def test_a_run_that_still_goes_on_can_be_read(tmp_path: Path) -> None:
    def function() -> list[str]:
        save(loss=1.0)
        return names(Result.from_path(train.get_context().get_storage()))

    assert fit(function, tmp_path).return_value == ["checkpoint_000000"]


def test_an_error_is_over_when_the_run_goes_on(tmp_path: Path) -> None:
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


def test_a_restart_leaves_neither_gap_nor_duplicate(tmp_path: Path) -> None:
    result = fit(
        fail_once_after_a_checkpoint, tmp_path, failure_config=FailureConfig(max_failures=1)
    )
    frame = result.metrics_dataframe
    assert frame["step"].tolist() == frame["index"].tolist() == [0, 1, 2, 3]
    assert frame["attempt"].tolist() == [0, 0, 1, 1]


def test_the_timeline_tells_where_the_time_went(tmp_path: Path) -> None:
    result = fit(
        fail_once_after_a_checkpoint, tmp_path, failure_config=FailureConfig(max_failures=1)
    )
    first, second = result.timeline.attempts
    assert (first.attempt, first.world_size, first.num_checkpoints) == (0, 1, 1)
    assert first.outcome.startswith("failed: rank 0: ValueError: once")
    assert (second.attempt, second.num_checkpoints, second.outcome) == (1, 0, "finished")
    for each in (first, second):
        times = [
            each.start_time,
            each.workers_ready_time,
            each.function_start_time,
            each.first_report_time,
        ]
        assert times == sorted(time for time in times if time is not None)
        assert each.total_seconds is not None
        assert each.startup_seconds is not None
        assert 0 <= each.startup_seconds <= each.total_seconds
    assert len(str(result.timeline).splitlines()) == 2


def test_a_damaged_journal_is_told_and_gone_on_from(tmp_path: Path) -> None:
    fit(save_three, tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:4], b"garbage\n", *lines[4:]]))
    with pytest.raises(DamagedRunError, match=f"Line 5 of {journal} cannot be read"):
        Result.from_path(tmp_path / "run")
    assert len(names(fit(lambda: None, tmp_path, resume="must"))) == 3


@pytest.mark.parametrize("folder", [".", "none", "a file"])
def test_where_no_run_lies_is_told(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.* is not a Drawbar run"):
        Result.from_path(tmp_path / folder)


def test_a_repr_is_short_and_has_the_path(tmp_path: Path) -> None:
    lines = repr(fit(save_three, tmp_path)).splitlines()
    assert lines[0] == "Result("
    assert lines[1:3] == [f"  path='{tmp_path}/run',", "  metrics={'last': 1},"]
    assert len(lines) == 5


class TestInANotebook:
    def test_a_result_shows_its_state_metrics_curves_and_checkpoints(self, tmp_path: Path) -> None:
        html = fit(save_three, tmp_path)._repr_html_()
        assert "<b>run</b> finished" in html
        assert html.count("<svg") == 2
        assert "from 1 to 3, reports 1 to 5" in html
        for name in ("checkpoint_000001", "checkpoint_000003", "checkpoint_000005"):
            assert f'<td style="text-align: left">{name}</td>' in html
        assert "loss 2, eval/acc 8" in html

    def test_each_number_that_was_reported_twice_has_a_curve(self, tmp_path: Path) -> None:
        def function() -> None:
            for step in range(1000):
                train.report({"step": step, "loss": math.nan, "flag": True, "a": {"<c>": "<svg"}})

        html = fit(function, tmp_path)._repr_html_()
        assert html.count("<svg") == 1
        assert "from 0 to 999, reports 0 to 999" in html
        assert "&lt;c&gt;" in html
        assert "<c>" not in html
        assert len(html) < 10_000

    def test_a_failed_run_shows_why(self, tmp_path: Path) -> None:
        def function() -> None:
            raise ValueError("<no>")

        with pytest.raises(WorkerGroupError):
            fit(function, tmp_path)
        html = Result.from_path(tmp_path / "run")._repr_html_()
        assert "<b>run</b> failed" in html
        assert "ValueError: &lt;no&gt;" in html


def test_what_no_float_can_be_has_no_curve() -> None:
    metrics = {"n": 10**400, "loss": float("nan"), "best": True, "at": {"lr": 2}}
    assert dict(iter_numbers(metrics)) == {"at/lr": 2.0}
