"""Kill workers of a run at known times, and compare its goodput with times of the processes.

    python -m benchmarks goodput --kills 10 --seed 7

In each attempt but the last, one worker kills itself by SIGKILL after a random time. The workers
write the times of their first line, their steps, checkpoints, and kills to files. From these files
and the duration of `fit()`, the command computes the goodput without the journal. It exits with 1
if `Result.goodput` differs by more than 1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._cluster import fresh_cluster
from drawbar import train
from drawbar.train import DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig

WORKERS = 2
STEP_SECONDS = 0.02
FIRST_STEP_SECONDS = 0.2
STEPS_PER_CHECKPOINT = 25
SHORTEST_ATTEMPT_S = 0.3  # shorter than the time to the first checkpoint
LONGEST_ATTEMPT_S = 20.0
MAX_DIFFERENCE = 0.01


@dataclass
class AttemptLog:
    """Times that the workers of one attempt have written, in seconds since the epoch.

    Attributes:
        resumed_from: Last step in the checkpoint from which the attempt resumed; -1 without one.
        starts: Time of the first line, by rank.
        steps: Durations of the steps without checkpoints, by rank.
        saved: Step of each checkpoint: the time when all ranks had its commit.
        save_seconds: Step of each checkpoint: seconds that each rank was saving it.
        end: Time of the kill or of the last line.
    """

    resumed_from: int = -1
    starts: dict[int, float] = field(default_factory=dict)
    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    saved: dict[int, float] = field(default_factory=dict)
    save_seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    end: float = 0.0

    @property
    def start(self) -> float:
        """Time of the first line on the last rank."""
        return max(self.starts.values())

    def compute_warmup(self) -> float:
        """Return the excess of the first step over the median step, averaged over the ranks."""
        excesses = [steps[0] - statistics.median(steps[1:]) for steps in self.steps.values()]
        return max(statistics.fmean(excesses), 0.0)


class _TimesWriter:
    """Write times of this rank to a file of the attempt, so that a kill loses none."""

    def __init__(self, folder: Path) -> None:
        context = train.get_context()
        attempt, rank = context.get_attempt(), context.get_world_rank()
        self._file = (folder / f"times_{attempt}_{rank}.jsonl").open("w", buffering=1)

    def write(self, event: str, *values: float) -> None:
        """Write an event with the current time."""
        self._file.write(json.dumps([event, time.time(), *values]) + "\n")


def _train(config: Mapping[str, Any]) -> None:
    """Train until this attempt's worker kills itself, or for a fixed time in the last attempt."""
    writer = _TimesWriter(config["folder"])
    context, checkpoint = train.get_context(), train.get_checkpoint()
    attempt, rank = context.get_attempt(), context.get_world_rank()
    step = int((Path(checkpoint) / "step").read_text()) if checkpoint else -1
    writer.write("start", step)
    start = time.monotonic()
    seconds = config["attempt_seconds"][attempt]
    is_last = attempt == len(config["attempt_seconds"]) - 1
    is_first_step = True
    # Every rank makes the same number of steps in the last attempt.
    until = step + int(seconds / STEP_SECONDS)
    while step < until or not is_last:
        began = time.monotonic()
        _work(FIRST_STEP_SECONDS if is_first_step else STEP_SECONDS)
        is_first_step, step = False, step + 1
        train.step()
        writer.write("step", time.monotonic() - began)
        is_due = not is_last and time.monotonic() - start > seconds
        if is_due and rank == attempt % WORKERS:
            writer.write("end")
            os.kill(os.getpid(), signal.SIGKILL)
        if step % STEPS_PER_CHECKPOINT == STEPS_PER_CHECKPOINT - 1:
            began = time.monotonic()
            with train.checkpoint_dir() as path:
                if rank == 0:
                    (path / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
            writer.write("saved", step, time.monotonic() - began)
    writer.write("end")


def _work(seconds: float) -> None:
    time.sleep(seconds)  # instead of training


def _read_logs(folder: Path, num_attempts: int) -> list[AttemptLog]:
    logs = [AttemptLog() for _ in range(num_attempts)]
    for path in sorted(folder.glob("times_*_*.jsonl")):
        _, number, rank = path.stem.split("_")
        for line in path.read_text().splitlines():
            _add_event(logs[int(number)], int(rank), *json.loads(line))
    return logs


def _add_event(log: AttemptLog, rank: int, event: str, at: float, *values: float) -> None:
    match event:
        case "start":
            log.starts[rank], log.resumed_from = at, int(values[0])
        case "step":
            log.steps[rank].append(values[0])
        case "saved":
            step = int(values[0])
            log.saved[step] = max(at, log.saved.get(step, 0.0))
            log.save_seconds[step].append(values[1])
        case "end":
            log.end = max(at, log.end)


def compute_expected(logs: Sequence[AttemptLog]) -> dict[str, float]:
    """Return the parts of the time in the training function, computed without the journal.

    Args:
        logs: Times of all attempts. All but the last one were killed.
    """
    parts = dict.fromkeys(("productive", "warmup", "checkpoint_blocked", "lost_work"), 0.0)
    for number, log in enumerate(logs):
        resumed_from = min((later.resumed_from for later in logs[number + 1 :]), default=None)
        kept = [step for step in log.saved if resumed_from is None or step <= resumed_from]
        if resumed_from is None:
            kept_until = log.end
        elif kept:
            kept_until = log.saved[max(kept)]
        else:
            kept_until = log.start
        blocked = sum(statistics.fmean(log.save_seconds[step]) for step in kept)
        warmup = log.compute_warmup() if kept_until > log.start else 0.0
        parts["checkpoint_blocked"] += blocked
        parts["warmup"] += warmup
        parts["productive"] += kept_until - log.start - blocked - warmup
        parts["lost_work"] += log.end - kept_until
    return parts


def _run(folder: Path, kills: int, seed: int) -> tuple[Result, float, list[AttemptLog]]:
    """Return the result, the duration of `fit()`, and the times that the workers have written."""
    rng = random.Random(f"goodput/{seed}")
    seconds = [rng.uniform(SHORTEST_ATTEMPT_S, LONGEST_ATTEMPT_S) for _ in range(kills + 1)]
    trainer = DataParallelTrainer(
        _train,
        train_loop_config={"folder": folder, "attempt_seconds": seconds},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="run", storage_path=folder, failure_config=FailureConfig(max_failures=kills)
        ),
    )
    start = time.monotonic()
    result = trainer.fit()
    return result, time.monotonic() - start, _read_logs(folder, kills + 1)


def measure_goodput(kills: int, seed: int) -> list[tuple[str, float, float]]:
    """Run the training, and compare the goodput of the result with the times of the processes.

    Args:
        kills: Number of workers that are killed.
        seed: Determines the times of the kills.

    Returns:
        For each quantity: its name, the value from the result, and the expected value. The first
        one is the goodput, the others are in seconds.
    """
    with fresh_cluster(num_cpus=WORKERS) as folder:
        result, hosted, logs = _run(folder, kills, seed)
        goodput = result.goodput
    assert goodput.goodput is not None  # the function reports
    parts = compute_expected(logs)
    rows = [
        ("goodput", goodput.goodput, parts["productive"] / hosted),
        ("hosted", goodput.hosted, hosted),
    ]
    return rows + [(part, goodput.parts.get(part, 0.0), parts[part]) for part in parts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill workers, print the comparison, and exit with 1 if the goodput differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks goodput", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args(arguments)
    rows = measure_goodput(options.kills, options.seed)
    table = Table("", "Result.goodput", "processes", "difference", title=f"seed {options.seed}")
    for name, found, expected in rows:
        form = "{:.2%}" if name == "goodput" else "{:.2f} s"
        difference = f"{(found - expected) / expected:+.2%}" if expected else "-"
        table.add_row(name, form.format(found), form.format(expected), difference)
    Console(highlight=False).print(table)
    _, found, expected = rows[0]
    if abs(found - expected) > MAX_DIFFERENCE * expected:
        raise SystemExit(f"The goodput differs by more than {MAX_DIFFERENCE:.0%}.")
