"""Events of a run in progress, for callbacks that watch it in more detail.

Example:
    Send an alert when ranks stall:

        from drawbar.train import UserCallback, events

        class AlertOnStall(UserCallback):
            def on_event(self, run_context, event):
                match event:
                    case events.RanksStalled():
                        send_alert(run_context.name, event.descriptions)

Later versions can add types of events and attributes.
"""

from drawbar._base.api import set_public_module
from drawbar._records.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    HealthDecided,
    RanksRecovered,
    RanksStalled,
    RunEnded,
    StragglerFound,
)
from drawbar._records.live_events import (
    Notice,
    ObservationReceived,
    ProgressReceived,
    ReportsReceived,
)

Event = (
    AttemptStarted
    | AttemptEnded
    | CheckpointCommitted
    | CheckpointDeleted
    | CheckpointValidated
    | HealthDecided
    | RanksRecovered
    | RanksStalled
    | StragglerFound
    | RunEnded
    | ReportsReceived
    | ProgressReceived
    | ObservationReceived
    | Notice
)
"""Events that `UserCallback.on_event` receives."""

__all__ = [
    "AttemptEnded",
    "AttemptStarted",
    "CheckpointCommitted",
    "CheckpointDeleted",
    "CheckpointValidated",
    "Event",
    "HealthDecided",
    "Notice",
    "ObservationReceived",
    "ProgressReceived",
    "RanksRecovered",
    "RanksStalled",
    "ReportsReceived",
    "RunEnded",
    "StragglerFound",
]

set_public_module(globals())
