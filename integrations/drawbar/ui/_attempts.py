"""Attempts of a run, and the segments of its time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drawbar.train import AttemptTimes
from drawbar.ui._catalog import IndexedRun

Event = dict[str, Any]

_STATUS_OF_CAUSE = {"preemption": "preempted", "resize": "resized", "rollback": "rolled back"}


def was_ended_by_user(times: AttemptTimes) -> bool:
    """Return whether a stop or the end of the run ended an attempt, so the next is no restart."""
    return times.outcome in ("stopped", "finished")


@dataclass
class AttemptSpan:
    """An attempt and the events that belong to it.

    Attributes:
        times: Timings of the attempt.
        events: Events from its start to the start of the next attempt.
        end_time: Time of its end, or of its last event if it did not end.
        useful_end: Time of the commit from which the next attempt resumed, or of the last commit.
        failure_time: Time of the failure; the end if it is unknown.
        is_last: Whether no attempt follows.
    """

    times: AttemptTimes
    events: Sequence[Event]
    end_time: float
    useful_end: float
    failure_time: float
    is_last: bool

    @property
    def function_start(self) -> float:
        """Time of the first line of the training function, or the end without one."""
        started = self.times.function_start_time
        return self.end_time if started is None else min(started, self.end_time)

    def get(self, event_type: str) -> Event | None:
        """Return the first event of a type."""
        return next((event for event in self.events if event["event"] == event_type), None)

    @property
    def resumed_time(self) -> float:
        """Time at which the run continued after this attempt, at once or by a resume."""
        resumed = self.get("run_started")
        return max(self.end_time, resumed["time"]) if resumed else self.end_time


def split_attempts(run: IndexedRun, now: float) -> list[AttemptSpan]:
    """Return the attempts of a run with their events. An active one lasts until now."""
    groups: list[list[Event]] = []
    commits: dict[str, Event] = {}
    for event in run.events:
        if event["event"] == "attempt_started":
            groups.append([])
        if event["event"] == "checkpoint":
            commits[event["name"]] = event
        if groups:
            groups[-1].append(event)
    spans: list[AttemptSpan] = []
    pairs = list(zip(run.record.timeline.attempts, groups, strict=False))
    for number, (times, group) in enumerate(pairs):
        is_last = number == len(pairs) - 1
        last_time = run.record.last_event_time if is_last else None
        end = _find_end(times, group, now if is_last and run.is_active else last_time)
        span = AttemptSpan(times, group, end, end, end, is_last)
        if not is_last:
            resumed = get_resume_name(pairs[number + 1][1])
            span.useful_end = _find_useful_end(span, commits, resumed)
        elif not was_ended_by_user(times):
            last = max((e["time"] for e in group if e["event"] == "checkpoint"), default=0.0)
            span.useful_end = _clamp(span, last)
        failure_time = (span.get("attempt_ended") or {}).get("failure_time")
        span.failure_time = min(max(failure_time or end, span.useful_end), end)
        spans.append(span)
    return spans


def get_resume_name(events: Sequence[Event]) -> str | None:
    """Return the name of the checkpoint from which an attempt resumed; None without one."""
    path = events[0].get("resume_checkpoint")
    return None if path is None else str(path).rstrip("/").rpartition("/")[2]


def _find_end(times: AttemptTimes, group: Sequence[Event], last_time: float | None) -> float:
    if times.end_time is not None:
        return max(times.end_time, times.start_time)
    own = [float(event["time"]) for event in group if event["event"] != "run_started"]
    return max(times.start_time, last_time or 0.0, *own)


def _find_useful_end(span: AttemptSpan, commits: dict[str, Event], resumed: str | None) -> float:
    """Return the time of the commit that the next attempt used, within this attempt."""
    commit = commits.get(resumed or "")
    if commit is None or commit["attempt"] != span.times.attempt:
        return span.function_start
    return _clamp(span, float(commit["time"]))


def _clamp(span: AttemptSpan, moment: float) -> float:
    return min(max(moment, span.function_start), span.end_time)


def describe_attempts(run: IndexedRun, spans: Sequence[AttemptSpan]) -> list[dict[str, Any]]:
    """Return the attempts for the page of a run."""
    described = []
    previous: AttemptSpan | None = None
    for span in spans:
        times, ended = span.times, span.get("attempt_ended") or {}
        has_function = times.function_start_time is not None
        rest = span.failure_time - span.useful_end
        described.append(
            {
                **asdict(times),
                "last_activity_time": None,
                "resume_checkpoint": get_resume_name(span.events),
                "first_report": span.events[0].get("first_report_index"),
                "status": _get_status(run, span, ended.get("cause")),
                "failures": ended.get("failure_headlines", []),
                "startup": times.startup_seconds,
                "training": span.useful_end - span.function_start if has_function else None,
                "lost": 0.0 if span.is_last else rest,
                "unsaved": rest if span.is_last else 0.0,
                "detection": (
                    span.end_time - span.failure_time if ended.get("failure_time") else None
                ),
                "restart": (
                    max(0.0, span.function_start - previous.resumed_time)
                    if previous is not None and has_function
                    else None
                ),
                "num_reports": ended.get("num_reports"),
            }
        )
        previous = span
    return described


def _get_status(run: IndexedRun, span: AttemptSpan, cause: str | None) -> str:
    if cause is not None:
        return _STATUS_OF_CAUSE.get(cause, "failed")
    if span.times.end_time is not None:
        return span.times.outcome.split(":")[0]
    if span.is_last and run.is_active:
        return "running" if span.times.workers_ready_time is not None else "starting"
    return "interrupted"


def make_time_axis(spans: Sequence[AttemptSpan]) -> list[dict[str, Any]]:
    """Return the segments of the time axis in order, without overlaps."""
    axis: list[dict[str, Any]] = []
    position = spans[0].times.start_time if spans else 0.0

    def add(kind: str, attempt: int | None, end: float) -> None:
        nonlocal position
        if end > position:
            axis.append({"kind": kind, "attempt": attempt, "start": position, "end": end})
            position = end

    for number, span in enumerate(spans):
        attempt = span.times.attempt
        is_restart = number > 0 and not was_ended_by_user(spans[number - 1].times)
        add("restart" if is_restart else "startup", attempt, span.function_start)
        add("training", attempt, span.useful_end)
        add("unsaved" if span.is_last else "lost", attempt, span.failure_time)
        add("detection", attempt, span.end_time)
        if span.get("run_started"):
            add("paused" if was_ended_by_user(span.times) else "crash_gap", None, span.resumed_time)
    return axis
