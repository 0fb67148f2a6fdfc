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
    Journaled,
    RanksQuiet,
    ReportReceived,
    RunEnded,
    RunStarted,
    UserFunctionStarted,
    WorkersStarted,
)
from drawbar.train._metrics import Metrics

_CENTURIES = 1e10  # in seconds: no clock has told that


@dataclass(kw_only=True)
class AttemptTimes:
    """One attempt. Times are in seconds since the epoch; None if it was not reached.

    Attributes:
        number: Number of the attempt.
        world_size: Number of workers, 0 if they did not start.
        started: The workers were asked for.
        workers_ready: Every process was up and had its ranks.
        function_started: The first line of the training function ran on the last rank.
        first_report: The first report came.
        ended: The attempt failed, or the run ended.
        outcome: "finished", "failed: ..." or "stopped".
        checkpoints: Number of checkpoints committed.
        checkpoint_seconds: Time that their commits took, together.
    """

    number: int
    started: float
    world_size: int = 0
    workers_ready: float | None = None
    function_started: float | None = None
    first_report: float | None = None
    ended: float | None = None
    outcome: str = "unfinished"
    checkpoints: int = 0
    checkpoint_seconds: float = 0.0

    @property
    def startup_seconds(self) -> float | None:
        """From asking for workers to the first user line on the last rank."""
        if self.function_started is None:
            return None
        return self.function_started - self.started

    @property
    def seconds(self) -> float | None:
        """From asking for workers to the end of the attempt."""
        return None if self.ended is None else self.ended - self.started

    def __str__(self) -> str:
        startup, whole = _shown(self.startup_seconds), _shown(self.seconds)
        return (
            f"attempt {self.number}: {self.world_size} workers, start-up {startup}, whole {whole}, "
            f"{self.checkpoints} checkpoints in {_shown(self.checkpoint_seconds)}, {self.outcome}"
        )


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if abs(seconds) < _CENTURIES else "unknown"


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
            self.attempts.append(AttemptTimes(number=event.attempt, started=event.time))
        elif self.attempts:
            _note(self.attempts[-1], event)

    def __str__(self) -> str:
        return "\n".join(map(str, self.attempts))


def _note(attempt: AttemptTimes, event: Event) -> None:
    match event:
        case WorkersStarted():
            attempt.workers_ready = event.time
            attempt.world_size = len(event.workers)
        case UserFunctionStarted():
            attempt.function_started = max(event.time, attempt.function_started or 0.0)
        case ReportReceived() if attempt.first_report is None:
            attempt.first_report = event.time
        case CheckpointCommitted():
            attempt.checkpoints += 1
            attempt.checkpoint_seconds += event.seconds
        case AttemptEnded():
            attempt.ended = event.time
            attempt.outcome = f"failed: {event.failures[0] if event.failures else event.kind}"
        case RunEnded() if attempt.ended is None:
            attempt.ended = event.time
            attempt.outcome = event.outcome
        case _:
            pass


ENDS = ("finished", "failed", "stopped")


@dataclass
class Snapshot:
    """How a run stands.

    Attributes:
        status: "starting", "running", "restarting", and in the end one of `ENDS`.
        metrics: What each rank reported last.
        quiet: What is said of each rank that gives no sign of life.
        timeline: The attempts so far.
        detached: Whether it was started to outlive its driver.
    """

    status: str = "starting"
    metrics: dict[int, Metrics] = field(default_factory=dict)
    quiet: dict[int, str] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    detached: bool = False

    @classmethod
    def of(cls, events: Iterable[Event]) -> Snapshot:
        """Give how the run stands after these events."""
        snapshot = cls()
        for event in events:
            snapshot.note(event)
        return snapshot

    def note(self, event: Event) -> None:
        """Take note of the next event."""
        if not isinstance(event, Journaled | ControllerFailed):
            return  # it changes nothing here
        self.timeline.note(event)
        match event:
            case RunStarted():
                self.status = "starting"
                self.detached = event.detached
            # A start that fails and is tried again is still the start.
            case AttemptStarted() if self.status == "running":
                self.status = "restarting"
            case WorkersStarted():
                self.status = "running"
                # An elastic group may have fewer ranks than before.
                here = range(len(event.workers))
                self.metrics = {rank: self.metrics[rank] for rank in here if rank in self.metrics}
            case ReportReceived():
                self.metrics[event.rank] = event.metrics
            case RanksQuiet():
                self.quiet = event.ranks
            case AttemptEnded():
                self.quiet = {}
            case RunEnded():
                self.status, self.quiet = event.outcome, {}
            case ControllerFailed():
                self.status, self.quiet = "failed", {}
            case _:
                pass
