"""Interface between the controller and the analysis of failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from drawbar._process.ranks import WorkerInfo
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.events import AttemptEnded, JournaledEvent, RunStarted
from drawbar._records.verdict import FailedAttempt, Verdict
from drawbar._recovery.failure_config import FailureConfig


@dataclass(frozen=True, kw_only=True)
class AttemptFailures:
    """Failures of one attempt.

    Attributes:
        attempt: Number of the attempt.
        cause: Cause of the end of the attempt, as in `AttemptEnded`.
        failures: Failures, the root cause first.
        workers: Process of each rank, in rank order.
        first_report_index: Number of the first report of the attempt.
        last_report_times: By rank, time of its last report, or of the start of its function.
    """

    attempt: int
    cause: str
    failures: Sequence[WorkerFailure]
    workers: Sequence[WorkerInfo]
    first_report_index: int
    last_report_times: Mapping[int, float]


class FailurePolicy(Protocol):
    """Decides from the failures of a run whether a restart can help, and where."""

    def judge(self, failed: AttemptFailures, exclude_node: Callable[[str], bool]) -> Verdict | None:
        """Add the failures of an attempt, and return what follows from them.

        Args:
            failed: Failures of the attempt.
            exclude_node: Excludes a node. Returns False if the other nodes have no room.

        Returns:
            The verdict; None without failures of ranks.
        """
        ...

    def list_ranks_to_replace(self, failures: Sequence[WorkerFailure]) -> set[int]:
        """Return the ranks that must have another process in the next attempt."""
        ...


MakeFailurePolicy = Callable[[Sequence[FailedAttempt], FailureConfig], FailurePolicy]
"""Creates the policy of a run from its earlier failed attempts."""


def list_failed_attempts(events: Iterable[JournaledEvent]) -> list[FailedAttempt]:
    """Return the failed attempts since the settings of the run have changed last.

    Failures of earlier starts count, too: a scheduler may start a run again and again.

    Args:
        events: Events of the journal, with the newest start.
    """
    attempts: list[FailedAttempt] = []
    settings = b""
    for event in events:
        if isinstance(event, RunStarted):
            previous, settings = settings, msgspec.json.encode(event.config)
            if settings != previous:
                attempts = []
        elif isinstance(event, AttemptEnded) and event.verdict is not None:
            attempts.append((event.attempt, event.verdict.fingerprints))
    return attempts
