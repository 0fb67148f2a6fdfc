"""Reply to ranks that query the list of committed checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._messages import CheckpointConsistencyMode, CheckpointsAsked
from drawbar.train._orders import CheckpointsAnswer, Order


@dataclass(frozen=True)
class _Query:
    """Query of a rank for the list of checkpoints.

    Attributes:
        consistency_mode: State of the checkpoints that the reply waits for; None does not wait.
        next_report: Number of the rank's next report. The reply waits for the checkpoints of all
            reports with a lower number, of all ranks.
    """

    consistency_mode: CheckpointConsistencyMode | None
    next_report: int


class CheckpointQueries:
    """Unanswered queries of one attempt's ranks for the list of checkpoints.

    Args:
        progress: Progress of the ranks: which reports they have made.
        commits: Commits checkpoints, and has the registry of committed checkpoints.
        validations: Validates checkpoints.
        send_command: Sends a command to one rank.
    """

    def __init__(
        self,
        progress: AttemptProgress,
        commits: CheckpointCommitter,
        validations: ValidationScheduler,
        send_command: Callable[[int, Order], None],
    ) -> None:
        self._progress = progress
        self._commits = commits
        self._validations = validations
        self._send_command = send_command
        self._queries: dict[tuple[int, int], _Query] = {}  # by rank and query number

    def add(self, rank: int, message: CheckpointsAsked) -> None:
        """Add a query. It replaces an earlier query of this rank with the same number."""
        # The number of reports cannot change, since the rank is blocked until it gets the reply.
        next_report = self._progress.ranks[rank].reports
        self._queries[rank, message.number] = _Query(message.until, next_report)
        self._progress.on_checkpoints_requested(rank, message)
        self.send_ready_replies()

    def send_ready_replies(self) -> None:
        """Reply to the queries whose checkpoints are committed, or also validated."""
        for (rank, number), query in list(self._queries.items()):
            if self._is_ready(query):
                del self._queries[rank, number]
                self._progress.on_checkpoints_reply(rank)
                self._send_command(
                    rank,
                    CheckpointsAnswer(
                        number=number, checkpoints=self._commits.registry.list_entries()
                    ),
                )

    def _is_ready(self, query: _Query) -> bool:
        next_report = query.next_report
        if query.consistency_mode is None:
            return True
        if self._progress.has_missing_reports(next_report):
            return False
        if self._commits.has_uncommitted(next_report):
            return False
        must_be_validated = query.consistency_mode is CheckpointConsistencyMode.VALIDATED
        return not (must_be_validated and self._validations.has_pending(next_report))

    @property
    def is_waiting_for_validation(self) -> bool:
        """True if a rank is blocked until validations have finished."""
        return any(
            query.consistency_mode is CheckpointConsistencyMode.VALIDATED
            and self._validations.has_pending(query.next_report)
            for query in self._queries.values()
        )
