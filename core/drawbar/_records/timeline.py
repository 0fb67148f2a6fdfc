"""Timings of each attempt and the current state of a run, computed from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from drawbar._base.api import set_public_module
from drawbar._base.metrics import Metrics
from drawbar._base.wording import format_count
from drawbar._records import events, live_events
from drawbar._records.live_events import Event
from drawbar._records.run_progress import RunProgress

_MAX_PLAUSIBLE_SECONDS = 1e10  # larger values come from a damaged journal or a wrong clock


@dataclass(kw_only=True)
class AttemptTimes:
    """Timings and outcome of an attempt.

    Times are in seconds since the epoch, and None if the event did not happen.

    Attributes:
        attempt: Number of the attempt.
        world_size: Number of workers; 0 if they did not start.
        start_time: Time when the workers were requested.
        workers_ready_time: Time when all processes were running and had their ranks.
        function_start_time: Time when the last rank ran the first line of the training function.
        first_report_time: Time of the first report.
        end_time: Time when the attempt failed, or the run ended.
        outcome: "finished", "failed: ...", "stopped", or "unfinished".
        num_checkpoints: Number of committed checkpoints.
        checkpoint_seconds: Total duration of their commits in seconds.
        decision: After a failure of ranks: whether the run restarts, its cause, and the evidence.

    Example:
        Print how long each attempt took to start:

            for attempt in result.timeline.attempts:
                print(attempt.attempt, attempt.startup_seconds, attempt.outcome)
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
    decision: str = ""

    @property
    def startup_seconds(self) -> float | None:
        """Time in seconds from the request for workers until all ranks run the training function.

        None if the function did not start.
        """
        if self.function_start_time is None:
            return None
        return self.function_start_time - self.start_time

    @property
    def total_seconds(self) -> float | None:
        """Time in seconds from the request for workers to the end of the attempt."""
        return None if self.end_time is None else self.end_time - self.start_time

    def __str__(self) -> str:
        startup, total = _format_seconds(self.startup_seconds), _format_seconds(self.total_seconds)
        return (
            f"attempt {self.attempt}: {format_count(self.world_size, 'worker')}, "
            f"start-up {startup}, total {total}, {self.outcome}"
        )


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if abs(seconds) < _MAX_PLAUSIBLE_SECONDS else "unknown"


@dataclass
class Timeline:
    """Attempts of a run, in order. `str(timeline)` has one line per attempt.

    Attributes:
        attempts: Timings of each attempt.

    Example:
        Print how long each attempt took:

            print(result.timeline)
            print([attempt.total_seconds for attempt in result.timeline.attempts])
    """

    attempts: list[AttemptTimes] = field(default_factory=list)

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Timeline:
        """Build the timeline from events.

        Args:
            events: Events of a run, in order.

        Returns:
            The timeline.
        """
        timeline = cls()
        for event in events:
            timeline.apply(event)
        return timeline

    def apply(self, event: Event) -> None:
        """Update the timeline with the next event.

        Args:
            event: The event.
        """
        if isinstance(event, events.AttemptStarted):
            self.attempts.append(AttemptTimes(attempt=event.attempt, start_time=event.time))
        elif self.attempts:
            _apply_to_attempt(self.attempts[-1], event)

    def __str__(self) -> str:
        return "\n".join(map(str, self.attempts))


def _apply_to_attempt(attempt: AttemptTimes, event: Event) -> None:
    match event:
        case events.WorkersStarted():
            attempt.workers_ready_time = event.time
            attempt.world_size = len(event.workers)
        case events.UserFunctionStarted():
            attempt.function_start_time = max(event.time, attempt.function_start_time or 0.0)
        case events.FirstReportReceived() if attempt.first_report_time is None:
            attempt.first_report_time = event.time
        case events.CheckpointCommitted():
            attempt.num_checkpoints += 1
            attempt.checkpoint_seconds += event.seconds
        case events.AttemptEnded():
            attempt.end_time = event.time
            attempt.outcome = (
                f"failed: {event.failure_headlines[0] if event.failure_headlines else event.cause}"
            )
            attempt.decision = _describe_decision(event)
        case events.RunEnded() if attempt.end_time is None:
            attempt.end_time = event.time
            attempt.outcome = event.outcome
        case _:
            pass


def _describe_decision(event: events.AttemptEnded) -> str:
    decision = f"restart ({event.budget})" if event.budget else "stop"
    if event.rollback is not None:
        return f"{decision}, {event.rollback.describe()}"
    if event.verdict is None:
        return ""
    return f"{decision}, {event.verdict.describe()}"


FINAL_STATUSES = ("finished", "failed", "stopped")


@dataclass
class RunState:
    """Current state of a run.

    Attributes:
        status: "starting", "running", "restarting", or one of `FINAL_STATUSES`.
        last_metrics: Last reported metrics of each rank.
        stalled_ranks: Description of each stalled rank.
        timeline: Attempts so far.
        num_workers: Number of workers of the last attempt that started them.
        is_detached: Whether the run can outlive its driver.
        config: Configuration of the last start, as JSON values and reprs.
        error: Error of a failed run, or "".
        progress: Latest progress of rank 0; None if it was never set.

    Example:
        ```python
        print(run.get_state().status)
        ```
    """

    status: str = "starting"
    last_metrics: dict[int, Metrics] = field(default_factory=dict)
    stalled_ranks: dict[int, str] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    num_workers: int = 0
    is_detached: bool = False
    config: dict[str, object] = field(default_factory=dict)
    error: str = ""
    progress: RunProgress | None = None

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> RunState:
        """Return the state after these events."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    def apply(self, event: Event) -> None:
        """Update the state with the next event."""
        if isinstance(event, live_events.ReportsReceived):
            self.last_metrics[event.rank] = event.metrics[-1]
        if isinstance(event, live_events.ProgressReceived | events.ProgressRecorded):
            self.progress = event.progress
        if not isinstance(event, events.JournalEntry | live_events.ControllerFailed):
            return  # does not change anything else
        self.timeline.apply(event)
        if isinstance(event, events.AttemptStarted) and self.progress is not None:
            # The rate and the ETA count only the current attempt.
            self.progress = msgspec.structs.replace(self.progress, rate=None)
        match event:
            case events.RunStarted():
                # A driver may have been killed while ranks were stalled.
                self.status, self.error, self.stalled_ranks = "starting", "", {}
                self.is_detached, self.config = event.detached, event.config
            # While the first start of the workers is retried, the status remains "starting".
            case events.AttemptStarted() if self.status == "running":
                self.status = "restarting"
            case events.WorkersStarted():
                self.status, self.num_workers = "running", len(event.workers)
                # An elastic run may have fewer ranks than before: drop the metrics of the others.
                ranks = range(self.num_workers)
                self.last_metrics = {
                    rank: self.last_metrics[rank] for rank in ranks if rank in self.last_metrics
                }
            case events.RanksStalled():
                self.stalled_ranks = event.descriptions
            case events.AttemptEnded():
                self.stalled_ranks = {}
            case events.RunEnded():
                self.status, self.error, self.stalled_ranks = event.outcome, event.error, {}
            case live_events.ControllerFailed():
                self.status, self.stalled_ranks = "failed", {}
            case _:
                pass


set_public_module(globals(), module="drawbar.train", names=["AttemptTimes", "Timeline"])
