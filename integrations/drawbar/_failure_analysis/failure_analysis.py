"""`FailureAnalysis`: the `FailurePolicy` of every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drawbar._failure_analysis.failure_history import FailureHistory
from drawbar._failure_analysis.fingerprint import make_fingerprints
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.verdict import FailedAttempt, Verdict
from drawbar._recovery.failure_config import FailureConfig
from drawbar._recovery.failure_policy import AttemptFailures


class FailureAnalysis:
    """Compares the failures of a run with each other.

    Args:
        attempts: Earlier failed attempts.
        config: Settings of failures.
    """

    def __init__(self, attempts: Sequence[FailedAttempt], config: FailureConfig) -> None:
        self._history = FailureHistory(
            attempts, config.stop_when_deterministic, config.exclude_nodes_after
        )

    def judge(self, failed: AttemptFailures, exclude_node: Callable[[str], bool]) -> Verdict | None:
        """Add the failures of an attempt, and return what follows from them."""
        fingerprints = make_fingerprints(
            failed.cause,
            failed.failures,
            failed.workers,
            failed.first_report_index,
            failed.last_report_times,
        )
        return self._history.judge(failed.attempt, fingerprints, exclude_node)

    def list_ranks_to_replace(self, failures: Sequence[WorkerFailure]) -> set[int]:
        """Return the ranks that must have another process in the next attempt."""
        return self._history.list_ranks_to_replace(failures)
