"""Tests of the segments with reports: history, damage, kills, and data frames."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawbar import train
from drawbar._history import run_history
from drawbar._history.run_history import RunHistory
from drawbar._records import report_log
from drawbar._records.events import (
    AttemptStarted,
    CheckpointValidated,
    JournaledEvent,
    RunStarted,
)
from drawbar._records.journal import Journal, replay
from drawbar._records.live_events import ReportsReceived
from drawbar._records.report_blocks import decode_block, encode, make_blocks, merge_blocks
from drawbar._records.report_log import ReportLog
from drawbar._records.report_ranges import find_missing_reports
from drawbar._records.stored_reports import StoredReports
from drawbar._runs.report_columns import make_frame
from drawbar._storage.manifest import ReportedCheckpointStatus
from drawbar._storage.report_files import Segment, parse_segments
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import FailureConfig, Result, RunConfig, UserCallback
from drawbar.train.runs import AttemptRow, FeedPosition, ReportFeed, ReportRow, find_run
from drawbar.train.testing import check_run, kill_at, run_in_threads
from tests.train.event_factories import workers_started
from tests.train.report_segments import list_reports
from tests.train.runs import fit

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

Metrics = dict[str, Any]
Reports = dict[tuple[int, int], Metrics]
"""Metrics by report number and rank."""


def seeds(count: int) -> list[Any]:
    """Return the seeds of random tests; `make test` runs every third one."""
    return [
        pytest.param(seed, marks=[pytest.mark.nightly] if seed % 3 else []) for seed in range(count)
    ]


class Run:
    """A run directory into which reports are written as by the controller."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        self.expected: Reports = {}
        self._journal = Journal(path / "journal.jsonl")
        self._log = ReportLog(self.directory, self._journal)
        self.append(RunStarted(time=0, run_id="r", name="run", config={}))

    def append(self, event: JournaledEvent) -> None:
        self._journal.append(event)

    def start_attempt(self, number: int, first: int, num_workers: int) -> None:
        self.append(
            AttemptStarted(time=0, attempt=number, first_report_index=first, resume_checkpoint=None)
        )
        self.append(workers_started(num_workers))
        self.expected = {key: value for key, value in self.expected.items() if key[0] < first}

    def report(self, attempt: int, rank: int, first: int, metrics: list[Metrics]) -> None:
        indices = range(first, first + len(metrics))
        times = [float(index) for index in indices]
        self._log.append(ReportsReceived(attempt, rank, indices, times, metrics))
        self.expected |= {(index, rank): metrics[index - first] for index in indices}

    def close(self) -> None:
        self._log.close()
        self._journal.close()

    def read_events(self) -> list[JournaledEvent]:
        return list(replay(self.directory.journal_path))

    def read(self) -> RunHistory:
        return RunHistory.read(self.directory)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "run").mkdir()
    with closing(Run(tmp_path / "run")) as run:
        yield run


def get_reports(history: RunHistory) -> Reports:
    rows = history.iter_rows()
    head = set(run_history.REPORT_COLUMNS)
    return {
        (row["index"], row["rank"]): {k: v for k, v in row.items() if k not in head} for row in rows
    }


def draw_metrics(generator: random.Random) -> Metrics:
    metrics: Metrics = {"loss": generator.random()}
    if generator.random() < 0.2:
        metrics["val"] = generator.choice([1, True, None, "ü\n", math.inf, -math.inf, 10**30])
    if generator.random() < 0.1:
        del metrics["loss"]
    return metrics


def read_feed(feed: ReportFeed, limit: int = 10_000) -> list[tuple[int, int, int, str]]:
    """Read to the end, and return attempt, rank, number, and metrics of each report."""
    rows: list[ReportRow | AttemptRow] = []
    while new := feed.read(limit):
        rows += new
    return [
        (row.attempt, row.rank, row.index, repr(sorted(row.metrics.items())))
        for row in rows
        if isinstance(row, ReportRow)
    ]


@pytest.mark.parametrize("seed", seeds(20))
def test_feed_of_random_reports_has_each_report_once_and_in_order(
    run: Run, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", generator.choice([1, 300, 3000, 10**6]))
    workers = generator.randint(1, 4)
    run.start_attempt(0, 0, workers)
    limit = generator.choice([1, 3, 10_000])
    path, position = run.directory.local_path, FeedPosition()
    following, live, resumed = dict.fromkeys(range(workers), 0), [], []
    expected: list[tuple[int, int, int, str]] = []
    with closing(ReportFeed(path)) as feed:
        for _ in range(generator.randint(1, 40)):
            rank = generator.randrange(workers)
            metrics = [draw_metrics(generator) for _ in range(generator.randint(1, 5))]
            run.report(0, rank, following[rank], metrics)
            for row in metrics:
                expected.append((0, rank, following[rank], repr(sorted(row.items()))))
                following[rank] += 1
            if generator.random() < 0.2:
                live += read_feed(feed, limit)
            if generator.random() < 0.2:  # another reader stops in the middle, and continues
                with closing(ReportFeed(path, position=position)) as other:
                    new = [row for row in other.read(7) if isinstance(row, ReportRow)]
                resumed += [(row.rank, row.index) for row in new]
                ends = {row.rank: row.index + 1 for row in new}
                position = FeedPosition(0, {**position.next_index, **ends})
        run.close()
        live += read_feed(feed, limit)
    with closing(ReportFeed(path, position=position)) as other:
        resumed += [(rank, index) for _, rank, index, _ in read_feed(other)]
    with closing(ReportFeed(path)) as feed:
        closed = read_feed(feed, limit)
    for rank in range(workers):
        of_rank = [row for row in expected if row[1] == rank]
        assert [row for row in live if row[1] == rank] == of_rank
        assert [row for row in closed if row[1] == rank] == of_rank
        assert [index for other, index in resumed if other == rank] == [row[2] for row in of_rank]
        with closing(ReportFeed(path, rank=rank)) as feed:
            assert read_feed(feed, limit) == of_rank


def test_list_of_segments_is_complete_while_segments_are_compressed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of a directory may lack a file that is replaced in the meantime."""
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 1)
    run.start_attempt(0, 0, 1)

    def report() -> None:
        for step in range(1000):
            run.report(0, 0, step, [{"step": step}])

    reporter = threading.Thread(target=report)
    reporter.start()
    while reporter.is_alive():
        segments = parse_segments(run.directory.run_files.list_local_reports())
        assert [segment.first for segment in segments] == list(range(len(segments)))
    assert len(segments) > 1


@pytest.mark.parametrize("seed", seeds(30))
def test_history_of_random_attempts_has_every_report_once(
    run: Run, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", generator.choice([1, 300, 3000, 10**6]))
    first, last_metrics = 0, dict[int, Metrics]()
    for attempt in range(generator.randint(1, 4)):
        workers = generator.randint(1, 4)
        run.start_attempt(attempt, first, workers)
        last_metrics = {rank: last_metrics[rank] for rank in last_metrics if rank < workers}
        following = dict.fromkeys(range(workers), first)
        for _ in range(generator.randint(0, 40)):
            rank = generator.randrange(workers)
            metrics = [draw_metrics(generator) for _ in range(generator.randint(1, 5))]
            run.report(attempt, rank, following[rank], metrics)
            following[rank] += len(metrics)
            last_metrics[rank] = metrics[-1]
            if generator.random() < 0.1:
                assert get_reports(run.read()) == run.expected
        first = generator.randint(first, min(following.values()))
    for _ in range(2):  # with an open segment, and after it was closed
        history = run.read()
        assert list(get_reports(history).items()) == sorted(run.expected.items())
        assert history.make_state().last_metrics == last_metrics
        _, rank = min(run.expected, key=lambda key: key[1], default=(0, 0))
        last = [metrics for key, metrics in sorted(run.expected.items()) if key[1] == rank]
        assert history.last_metrics == (last[-1] if last else None)
        frame = Result.from_path(run.directory.local_path).metrics_dataframe
        keys = list(zip(frame["index"], frame["rank"], strict=True))
        assert keys == sorted(run.expected)
        for name in {"loss", "val"} & set(frame.columns):
            for key, value in zip(keys, frame[name], strict=True):
                expected = run.expected[key].get(name)
                assert expected is None or value == pytest.approx(expected)
        run.close()
        assert all(name.endswith(".gz") for name in list_reports(run.directory.local_path))


@pytest.mark.parametrize("seed", seeds(10))
def test_history_without_a_segment_or_line_is_incomplete(
    run: Run, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 200)
    run.start_attempt(0, 0, 2)
    for step in range(40):
        for rank in range(2):
            run.report(0, rank, step, [draw_metrics(generator)])
    run.close()
    names = list_reports(run.directory.local_path)
    assert len(names) > 5
    *earlier, _ = sorted(names, key=lambda name: int(name.split("-")[1]))
    path = run.directory.local_path / "reports" / generator.choice(earlier)
    first, end = (int(part) // 2 for part in path.name.removesuffix(".jsonl.gz").split("-")[1:])
    path.unlink()
    with pytest.raises(train.DamagedRunError, match=rf"reports {first} to \d+ are missing"):
        run.read()
    damage = dict(find_run(run.directory.local_path).verify_checkpoints())
    assert damage["reports"].startswith(f"reports {first} to ")
    assert int(damage["reports"].split()[3]) in (end - 1, end)


def test_history_reads_no_reports_for_last_metrics(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 200)
    run.start_attempt(0, 0, 1)
    for step in range(100):
        run.report(0, 0, step, [{"step": step}])
    run.close()
    assert len(list_reports(run.directory.local_path)) > 10
    read: list[str] = []
    read_lines = StoredReports._read_lines

    def record(self: StoredReports, segment: Any) -> bytes:
        read.append(segment.file_name)
        return read_lines(self, segment)

    monkeypatch.setattr(StoredReports, "_read_lines", record)
    assert Result.from_path(run.directory.local_path).metrics == {"step": 99}
    record_of_run = find_run(run.directory.local_path)
    assert (record_of_run.metrics, record_of_run.last_event_time) == ({"step": 99}, 99.0)
    assert read == []


def test_lost_reports_of_a_rank_exclude_no_reports_of_other_ranks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 1)
    run.start_attempt(0, 0, 2)
    for first in (0, 10, 20):
        for rank in range(2):
            run.report(0, rank, first, [{"loss": float(index)} for index in range(10)])
    run.close()
    # The third segment has the reports 10 to 19 of rank 0.
    (run.directory.local_path / "reports" / "0-20-30.jsonl.gz").unlink()
    events = run.read_events()
    (lost,) = find_missing_reports(events, StoredReports(run.directory.run_files), [])
    assert (lost.first, lost.until, lost.ranks) == (10, 20, [0])
    history = RunHistory([*events, lost], StoredReports(run.directory.run_files))
    assert find_missing_reports(history.events, history.reports, []) == []
    rows = [(row["index"], row["rank"]) for row in history.iter_rows()]
    assert rows == [key for key in sorted(run.expected) if not (key[1] == 0 and 10 <= key[0] < 20)]


def test_copy_of_segment_under_the_name_of_a_later_one_is_damage(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 1)
    run.start_attempt(0, 0, 1)
    for first in (0, 10, 20):
        run.report(0, 0, first, [{"loss": float(index)} for index in range(10)])
    run.close()
    reports = run.directory.local_path / "reports"
    (reports / "0-10-20.jsonl.gz").write_bytes((reports / "0-0-10.jsonl.gz").read_bytes())
    message = r"0-10-20\.jsonl\.gz has report 0 of rank 0, which an earlier file has too"
    with pytest.raises(train.DamagedRunError, match=message):
        make_frame(run.read())
    with pytest.raises(train.DamagedRunError, match=message):
        list(run.read().iter_rows())
    damage = dict(find_run(run.directory.local_path).verify_checkpoints())
    assert "which an earlier file has too" in damage["reports/0-10-20.jsonl.gz"]


def test_sampled_curves_have_ends_of_long_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 5000)
    monkeypatch.setattr(run_history, "SAMPLED_REPORTS", 100)
    run.start_attempt(0, 0, 1)
    for first in range(0, 10_000, 100):
        run.report(0, 0, first, [{"step": step} for step in range(first, first + 100)])
    run.close()
    record = find_run(run.directory.local_path)
    sampled, complete = (record.get_curves(is_sampled=value)["step"] for value in (True, False))
    assert complete == {step: step for step in range(10_000)}
    assert 100 < len(sampled) < 2000
    assert sampled.items() <= complete.items()
    assert 9999 in sampled


def test_validation_metrics_are_in_row_of_lowest_rank(run: Run) -> None:
    run.start_attempt(0, 0, 2)
    for rank in (1, 0):
        run.report(0, rank, 0, [{"loss": 1.0}, {"loss": 2.0}])
    for index, metrics in ((0, {"acc": 0.5}), (1, {"acc": 0.75, "loss": 3})):
        run.append(
            CheckpointValidated(
                time=0,
                index=index,
                name="c",
                status=ReportedCheckpointStatus.VALIDATED,
                metrics=metrics,
                error="",
                seconds=0,
            )
        )
    assert get_reports(run.read()) == {
        (0, 0): {"loss": 1.0, "acc": 0.5},
        (0, 1): {"loss": 1.0},
        (1, 0): {"loss": 3, "acc": 0.75},
        (1, 1): {"loss": 2.0},
    }
    assert run.read().last_metrics == {"loss": 3, "acc": 0.75}
    frame = Result.from_path(run.directory.local_path).metrics_dataframe
    assert frame["acc"].dropna().tolist() == [0.5, 0.75]
    assert frame["loss"].tolist() == [1.0, 1.0, 3, 2.0]
    run.start_attempt(1, 1, 2)
    run.report(1, 0, 1, [{"loss": 4.0}])
    assert run.read().last_metrics == {"loss": 4.0}


def test_blocks_with_alternating_names_are_merged() -> None:
    metrics: list[Metrics] = [{"loss": step} if step % 2 else {"acc": step} for step in range(100)]
    blocks = make_blocks(3, range(100), [0.0] * 100, metrics)
    assert len(blocks) == 100
    merged = list(merge_blocks(blocks))
    assert [list(block.metrics) for block in merged] == [["acc"], ["loss"]]
    assert [decode_block(encode(block)) for block in merged] == merged
    assert merged[0].indices == list(range(0, 100, 2))


def test_compression_of_segment_needs_memory_independent_of_its_size(run: Run) -> None:
    peaks = []
    for attempt, num_reports in enumerate([20_000, 80_000]):
        run.start_attempt(attempt, 0, 1)
        for first in range(0, num_reports, 100):
            run.report(attempt, 0, first, [{"loss": math.sqrt(first + row)} for row in range(100)])
        directory, segment = run.directory, Segment(attempt, 0)
        tracemalloc.start()
        report_log.compress_open_segment(directory, segment, {})
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
    (last,) = run.read().reports.get_last(1).values()
    assert last.get_metrics(-1) == {"loss": math.sqrt(79_999)}


class Recorder(UserCallback):
    """Record the reports that a callback has received, outside the run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{metrics[0]['step']}\n")


@pytest.mark.parametrize(
    "occurrence", [1, *(pytest.param(count, marks=pytest.mark.nightly) for count in (2, 7)), 30]
)
@pytest.mark.parametrize("point", ["reports.written", "reports.compressed"])
def test_driver_killed_while_writing_reports_loses_none_that_were_shown(
    tmp_path: Path, drivers: Drivers, point: str, occurrence: int
) -> None:
    def function() -> None:
        for step in range(300):
            train.report({"step": step})

    def main() -> None:
        report_log.SEGMENT_BYTES = 200
        kill_at(point, occurrence=occurrence)
        fit(function, tmp_path, callbacks=[Recorder(tmp_path / "shown")])

    with drivers(main) as driver:
        assert driver.wait(300) == -signal.SIGKILL, driver.communicate()
    shown = tmp_path / "shown"
    steps = [int(line) for line in shown.read_text().split()] if shown.exists() else []
    run = tmp_path / "run"
    check_run(run)
    stored = Result.from_path(run).metrics_dataframe["step"].tolist()
    assert stored == list(range(len(stored)))
    assert set(steps) <= set(stored)
    assert len(stored) >= occurrence
    result = fit(function, tmp_path)
    assert result.metrics_dataframe["step"].tolist() == list(range(300))
    assert all(name.endswith(".gz") for name in list_reports(run))
    check_run(run)


def test_metrics_with_same_column_name_keep_the_second_value(tmp_path: Path) -> None:
    def function() -> None:
        for step in range(3):
            train.report(
                {"a/b": f"x{step}", "a": {"b": f"y{step}"}, "rank": "r", "metric/rank": "q"}
            )

    frame = fit(function, tmp_path).metrics_dataframe
    assert frame["a/b"].tolist() == ["y0", "y1", "y2"]
    assert frame["metric/rank"].tolist() == ["q"] * 3


def test_metrics_of_active_run_include_open_segment(tmp_path: Path) -> None:
    def function() -> tuple[Any, Any, int]:
        train.report({"step": 0})
        train.report({"step": 1})
        path = train.get_context().get_storage()
        while len(Result.from_path(path).metrics_dataframe) < 2:
            os.sched_yield()
        record = find_run(path)
        return Result.from_path(path).metrics, record.metrics, len(record.list_report_rows())

    assert fit(function, tmp_path).return_value == ({"step": 1}, {"step": 1}, 2)


def test_data_frame_includes_reports_written_after_they_were_counted(run: Run) -> None:
    run.start_attempt(0, 0, 2)
    run.report(0, 1, 0, [{"loss": 1.5}])
    history = run.read()
    assert history.count_stored() == 1
    for index in range(5):
        run.report(0, 0, index, [{"loss": index}])
    frame = make_frame(history)
    assert frame["rank"].tolist() == [0, 1, 0, 0, 0, 0]
    assert frame["index"].tolist() == [0, 0, 1, 2, 3, 4]
    assert frame["loss"].tolist() == [0, 1.5, 1, 2, 3, 4]


def test_restarted_ranks_of_threads_have_complete_history(tmp_path: Path) -> None:
    def function() -> None:
        context = train.get_context()
        for step in range(50):
            train.report({"step": step, "rank": context.get_world_rank()})
            if context.get_attempt() == 0 and step == 25:
                raise ValueError("once")

    config = RunConfig(
        name="run", storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)
    )
    result = run_in_threads(function, num_workers=3, run_config=config)
    frame = result.metrics_dataframe
    assert len(frame) == 150
    assert set(frame["attempt"]) == {1}
    check_run(tmp_path / "run")
