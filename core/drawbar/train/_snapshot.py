"""How a run stands: folded from its journal's events, while it goes on or afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from drawbar.train._journal import (
    AttemptFailed,
    AttemptStarted,
    Event,
    RanksQuiet,
    ReportReceived,
    RunEnded,
    RunStarted,
    WorkersStarted,
)
from drawbar.train._timeline import Timeline

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
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
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
        self.timeline.note(event)
        match event:
            case RunStarted():
                self.status = "starting"
                self.detached = event.detached
            case AttemptStarted() if self.status == "running":
                self.status = "restarting"
            case WorkersStarted():
                self.status = "running"
                here = range(len(event.workers))
                self.metrics = {rank: self.metrics[rank] for rank in here if rank in self.metrics}
            case ReportReceived():
                self.metrics[event.rank] = event.metrics
            case RanksQuiet():
                self.quiet = event.ranks
            case AttemptFailed():
                self.quiet = {}
            case RunEnded():
                self.status, self.quiet = event.outcome, {}
            case _:
                pass
