"""Kill a run that reports metrics at random times, and check that no report is lost.

    python -m benchmarks._report_kills --kills 500 --seed 7

Each process runs the training function with `num_workers=0` and resumes the run of the process
before it. Segments are so small that a report closes and compresses them all the time. After each
SIGKILL, the run directory must be intact, and must have each report that a callback has received.
The processes are forked, so a kill takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._wait import becomes_true
from drawbar import train
from drawbar._records import report_log
from drawbar._records.stored_reports import StoredReports
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train.testing import check_run

KILLS_PER_RUN = 25
LONGEST_RUN_S = 0.3
START_S = 60.0
SEGMENT_BYTES = 2000
REPORTS_PER_CHECKPOINT = 20


class ShownReports(train.UserCallback):
    """Record the reports that a callback has received."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        with open(self._path, "a") as file:
            file.write(f"{metrics[0]['attempt']} {metrics[0]['number']}\n")


def train_forever() -> None:
    """Report metrics, and save a checkpoint from time to time."""
    attempt, number = train.get_context().get_attempt(), 0
    while True:
        metrics = {"attempt": attempt, "number": number, "loss": random.random()}
        if number % REPORTS_PER_CHECKPOINT == REPORTS_PER_CHECKPOINT - 1:
            with train.checkpoint_dir() as path:
                (path / "model").write_text(str(number))
                train.report(metrics, checkpoint=path)
        else:
            train.report(metrics)
        number += 1


def _start(directory: Path) -> int:
    """Start or resume the run in a forked process, and return its PID."""
    pid = os.fork()
    if pid:
        return pid
    report_log.SEGMENT_BYTES = SEGMENT_BYTES
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    config = RunConfig(
        name="run", storage_path=directory, callbacks=[ShownReports(directory / "shown")]
    )
    try:
        DataParallelTrainer(
            train_forever, scaling_config=ScalingConfig(num_workers=0), run_config=config
        ).fit()
    finally:
        os._exit(1)


def _read_shown(directory: Path) -> set[tuple[int, int]]:
    path = directory / "shown"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(int(attempt), int(number)) for attempt, number in map(str.split, lines)}


def _read_stored(directory: Path) -> set[tuple[int, int]]:
    reports = StoredReports(RunDirectory(directory / "run").run_files)
    return {
        (attempt, number)
        for attempt in reports.list_attempts()
        for blocks in reports.read_blocks(reports.list_segments(attempt))
        for block in blocks
        for number in block.metrics["number"]
    }


def kill_once(directory: Path, seconds: float) -> int:
    """Run, kill, and check. Return the number of reports that a callback has received.

    Args:
        directory: Directory of the run, and of the files of this script.
        seconds: Time from the first report of the process to the kill.

    Raises:
        AssertionError: The run is damaged, or a report is lost.
    """
    before = len(_read_shown(directory))
    pid = _start(directory)
    try:
        has_started = becomes_true(lambda: len(_read_shown(directory)) > before, within=START_S)
        assert has_started, f"no report within {START_S:g} s; see {directory}/output"
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    output = (directory / "output").read_text()[-3000:]
    assert os.WTERMSIG(status) == signal.SIGKILL, f"the process failed:\n{output}"
    check_run(directory / "run")
    shown = _read_shown(directory)
    lost = shown - _read_stored(directory)
    assert not lost, f"shown, and not stored: reports (attempt, number) {sorted(lost)}"
    return len(shown) - before


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill runs with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._report_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    generator = random.Random(options.seed)
    num_reports = kills = 0
    while kills < options.kills:
        with tempfile.TemporaryDirectory(prefix="drawbar-kills-") as directory:
            for _ in range(min(KILLS_PER_RUN, options.kills - kills)):
                seconds = generator.uniform(0, LONGEST_RUN_S)
                num_reports += kill_once(Path(directory), seconds)
                kills += 1
    print(f"{kills} kills, {num_reports} reports: nothing was lost", flush=True)


if __name__ == "__main__":
    main()
