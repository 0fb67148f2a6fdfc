"""Measure what reports cost: writing them, and reading a run that has made many.

    python -m benchmarks reports
    python -m benchmarks reports --reports 1000000 --ranks 8

The reports are written as the controller writes them, in batches of `BATCH`, without workers. Each
way of reading them runs in a new process, whose peak memory is measured too.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drawbar._process.ranks import Ranks, WorkerInfo

BATCH = 64
REPORTS = (1_000_000, 10_000_000)
REPORT_INTERVAL_S = 0.002
GOALS = {
    "bytes per report": "25",
    "drawbar runs": "0.3 s",
    "Result": "1 s",
    "data frame": "4 s, 1000 MB",
    "resume": "2 s",
}


def write_run(path: Path, num_reports: int, num_ranks: int) -> float:
    """Write the directory of a finished run. Return the seconds of the thread for one report."""
    from drawbar._records.event_stream import EventStream
    from drawbar._records.events import (
        AttemptStarted,
        FirstReportReceived,
        RunEnded,
        RunStarted,
        WorkersStarted,
    )
    from drawbar._records.journal import Journal
    from drawbar._records.live_events import ReportsReceived
    from drawbar._records.report_log import ReportLog
    from drawbar._records.timeline import RunState
    from drawbar._storage.run_directory import RunDirectory

    path.mkdir(parents=True)
    now = time.time()
    seconds = 0.0
    with (
        closing(Journal(path / "journal.jsonl")) as journal,
        closing(ReportLog(RunDirectory(path), journal)) as log,
    ):
        events = EventStream(journal, log, RunState())
        events.emit(RunStarted(time=now, run_id="benchmark", name=path.name, config={}))
        events.emit(
            AttemptStarted(time=now, attempt=0, first_report_index=0, resume_checkpoint=None)
        )
        events.emit(WorkersStarted(time=now, attempt=0, workers=_make_workers(num_ranks)))
        events.emit(FirstReportReceived(time=now, attempt=0, rank=0))
        for batch in _make_batches(num_reports, num_ranks, now):
            reports = ReportsReceived(0, *batch)
            start = time.thread_time()
            events.emit(reports)
            seconds += time.thread_time() - start
        events.emit(RunEnded(time=now, outcome="finished", num_reports=num_reports))
    return seconds / num_reports


def _make_workers(num_ranks: int) -> list[tuple[WorkerInfo, Ranks]]:
    from drawbar._process.rank_assignment import rank_workers
    from drawbar._process.ranks import WorkerInfo

    worker = WorkerInfo(node_id="n", node_ip="127.0.0.1", hostname="h", pid=1)
    return rank_workers([worker] * num_ranks)


def _make_batches(
    num_reports: int, num_ranks: int, start_time: float
) -> Iterator[tuple[int, list[int], list[float], list[dict[str, object]]]]:
    generator = random.Random(0)
    index, current_time = 0, start_time
    while num_reports > 0:
        for rank in range(num_ranks):
            count = min(BATCH, num_reports)
            num_reports -= count
            if not count:
                break
            indices = list(range(index, index + count))
            times = []
            for _ in indices:
                current_time += REPORT_INTERVAL_S * generator.random() / num_ranks
                times.append(current_time)
            metrics: list[dict[str, object]] = [
                {
                    "loss": 2 * math.exp(-step / 1e6) + 0.05 * generator.random(),
                    "accuracy": round(generator.random(), 4),
                    "step": step,
                }
                for step in indices
            ]
            yield rank, indices, times, metrics
        index += BATCH


# -- reading, in a new process


def _read_as_drawbar_runs(path: Path) -> None:
    from drawbar.train.runs import list_runs

    (run,) = list_runs(path.parent)
    assert (run.status, run.compute_size() > 0, bool(run.metrics)) == ("finished", True, True)


def _read_as_drawbar_show(path: Path) -> None:
    from drawbar.train.runs import find_run

    run = find_run(path)
    assert run.inspect_checkpoints() == ([], {})
    assert run.get_curves(is_sampled=True)


def _read_result(path: Path) -> None:
    from drawbar.train import Result

    assert Result.from_path(path).metrics


def _read_frame(path: Path) -> None:
    from drawbar.train import Result

    frame = Result.from_path(path).metrics_dataframe
    print(f"{len(frame)} rows:", end=" ")


def _resume(path: Path) -> None:
    from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

    DataParallelTrainer(
        int,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=path.name, storage_path=path.parent, resume="auto"),
    ).fit()


READERS: dict[str, Callable[[Path], None]] = {
    "drawbar runs": _read_as_drawbar_runs,
    "drawbar show": _read_as_drawbar_show,
    "Result": _read_result,
    "data frame": _read_frame,
    "resume": _resume,
}


def _read(name: str, path: Path) -> None:
    import drawbar.train

    if name == "data frame":
        import pandas  # noqa: F401  # its import is not measured

    start, cpu_start = time.perf_counter(), time.process_time()
    READERS[name](path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{seconds:.2f} s ({cpu_seconds:.2f} s of CPU), peak {peak:.0f} MB")
    del drawbar


def measure(num_reports: int, num_ranks: int, directory: Path) -> dict[str, str]:
    """Write a run and read it in every way. Return the measurements by name."""
    path = directory / f"{num_reports}_{num_ranks}" / "run"
    measured = {"write, per report": f"{write_run(path, num_reports, num_ranks) * 1e6:.2f} us"}
    size = sum(file.stat().st_size for file in (path / "reports").iterdir())
    measured["bytes per report"] = f"{size / num_reports:.1f}"
    measured["journal"] = f"{(path / 'journal.jsonl').stat().st_size} bytes"
    for name in READERS:
        command = [sys.executable, "-m", "benchmarks._reports_scale", name, str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        measured[name] = output.strip().splitlines()[-1]
    return measured


def main(arguments: Sequence[str]) -> None:
    """Print a table for each number of reports."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reports", description=__doc__)
    parser.add_argument("--reports", type=int, nargs="*", default=REPORTS)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args(arguments)
    for num_reports in options.reports:
        with tempfile.TemporaryDirectory(prefix="drawbar-reports-") as directory:
            measured = measure(num_reports, options.ranks, Path(directory))
        print(f"\n{num_reports:,} reports of {options.ranks} ranks")
        for name, value in measured.items():
            goal = f"(goal: {GOALS[name]})" if name in GOALS else ""
            print(f"  {name:20} {value:60} {goal}", flush=True)


if __name__ == "__main__":
    _read(sys.argv[1], Path(sys.argv[2]))
