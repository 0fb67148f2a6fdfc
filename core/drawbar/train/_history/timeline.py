"""How a run stands, and where its time went: folded from its journal's events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from drawbar.train._history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ControllerFailed,
    Event,
    JournalEntry,
    RanksStalled,
    ReportReceived,
    RunEnded,
    RunStarted,
    UserFunctionStarted,
    WorkersStarted,
)
from drawbar.train._metrics import Metrics

_MAX_PLAUSIBLE_SECONDS = 1e10  # in seconds: no clock has told that


@dataclass(kw_only=True)
class AttemptTimes:
    """One attempt. Times are in seconds since the epoch; None if it was not reached.

    Attributes:
        number: Number of the attempt.
        world_size: Number of workers, 0 if they did not start.
        started: The workers were asked for.
        workers_ready_time: Every process was up and had its ranks.
        function_started: The first line of the training function ran on the last rank.
        first_report_time: The first report came.
        ended: The attempt failed, or the run ended.
        outcome: "finished", "failed: ..." or "stopped".
        checkpoints: Number of checkpoints committed.
        checkpoint_seconds: Time that their commits took, together.
    """

    attempt: int
    start_time: float
    world_size: int = 0
    workers_ready_time: float | None = None
    function_start_time: float | None = None
    first_report_time: float | None = None
    end_time: float | None = None
    outcome: str = "unfinished"
    num_checkpoints: int = 0
    checkpoint_seconds: float = 0.0

    @property
    def startup_seconds(self) -> float | None:
        """From asking for workers to the first user line on the last rank."""
        if self.function_start_time is None:
            return None
        return self.function_start_time - self.start_time

    @property
    def total_seconds(self) -> float | None:
        """From asking for workers to the end of the attempt."""
        return None if self.end_time is None else self.end_time - self.start_time

    def __str__(self) -> str:
        startup, whole = _format_seconds(self.startup_seconds), _format_seconds(self.total_seconds)
        return (
            f"attempt {self.attempt}: {self.world_size} workers, start-up {startup}, whole "
            f"{whole}, "
            f"{self.num_checkpoints} checkpoints in {_format_seconds(self.checkpoint_seconds)}, "
            f"{self.outcome}"
        )


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if abs(seconds) < _MAX_PLAUSIBLE_SECONDS else "unknown"


@dataclass
class Timeline:
    """The attempts of a run, in order. Printing it gives one line for each."""

    attempts: list[AttemptTimes] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Timeline:
        """Build the timeline of these events."""
        timeline = cls()
        for event in events:
            timeline.note(event)
        return timeline

    def note(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, AttemptStarted):
            self.attempts.append(AttemptTimes(attempt=event.attempt, start_time=event.time))
        elif self.attempts:
            _apply_to_attempt(self.attempts[-1], event)

    def __str__(self) -> str:
        return "\n".join(map(str, self.attempts))


def _apply_to_attempt(attempt: AttemptTimes, event: Event) -> None:
    match event:
        case WorkersStarted():
            attempt.workers_ready_time = event.time
            attempt.world_size = len(event.workers)
        case UserFunctionStarted():
            attempt.function_start_time = max(event.time, attempt.function_start_time or 0.0)
        case ReportReceived() if attempt.first_report_time is None:
            attempt.first_report_time = event.time
        case CheckpointCommitted():
            attempt.num_checkpoints += 1
            attempt.checkpoint_seconds += event.seconds
        case AttemptEnded():
            attempt.end_time = event.time
            attempt.outcome = (
                f"failed: {event.failure_headlines[0] if event.failure_headlines else event.cause}"
            )
        case RunEnded() if attempt.end_time is None:
            attempt.end_time = event.time
            attempt.outcome = event.outcome
        case _:
            pass


FINAL_STATUSES = ("finished", "failed", "stopped")


@dataclass
class RunState:
    """How a run stands.

    Attributes:
        status: "starting", "running", "restarting", and in the end one of `ENDS`.
        metrics: What each rank reported last.
        quiet: What is said of each rank that gives no sign of life.
        timeline: The attempts so far.
        detached: Whether it was started to outlive its driver.
    """

    status: str = "starting"
    last_metrics: dict[int, Metrics] = field(default_factory=dict)
    stalled_ranks: dict[int, str] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    is_detached: bool = False

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> RunState:
        """Give how the run stands after these events."""
        snapshot = cls()
        for event in events:
            snapshot.apply(event)
        return snapshot

    def apply(self, event: Event) -> None:
        """Take note of the next event."""
        if not isinstance(event, JournalEntry | ControllerFailed):
            return  # it changes nothing here
        self.timeline.note(event)
        match event:
            case RunStarted():
                self.status = "starting"
                self.is_detached = event.detached
            # A start that fails and is tried again is still the start.
            case AttemptStarted() if self.status == "running":
                self.status = "restarting"
            case WorkersStarted():
                self.status = "running"
                # An elastic group may have fewer ranks than before.
                here = range(len(event.workers))
                self.last_metrics = {
                    rank: self.last_metrics[rank] for rank in here if rank in self.last_metrics
                }
            case ReportReceived():
                self.last_metrics[event.rank] = event.metrics
            case RanksStalled():
                self.stalled_ranks = event.descriptions
            case AttemptEnded():
                self.stalled_ranks = {}
            case RunEnded():
                self.status, self.stalled_ranks = event.outcome, {}
            case ControllerFailed():
                self.status, self.stalled_ranks = "failed", {}
            case _:
                pass
