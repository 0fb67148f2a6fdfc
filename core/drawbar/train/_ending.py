"""What is left to tell when a run is over, to the process that waits for it or to another one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from drawbar.train._carry import Carried
from drawbar.train._errors import TrainingFailedError
from drawbar.train._messages import Finished
from drawbar.train._result import Result
from drawbar.train._run import Outcome
from drawbar.train._snapshot import Snapshot

Packed = TypeVar("Packed", Carried, bytes)


@dataclass(frozen=True)
class Ending:
    """A run that is over. It has a result unless it failed."""

    outcome: Outcome
    snapshot: Snapshot
    result: Result | None

    def settle(self) -> Result:
        """Give the result with the return values, or raise why the run failed."""
        if self.outcome.error is not None:
            raise self.outcome.error
        assert self.result is not None  # it has not failed
        values = self.outcome.values
        self.result.return_values = [_unpickled(rank, values[rank]) for rank in sorted(values)]
        return self.result

    def packed(self, pack: Callable[[object], Packed]) -> Packed:
        """Pack it for a process or a file; of what users made, only what their workers packed."""
        try:
            packed = pack(self)
        except Exception:  # an error whose cause does not pickle
            error = self.outcome.error
            plain = TrainingFailedError(str(error), path=getattr(error, "path", ""))
            packed = pack(replace(self, outcome=Outcome(error=plain)))
        return packed


def _unpickled(rank: int, finished: Finished) -> Any:
    """Give a rank's return value; one that cannot be had is told, and does not fail the run."""
    if finished.value is None:
        return None  # the console has said why
    try:
        return finished.value.unpack()
    except Exception as error:
        why = f"it does not unpickle here: {error!r}"
        warnings.warn(f"the return value of rank {rank} is lost: {why}", stacklevel=5)
        return None
