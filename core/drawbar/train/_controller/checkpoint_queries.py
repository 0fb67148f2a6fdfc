"""Reply to ranks that request the list of committed checkpoints."""

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
    """Request for the checkpoints of the reports before `next_report`."""

    consistency_mode: CheckpointConsistencyMode | None
    next_report: int


class CheckpointQueries:
    """Open requests of an attempt's ranks for the list of checkpoints.

    A request is answered when the checkpoints that it covers are committed, or validated.

    Args:
        progress: Number of reports of each rank.
        commits: Commits of the run, with the registry of checkpoints.
        validations: Validations that have not finished.
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
        self._queries: dict[tuple[int, int], _Query] = {}  # by rank and request number

    def add(self, rank: int, request: CheckpointsAsked) -> None:
        """Add a request. It replaces an earlier request of the same number."""
        # The number of reports cannot change, since the rank is blocked until it gets the reply.
        next_report = self._progress.ranks[rank].reports
        self._queries[rank, request.number] = _Query(request.until, next_report)
        self._progress.on_checkpoints_requested(rank, request)
        self.reply_to_ready()

    def reply_to_ready(self) -> None:
        """Reply to the requests whose checkpoints are ready."""
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
