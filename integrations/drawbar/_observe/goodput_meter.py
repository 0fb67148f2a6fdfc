"""`GoodputMeter`: compute the goodput of a run from its events, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drawbar._observe.goodput import CRASH_GAP, UNREPORTED, Goodput
from drawbar._records import events
from drawbar._records.live_events import Event

_MAX_CLOCK_DIFFERENCE_S = 30.0
_ROUNDING_ERROR_S = 1e-6
_PARTS_OF_WORK = {
    "warmup": "warmup",
    "data_wait": "data_wait",
    "checkpoint_save": "checkpoint_blocked",
    "checkpoint_blocked": "checkpoint_blocked",
}


@dataclass
class _Commit:
    """Commit of a checkpoint; `seconds` are the times of the ranks when they reported it."""

    index: int
    at: float
    seconds: Mapping[str, float]
    has_own_times: bool = False


@dataclass
class _AttemptWork:
    """Time in the training function of one attempt, in seconds of `GoodputMeter.clock`."""

    number: int
    workers: int = 0
    ready: float = 0.0
    ready_time: float = 0.0  # of the driver's clock, in seconds since the epoch
    start: float | None = None
    is_start_settled: bool = False
    end: float | None = None
    kept_until: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    commits: list[_Commit] = field(default_factory=list)
    stalled: float = 0.0
    recovery: float = 0.0

    def keep_commits_before(self, index: int) -> bool:
        """Drop the work after the last commit with a lower index. Return False if all is lost."""
        while self.commits and self.commits[-1].index >= index:
            self.commits.pop()
        self.keep_committed()
        return bool(self.commits)

    def keep_committed(self) -> None:
        """Keep only the work up to the last commit."""
        last = self.commits[-1] if self.commits else None
        self.kept_until = last.at if last else self.start
        self.measured = last.seconds if last else {}

    def add_parts(self, parts: dict[str, float], *, rest: str) -> None:
        """Add the time in the function. `rest` is the part after the last commit that counts."""
        if self.start is None or self.end is None:
            return
        kept = self.end if self.kept_until is None else self.kept_until
        kept = min(max(kept, self.start), self.end)
        remaining = kept - self.start
        # Ranks without checkpoints send their times less often: the last times may be older.
        measured_until = self.measured.get("function", 0.0)
        scale = max(remaining / measured_until, 1.0) if measured_until > 0 else 1.0
        for key, seconds in self.measured.items():
            part = key if key.startswith("phase:") else _PARTS_OF_WORK.get(key)
            if part is not None:
                taken = max(seconds, 0.0) * (1.0 if part == "warmup" else scale)
                taken = min(taken, remaining)
                parts[part] = parts.get(part, 0.0) + taken
                remaining -= taken
        for part, seconds in (("stalled", self.stalled), ("recovery", self.recovery)):
            taken = min(seconds, remaining)
            parts[part] = parts.get(part, 0.0) + taken
            remaining -= taken
        parts["productive"] = parts.get("productive", 0.0) + remaining
        parts[rest] = parts.get(rest, 0.0) + self.end - kept


def _is_report(event: Event) -> bool:
    """Return whether an event proves that the training function reports its work."""
    match event:
        case events.FirstReportReceived() | events.CheckpointCommitted():
            return True
        case events.RankTimesRecorded():
            return event.steps > 0
        case events.AttemptEnded() | events.RunEnded():
            return bool(event.num_reports)
        case _:
            return False


def get_requested_workers(config: Mapping[str, Any]) -> int:
    """Return the number of workers that a journaled configuration requests; the maximum if elastic.

    0 workers train in the driver, which counts as one. An unknown number is 0.
    """
    scaling = config.get("scaling_config")
    value = scaling.get("num_workers") if isinstance(scaling, Mapping) else None
    # "(1, 3)" if elastic. Other numbers of digits are damage.
    numbers = [int(number) for number in re.findall(r"\b[0-9]{1,9}\b", str(value)[:100])]
    return max(max(numbers), 1) if numbers else 0


class GoodputMeter:
    """Compute the goodput from the events of a run, one at a time.

    Times of events may be out of order, and the clock may be set back. Only positive differences
    between consecutive events count.

    Args:
        get_last_report_time: Returns the time of the last report of an attempt, or None. It is
            called for attempts of which the journal has no end: their driver was killed, perhaps
            long after its last event.
    """

    def __init__(self, get_last_report_time: Callable[[int], float | None]) -> None:
        self._get_last_report_time = get_last_report_time
        self.clock = 0.0  # seconds since the first event
        self._last_time: float | None = None
        self._parts: dict[str, float] = {}
        self._paused = 0.0
        self._worker_seconds = 0.0
        self._requested_workers = 0  # of the last start
        self._requested_since = 0.0  # clock at the last start
        self._requested_seconds = 0.0  # before the last start
        self._attempts: list[_AttemptWork] = []
        self._is_in_attempt = False
        self._waiting_part = "startup"  # of the time before the next training function
        self._waiting_since = 0.0
        self._has_ended_attempt = False
        self._outcome = ""  # of the last end of the run
        self._is_restart = False  # whether the run continues after a failure
        self._stalled_ranks = 0
        self._has_reported = False  # or has committed a checkpoint, or counted a step

    def apply(self, event: Event) -> None:
        """Add the next event of the journal. Other events do not change the goodput."""
        self._has_reported = self._has_reported or _is_report(event)
        match event:
            case events.RunStarted():
                self._on_run_started(event)
            case events.AttemptStarted():
                self._advance(event.time)
                self._on_attempt_started(event)
            case events.WorkersStarted():
                self._advance(event.time)
                if self._is_in_attempt:
                    self._on_workers_started(event)
            case events.UserFunctionStarted():
                self._on_function_started(event)
            case events.CheckpointCommitted():
                self._advance(event.time)
                self._settle_start()
                if self._is_in_attempt and self._attempts[-1].number == event.attempt:
                    work = self._attempts[-1]
                    work.commits.append(_Commit(event.index, self.clock, work.measured))
            case events.RankTimesRecorded():
                self._advance(event.time)
                self._settle_start()
                if self._attempts and self._attempts[-1].number == event.attempt:
                    self._on_rank_times(event)
            case events.RanksRecovered():
                self._advance(event.time)
                if self._is_in_attempt:
                    self._attempts[-1].recovery += max(event.stopped_seconds, 0.0)
            case events.RanksStalled():
                self._advance(event.time)
                self._stalled_ranks = len(event.descriptions)
            case events.AttemptEnded():
                self._advance(event.time)
                self._end_attempt(event.time - event.failure_time if event.failure_time else 0.0)
            case events.RunEnded():
                self._advance(event.time)
                self._on_run_ended(event)
            case _:
                pass

    def compute(self, *, now: float | None) -> Goodput:
        """Return the goodput.

        Args:
            now: Current time, in seconds since the epoch, or None if no process hosts the run. If
                the journal then has no end of the run, that process has died after the last event.
        """
        clock, is_active = self.clock, now is not None
        until = now if is_active else self._find_last_report_time()
        if until is not None and self._last_time is not None:
            clock += max(until - self._last_time, 0.0)
        parts = dict(self._parts)
        is_running = self._is_in_attempt and is_active
        for work in self._attempts[:-1]:
            work.add_parts(parts, rest="lost_work")
        worker_seconds = self._worker_seconds
        if self._attempts:
            self._add_last_attempt(parts, clock, is_running=is_running)
            if self._is_in_attempt and self._attempts[-1].workers:
                worker_seconds += self._attempts[-1].workers * (clock - self._attempts[-1].ready)
        waits = not self._outcome and (not self._is_in_attempt or self._attempts[-1].start is None)
        if waits and self._last_time is not None:
            part = self._waiting_part if not self._has_ended_attempt or is_active else "teardown"
            parts[part] = parts.get(part, 0.0) + clock - self._waiting_since
        # Events of a damaged journal may be missing or out of order. No second may be lost, because
        # the ratios would be too high.
        other = clock - sum(value for part, value in parts.items() if part != CRASH_GAP)
        if other > _ROUNDING_ERROR_S:
            parts["other"] = other
        if not self._has_reported and "productive" in parts:
            parts[UNREPORTED] = parts.pop("productive")
        requested = self._requested_workers * (clock - self._requested_since)
        return Goodput(
            parts={part: value for part, value in parts.items() if value > 0},
            paused=self._paused,
            worker_seconds=worker_seconds,
            requested_worker_seconds=self._requested_seconds + requested,
        )

    def _add_last_attempt(self, parts: dict[str, float], clock: float, *, is_running: bool) -> None:
        last = self._attempts[-1]
        start = last.start
        if self._is_in_attempt and start is not None and not last.is_start_settled:
            start = self._limit_start(start, clock)
            part = self._waiting_part
            parts[part] = parts.get(part, 0.0) + start - self._waiting_since
        end = clock if self._is_in_attempt else last.end
        work = replace(last, start=start, end=end)
        if self._is_in_attempt and not is_running:  # the process that hosted the run is dead
            work.keep_committed()
        work.add_parts(parts, rest="unsaved")

    # -- events

    def _advance(self, time: float) -> float:
        """Move the clock to the time of an event, and return by how much."""
        last = self._last_time
        if last is None or time < last - _MAX_CLOCK_DIFFERENCE_S:  # the clock was set back
            self._last_time = time
            return 0.0
        seconds = max(time - last, 0.0)
        self._last_time = max(time, last)
        self.clock += seconds
        if self._is_in_attempt and self._stalled_ranks:
            work = self._attempts[-1]
            work.stalled += seconds * self._stalled_ranks / max(work.workers, 1)
        return seconds

    def _add(self, part: str, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + max(seconds, 0.0)

    def _on_run_started(self, event: events.RunStarted) -> None:
        is_first = self._last_time is None
        if not is_first and not self._outcome:
            # The process that hosted the run has died.
            if (last_report_time := self._find_last_report_time()) is not None:
                self._advance(last_report_time)
            if self._is_in_attempt:
                self._end_attempt(0.0)
            self._add("teardown", self.clock - self._waiting_since)
        before = self.clock
        self._advance(event.time)
        gap, self.clock = self.clock - before, before
        self._requested_seconds += self._requested_workers * (before - self._requested_since)
        self._requested_workers, self._requested_since = get_requested_workers(event.config), before
        if self._outcome in ("stopped", "finished"):
            self._paused += gap
        elif not is_first:
            self._add(CRASH_GAP, gap)
        self._is_restart = not is_first and self._outcome not in ("stopped", "finished")
        self._outcome = ""
        self._waiting_part = "restart" if self._is_restart else "startup"
        self._waiting_since = self.clock
        self._has_ended_attempt = False

    def _find_last_report_time(self) -> float | None:
        """Return the time of the last report of an attempt in progress."""
        return (
            self._get_last_report_time(self._attempts[-1].number) if self._is_in_attempt else None
        )

    def _on_attempt_started(self, event: events.AttemptStarted) -> None:
        if self._is_in_attempt:  # the journal has lost its end
            self._end_attempt(0.0)
        for work in reversed(self._attempts):
            if work.keep_commits_before(event.first_report_index):
                break
        if not self._attempts:
            self._add("startup", self.clock - self._waiting_since)
            self._waiting_part, self._waiting_since = "placement", self.clock
        elif self._is_restart:
            self._waiting_part = "restart"
        self._attempts.append(_AttemptWork(event.attempt))
        self._is_in_attempt = True
        self._has_ended_attempt = False
        self._stalled_ranks = 0

    def _on_workers_started(self, event: events.WorkersStarted) -> None:
        work = self._attempts[-1]
        work.workers, work.ready, work.ready_time = len(event.workers), self.clock, event.time
        if self._waiting_part == "placement":
            self._add("placement", self.clock - self._waiting_since)
            self._waiting_part, self._waiting_since = "startup", self.clock

    def _on_function_started(self, event: events.UserFunctionStarted) -> None:
        if not self._is_in_attempt:
            return
        work = self._attempts[-1]
        if work.workers == 0:  # the journal has lost the start of the workers
            work.workers, work.ready, work.ready_time = 1, self.clock, event.time
        if not work.is_start_settled:
            start = work.ready + max(event.time - work.ready_time, 0.0)
            work.start = max(start, work.start or 0.0)

    def _settle_start(self) -> None:
        """Add the time before the training function, when the next event of the driver is known."""
        work = self._attempts[-1] if self._attempts else None
        if self._is_in_attempt and work and work.start is not None and not work.is_start_settled:
            work.start = self._limit_start(work.start, self.clock)
            work.is_start_settled = True
            self._add(self._waiting_part, work.start - self._waiting_since)

    def _limit_start(self, start: float, clock: float) -> float:
        # The clock of the node may be ahead of the driver's.
        return min(max(start, self._waiting_since), clock)

    def _on_rank_times(self, event: events.RankTimesRecorded) -> None:
        work = self._attempts[-1]
        work.measured = event.seconds
        if work.commits and self._is_in_attempt:
            # The first one after a commit has the times when the ranks reported it.
            last = work.commits[-1]
            if not last.has_own_times:
                last.seconds, last.has_own_times = event.seconds, True

    def _end_attempt(self, detection: float) -> None:
        """End the attempt, whose failure was handled `detection` seconds after it happened."""
        if not self._is_in_attempt:
            return
        self._settle_start()
        self._is_in_attempt, self._has_ended_attempt = False, True
        self._is_restart = True
        work = self._attempts[-1]
        self._worker_seconds += work.workers * (self.clock - work.ready)
        if work.start is None:  # the training function did not start
            self._add(self._waiting_part, self.clock - self._waiting_since)
        else:
            work.end = max(self.clock - max(detection, 0.0), work.start)
            self._add("detection", self.clock - work.end)
            work.keep_committed()
        self._waiting_part, self._waiting_since = "restart", self.clock

    def _on_run_ended(self, event: events.RunEnded) -> None:
        if self._is_in_attempt:
            work = self._attempts[-1]
            function_seconds = work.measured.get("function", 0.0)
            measured = work.measured
            ended = self.clock
            self._end_attempt(0.0)
            if event.outcome == "finished" and work.start is not None:
                if function_seconds:
                    work.end = min(max(work.start + function_seconds, work.start), ended)
                work.kept_until, work.measured = work.end, measured
                self._add("teardown", ended - (work.end or ended))
        else:
            self._add("teardown", self.clock - self._waiting_since)
        self._waiting_since = self.clock
        self._outcome = event.outcome
