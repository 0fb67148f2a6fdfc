"""Outcome of a run, with its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from drawbar._handle.result import Result
from drawbar._process.errors import TrainingFailedError
from drawbar._process.serialization import Serialized
from drawbar._records.timeline import RunState
from drawbar.train._controller.run import ControllerOutcome
from drawbar.train._protocol.messages import RankFinished

SerializedT = TypeVar("SerializedT", Serialized, bytes)


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run that has ended.

    Attributes:
        outcome: Return values or error.
        snapshot: Final state of the run.
        result: None if the run failed.

    Example:
        ```python
        sender.send_bytes(run.get_outcome().serialize(cloudpickle.dumps))  # to another process
        ```
    """

    outcome: ControllerOutcome
    snapshot: RunState
    result: Result | None = None

    def get_result(self) -> Result:
        """Return the result with the return values.

        Raises:
            TrainingFailedError: The run failed.
        """
        if self.outcome.error is not None:
            raise self.outcome.error
        assert self.result is not None  # it has not failed
        values = self.outcome.finished
        # Deserialize only here: the process of the controller may not be able to import the
        # classes.
        self.result.return_values = [
            _load_return_value(rank, values[rank]) for rank in sorted(values)
        ]
        return self.result

    def serialize(self, serializer: Callable[[object], SerializedT]) -> SerializedT:
        """Serialize the outcome for another process or a file.

        Return values stay as the workers serialized them.
        """
        try:
            serialized = serializer(self)
        except Exception:  # an error whose cause cannot be pickled
            error = self.outcome.error
            plain_error = TrainingFailedError(str(error), path=getattr(error, "path", ""))
            serialized = serializer(replace(self, outcome=ControllerOutcome(error=plain_error)))
        return serialized


def _load_return_value(rank: int, finished: RankFinished) -> object:
    """Return a rank's return value, or None with a warning if it cannot be deserialized."""
    if finished.return_value is None:
        return None  # the function returned None, or the console has shown why there is no value
    try:
        return finished.return_value.deserialize()
    except Exception as error:
        message = f"the return value of rank {rank} is lost, because it cannot be deserialized here"
        warnings.warn(f"{message}: {error!r}", stacklevel=5)
        return None
