"""View of a run whose controller is a thread of this process."""

from __future__ import annotations

from drawbar._handle.result import Result
from drawbar._handle.run_outcome import RunOutcome
from drawbar._handle.run_view import RunView
from drawbar.train._driver.controller_thread import ControllerThread


class InProcessRun(ControllerThread, RunView):
    """View of a run whose controller is a thread of this process."""

    def get_outcome(self) -> RunOutcome:
        """Return the outcome of the run, after its end."""
        outcome = self.get_controller_outcome()
        result = None if outcome.error else Result.from_run_directory(self.directory)
        return RunOutcome(outcome, self.get_state(), result)
