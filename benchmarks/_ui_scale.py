"""Measure how long the server of `drawbar ui` takes for large runs.

    python -m benchmarks ui
    python -m benchmarks ui --reports 10000 --runs 20

The storage has one run with 200 metrics, and 99 runs with 10 metrics and a tenth of its reports.
The requests of the list of runs and of the visible part of the large run's page are timed, both
for a new server and again after that.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from drawbar import ui
from drawbar._records.event_stream import EventStream
from drawbar._records.events import AttemptStarted, FirstReportReceived, RunEnded, RunStarted
from drawbar._records.journal import Journal
from drawbar._records.live_events import ReportsReceived
from drawbar._records.report_log import ReportLog
from drawbar._records.timeline import RunState
from drawbar._storage.run_directory import RunDirectory

_BATCH = 64
_METRICS = (200, 10)
_VISIBLE_METRICS = 12
_GOAL_S = 1.0


def _write_run(path: Path, num_reports: int, num_metrics: int) -> None:
    """Write the directory of a finished run."""
    path.mkdir(parents=True)
    now = time.time() - num_reports
    with (
        closing(Journal(path / "journal.jsonl")) as journal,
        closing(ReportLog(RunDirectory(path), journal)) as log,
    ):
        events = EventStream(journal, log, RunState())
        config: dict[str, object] = {"train_loop_config": {"num_metrics": num_metrics}}
        events.emit(RunStarted(time=now, run_id=path.name, name=path.name, config=config))
        events.emit(
            AttemptStarted(time=now, attempt=0, first_report_index=0, resume_checkpoint=None)
        )
        events.emit(FirstReportReceived(time=now, attempt=0, rank=0))
        for batch in _make_batches(now, num_reports, num_metrics):
            events.emit(batch)
        events.emit(RunEnded(time=now + num_reports, outcome="finished", num_reports=num_reports))


def _make_batches(now: float, num_reports: int, num_metrics: int) -> Iterator[ReportsReceived]:
    generator = random.Random(0)
    names = [f"metric_{number:03}" for number in range(num_metrics)]
    noise = [round(generator.random(), 4) for _ in range(1_009)]
    for first in range(0, num_reports, _BATCH):
        steps = range(first, min(first + _BATCH, num_reports))
        metrics: list[dict[str, object]] = [
            {
                name: math.exp(-step / 3e4) + noise[(31 * step + number) % len(noise)]
                for number, name in enumerate(names)
            }
            for step in steps
        ]
        times = [now + step for step in steps]
        yield ReportsReceived(0, 0, list(steps), times, metrics)


def _measure(url: str, path: str) -> tuple[float, int, Any]:
    """Return the seconds of a request, the size of its reply in bytes, and the reply."""
    start = time.perf_counter()
    with urllib.request.urlopen(url + path) as reply:
        data = reply.read()
    return time.perf_counter() - start, len(data), json.loads(data)


def _measure_server(storage: Path) -> Iterator[tuple[str, float, int]]:
    start = time.perf_counter()
    with ui.start_server([storage], port=0) as server:
        parts = urlsplit(server.url)
        url = f"{parts.scheme}://{parts.netloc}/"
        start_seconds = time.perf_counter() - start
        seconds, size, reply = _measure(url, "api/runs")
        yield "list of runs, with the start of the server", start_seconds + seconds, size
        run_id = next(run["id"] for run in reply["runs"] if run["name"] == "large")
        page, page_size, described = _measure(url, f"api/runs/{run_id}")
        names = [metric["name"] for metric in described["metrics"]][:_VISIBLE_METRICS]
        query = urlencode({"metric": names, "points": 800}, doseq=True)
        curves_path = f"api/runs/{run_id}/curves?{query}"
        curves, curves_size, _ = _measure(url, curves_path)
        yield "visible part of the page, first time", page + curves, page_size + curves_size
        again = _measure(url, f"api/runs/{run_id}")[0] + _measure(url, curves_path)[0]
        yield "visible part of the page, again", again, page_size + curves_size
        yield "list of runs, again", *_measure(url, "api/runs")[:2]


def main(arguments: Sequence[str]) -> None:
    """Write the storage, and print the seconds of each request."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ui", description=__doc__)
    parser.add_argument("--reports", type=int, default=100_000, help="of the large run (100000)")
    parser.add_argument("--runs", type=int, default=100, help="number of runs (100)")
    parser.add_argument("--storage", type=Path, help="storage to create, or to use again")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        storage = options.storage or Path(directory) / "runs"
        if not storage.exists():
            _write_run(storage / "large", options.reports, _METRICS[0])
            for number in range(options.runs - 1):
                _write_run(storage / f"run-{number:03}", options.reports // 10, _METRICS[1])
        print(f"{'request':46} {'seconds':>8} {'kB':>8}   goal")
        for name, seconds, size in _measure_server(storage):
            print(f"{name:46} {seconds:8.2f} {size / 1000:8.0f}   {_GOAL_S:g} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {peak:.0f} MB")
