"""Runs of the real controller with simulated ranks, or with Ray actors, whose cost is measured."""

from __future__ import annotations

import gc
import io
import math
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field

import psutil

from benchmarks._simulated_rank import SimulatedRank
from benchmarks._simulated_ranks import run_simulated_ranks
from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    Timeline,
)

METRICS = {"loss": 0.25, "accuracy": 0.75, "learning_rate": 1e-3}
BARRIERS = 10
REPORTS = 5
CHECKPOINTS = 2
REPORTS_PER_MINUTE = 6
MINUTES = 10
SAMPLE_SECONDS = 0.05

Meter = Callable[[], float]
"""Return the work that the controller has done so far, such as its CPU time in seconds."""


def read_controller_cpu() -> float:
    """Return the CPU time of the controller's thread, in seconds. Can be called in any thread."""
    threads = (thread for thread in threading.enumerate() if thread.name == "drawbar-controller")
    thread_id = next(threads).ident
    assert thread_id is not None  # it has started
    return time.clock_gettime(time.pthread_getcpuclockid(thread_id))


@dataclass
class PhaseRecorder:
    """Record the controller's work in consecutive phases. Rank 0 marks their ends.

    Args:
        meter: Measures the work.

    Attributes:
        work: Work in each phase, in the unit of the meter.
        seconds: Duration of each phase.
    """

    meter: Meter
    work: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last_work = self._last_time = 0.0

    def mark(self, rank: SimulatedRank, phase: str) -> None:
        """Record the end of a phase, if this is rank 0."""
        if rank.world_rank == 0:
            work, now = self.meter(), time.perf_counter()
            self.work[phase] = work - self._last_work
            self.seconds[phase] = now - self._last_time
            self._last_work, self._last_time = work, now


@dataclass(frozen=True)
class RayCost:
    """Cost of a report of a Ray actor for the driver, in seconds of CPU time.

    Attributes:
        rate: Reports per second of all actors.
        process: CPU time of the driver, including Ray's threads.
        thread: CPU time of the controller's thread.
    """

    rate: float
    process: float
    thread: float


@dataclass(frozen=True)
class ControllerCost:
    """Cost of a run with simulated ranks.

    Attributes:
        num_ranks: Number of ranks.
        start: Seconds from the request of all workers to the first line on the last rank.
        barrier: Work per barrier of all ranks.
        report: Work per report of one rank.
        checkpoint: Seconds from the last report to the commit, if the files are staged already.
        checkpoint_work: Work per checkpoint.
        persisted_checkpoint: Seconds until the commit, if the ranks write the files on request.
        restart: Seconds from a death to the first line on the last rank of the next attempt.
    """

    num_ranks: int
    start: float
    barrier: float
    report: float
    checkpoint: float
    checkpoint_work: float
    persisted_checkpoint: float
    restart: float


def measure_controller(num_ranks: int, meter: Meter = read_controller_cpu) -> ControllerCost:
    """Run start, barriers, reports, checkpoints, and one death, and return their costs."""
    recorder = PhaseRecorder(meter)
    death_time = 0.0

    async def train_func(rank: SimulatedRank) -> None:
        nonlocal death_time
        await rank.barrier()
        recorder.mark(rank, "start")
        if rank.attempt == 1:
            for _ in range(CHECKPOINTS):
                await rank.report_checkpoint(METRICS, b"state", is_staged=False)
            return
        for _ in range(BARRIERS):
            await rank.barrier()
        recorder.mark(rank, "barrier")
        for _ in range(REPORTS):
            rank.report(METRICS)
        await rank.barrier()
        recorder.mark(rank, "report")
        for _ in range(CHECKPOINTS):
            await rank.report_checkpoint(METRICS, b"state")
        await rank.barrier()
        recorder.mark(rank, "checkpoint")
        if rank.world_rank == num_ranks - 1:
            death_time = time.time()
            rank.die()
        await rank.barrier()

    first, second = _run(train_func, num_ranks).attempts
    assert second.function_start_time is not None
    return ControllerCost(
        num_ranks=num_ranks,
        start=first.startup_seconds or math.nan,
        barrier=recorder.work["barrier"] / BARRIERS,
        report=recorder.work["report"] / (REPORTS * num_ranks),
        checkpoint=first.checkpoint_seconds / CHECKPOINTS,
        checkpoint_work=recorder.work["checkpoint"] / CHECKPOINTS,
        persisted_checkpoint=second.checkpoint_seconds / CHECKPOINTS,
        restart=second.function_start_time - death_time,
    )


def measure_memory_growth(num_ranks: int) -> float:
    """Return the growth of this process in MB over `MINUTES` minutes of training.

    Each rank makes `REPORTS_PER_MINUTE` reports per minute, without the time between them. The
    first minute is not counted: memory that it uses is reused later.
    """
    rss: list[float] = []

    async def train_func(rank: SimulatedRank) -> None:
        for _ in range(MINUTES + 1):
            for _ in range(REPORTS_PER_MINUTE):
                rank.report(METRICS)
                await rank.barrier()
            if rank.world_rank == 0:
                gc.collect()
                rss.append(psutil.Process().memory_info().rss / 2**20)

    _run(train_func, num_ranks)
    return rss[-1] - rss[0]


def _run(train_func: Callable[[SimulatedRank], Awaitable[None]], num_ranks: int) -> Timeline:
    # The console would print the simulated death.
    with (
        redirect_stderr(io.StringIO()),
        tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as storage,
    ):
        config = RunConfig(
            name="scale",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=1),
            logging_config=LoggingConfig("CRITICAL"),
        )
        result = run_simulated_ranks(train_func, num_workers=num_ranks, run_config=config)
        return result.timeline


def measure_ray(num_workers: int, reports_per_second: float, seconds: float) -> RayCost:
    """Run Ray actors that report at a rate in total, and return the driver's cost per report.

    Ray must be running with one CPU per worker.
    """
    interval, count = num_workers / reports_per_second, int(seconds * reports_per_second)
    samples: list[tuple[float, float, float]] = []  # time, CPU of the process, CPU of the thread
    with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as storage:
        trainer = DataParallelTrainer(
            _report_at_interval,
            train_loop_config={"interval": interval, "reports": count // num_workers},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(storage_path=storage, logging_config=LoggingConfig("CRITICAL")),
        )
        run = trainer.start()
        waiter = threading.Thread(target=run.wait)
        waiter.start()
        while waiter.is_alive():
            with suppress(StopIteration):  # the controller's thread ends before the waiter
                samples.append((time.time(), time.process_time(), read_controller_cpu()))
            waiter.join(SAMPLE_SECONDS)
        times = run.wait().metrics_dataframe["time"]
    first, last = (_find_sample(samples, time) for time in (times.min(), times.max()))
    num_reports = int(((times > first[0]) & (times <= last[0])).sum())
    return RayCost(
        rate=num_reports / (last[0] - first[0]),
        process=(last[1] - first[1]) / num_reports,
        thread=(last[2] - first[2]) / num_reports,
    )


def _report_at_interval(config: dict[str, float]) -> None:
    from drawbar.train import collective, report

    collective.barrier()
    start = time.monotonic()
    for index in range(int(config["reports"])):
        time.sleep(max(start + index * config["interval"] - time.monotonic(), 0))
        report({"loss": 0.25, "accuracy": 0.75, "learning_rate": 1e-3})


def _find_sample(
    samples: list[tuple[float, float, float]], time: float
) -> tuple[float, float, float]:
    """Return the sample that is closest to a time."""
    return min(samples, key=lambda sample: abs(sample[0] - time))
