"""`ObservationRecorder`: store the observations of the ranks of a run, and find slow ranks."""

from __future__ import annotations

import contextlib
import time
from collections import Counter

import msgspec

from drawbar._observe.rank_times import (
    MIN_STRAGGLER_STEPS,
    RANK_TIMES,
    RankTimesLine,
    RankTimesOfRank,
    find_stragglers,
    subtract,
)
from drawbar._observe.rates import RateWindow
from drawbar._observe.resources import ResourceSample
from drawbar._observe.sample_log import SampleFile, SampleLog
from drawbar._records.event_stream import Emit
from drawbar._records.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRead,
    ProgressRecorded,
    RankTimesRecorded,
    StragglerFound,
)
from drawbar._records.live_events import (
    AttemptEnding,
    Event,
    Notice,
    ObservationReceived,
    ProgressReceived,
)
from drawbar._records.run_progress import RunProgress
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import RESOURCES_FILE

RECORD_INTERVAL_S = 30.0
_MIN_INTERVAL_S = 10.0
_MAX_NOTICES = 10

RESOURCES = SampleFile(
    RESOURCES_FILE,
    msgspec.json.Decoder(ResourceSample),
    lambda sample: (sample.node, sample.node_rank),
)


class ObservationRecorder:
    """Watcher that stores the observations of ranks, and emits events about them.

    The watchers before it receive these events in order.

    Args:
        directory: Directory of the run.
        emit: Callback that publishes events.
    """

    def __init__(self, directory: RunDirectory, emit: Emit) -> None:
        self._emit = emit
        self._resources = SampleLog(directory, RESOURCES)
        self._rank_times_log = SampleLog(directory, RANK_TIMES)
        self._start_attempt(0)

    def _start_attempt(self, number: int) -> None:
        self._attempt = number
        self._progress = ProgressRecorder(number, self._emit)
        self._rank_times = RankTimesRecorder(number, self._rank_times_log, self._emit)

    def on_event(self, event: Event) -> None:
        """Handle an observation, or record the latest ones at a commit and at the end."""
        match event:
            case ObservationReceived(kind="resources"):
                self._resources.add(msgspec.convert(event.payload, ResourceSample))
            case ObservationReceived(attempt=attempt) if attempt != self._attempt:
                pass  # arrived late, from the attempt before
            case ObservationReceived(kind="rank_times"):
                times = RankTimesOfRank(event.payload["steps"], event.payload["seconds"])
                self._rank_times.add(event.rank, times)
            case ObservationReceived(kind="progress"):
                self._progress.on_progress(msgspec.convert(event.payload, RunProgress))
            case ObservationReceived(kind="checkpoint_read"):
                read = CheckpointRead(
                    time=time.time(), attempt=event.attempt, rank=event.rank, **event.payload
                )
                self._emit(read)
            case AttemptStarted():
                self._start_attempt(event.attempt)
            case CheckpointCommitted():
                self._rank_times.record()
                self._progress.record()
            case AttemptEnding():
                # If the user has deleted the run directory, the error of the run is the next
                # event's.
                with contextlib.suppress(FileNotFoundError):
                    self._rank_times.end()
                    self._progress.record()
            case _:
                pass

    def close(self) -> None:
        """Write the remaining samples."""
        self._resources.close()
        self._rank_times_log.close()


class ProgressRecorder:
    """Progress of one attempt.

    The rate counts only this attempt, so steps that are repeated after a restart count once.

    Args:
        attempt: Number of the attempt.
        emit: Callback that publishes events.
    """

    def __init__(self, attempt: int, emit: Emit) -> None:
        self._attempt = attempt
        self._emit = emit
        self._rate = RateWindow()
        self._progress: RunProgress | None = None
        self._recorded: RunProgress | None = None
        self._next_record = 0.0

    def on_progress(self, progress: RunProgress) -> None:
        """Emit the progress that a rank has sent, with its rate."""
        self._rate.add(progress.time, progress.done)
        self._progress = msgspec.structs.replace(progress, rate=self._rate.get_rate())
        self._emit(ProgressReceived(self._progress))
        if time.monotonic() >= self._next_record:
            self.record()

    def record(self) -> None:
        """Store the latest progress in the journal, unless it is stored."""
        progress = self._progress
        if progress is None or progress is self._recorded:
            return
        self._recorded = progress
        self._next_record = time.monotonic() + RECORD_INTERVAL_S
        self._emit(ProgressRecorded(time=time.time(), attempt=self._attempt, progress=progress))


class RankTimesRecorder:
    """Times of the ranks of one attempt.

    Args:
        attempt: Number of the attempt.
        log: Receives the times of all ranks, about every ten seconds.
        emit: Callback that publishes events.
    """

    def __init__(self, attempt: int, log: SampleLog[RankTimesLine], emit: Emit) -> None:
        self._attempt = attempt
        self._log = log
        self._emit = emit
        self._ranks: dict[int, RankTimesOfRank] = {}
        # Sums over the ranks, so that a commit costs the same with any number of ranks.
        self._sums = Counter[str]()
        self._is_recorded = True
        self._start = time.monotonic()
        self._next_line = 0.0
        self._found = set[tuple[int, str]]()
        # Stragglers are searched between this time and now, so that a rank that becomes slow in a
        # long attempt is found, too.
        self._compared: dict[int, RankTimesOfRank] = {}

    def add(self, rank: int, times: RankTimesOfRank) -> None:
        """Update the times of a rank, and write a line for all ranks if one is due."""
        previous = self._ranks.get(rank)
        if previous is not None:
            self._sums.subtract(previous.seconds)
        self._sums.update(times.seconds)
        self._ranks[rank] = times
        self._is_recorded = False
        now = time.monotonic()
        if now >= self._next_line and len(self._ranks) > 1:
            # Longer intervals in longer attempts bound the size of the file.
            self._next_line = now + max(_MIN_INTERVAL_S, (now - self._start) / 100)
            self._write_line()

    def record(self) -> None:
        """Emit the averages over the ranks, if they have changed."""
        if self._is_recorded:
            return
        self._is_recorded = True
        count = len(self._ranks)
        self._emit(
            RankTimesRecorded(
                time=time.time(),
                attempt=self._attempt,
                seconds={key: max(value / count, 0.0) for key, value in self._sums.items()},
                steps=min(times.steps for times in self._ranks.values()),
            )
        )

    def end(self) -> None:
        """Record the last times of the attempt."""
        if not self._is_recorded:
            self._write_line()
            self.record()

    def _write_line(self) -> None:
        self._warn_about_stragglers()
        self._log.add(RankTimesLine.from_ranks(time.time(), self._attempt, self._ranks))

    def _warn_about_stragglers(self) -> None:
        changes = subtract(self._ranks, self._compared)
        if min((times.steps for times in changes.values()), default=0) < MIN_STRAGGLER_STEPS:
            return
        self._compared = dict(self._ranks)
        for straggler in find_stragglers(changes):
            key = straggler.rank, straggler.part
            if key in self._found:
                continue
            self._found.add(key)
            self._emit(
                StragglerFound(
                    time=time.time(),
                    attempt=self._attempt,
                    rank=straggler.rank,
                    part=straggler.part,
                    ratio=straggler.ratio,
                    seconds_per_step=straggler.seconds_per_step,
                )
            )
            if len(self._found) <= _MAX_NOTICES:
                self._emit(Notice(f"{straggler.describe()} (drawbar show --ranks)"))
