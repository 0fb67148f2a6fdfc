"""Reply to ranks that query the list of committed checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from drawbar.train._config.validation_config import CheckpointConsistencyMode
from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.indexed_heap import IndexedHeap
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._protocol.commands import CheckpointListReply, Command
from drawbar.train._protocol.messages import CheckpointListRequest


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
        send_command: Callable[[int, Command], None],
    ) -> None:
        self._progress = progress
        self._commits = commits
        self._validations = validations
        self._send_command = send_command
        # Number of the rank's next report, by rank and request ID. The reply waits for the
        # checkpoints of all reports with a lower number, of all ranks.
        self._until_committed = IndexedHeap[tuple[int, int]]()
        self._until_validated = IndexedHeap[tuple[int, int]]()

    def add(self, rank: int, message: CheckpointListRequest) -> None:
        """Add a query. It replaces an earlier query of this rank with the same ID."""
        query = rank, message.request_id
        self._until_committed.discard(query)
        self._until_validated.discard(query)
        self._progress.on_checkpoints_requested(rank, message)
        # The number of reports cannot change, since the rank is blocked until it gets the reply.
        next_report = self._progress.ranks[rank].reports
        match message.consistency_mode:
            case CheckpointConsistencyMode.COMMITTED:
                self._until_committed.set(query, next_report)
            case CheckpointConsistencyMode.VALIDATED:
                self._until_validated.set(query, next_report)
            case None:
                self._reply([query])
        self.send_ready_replies()

    def send_ready_replies(self) -> None:
        """Reply to the queries whose checkpoints are committed, or also validated."""
        if not self._until_committed and not self._until_validated:
            return
        committed = min(self._progress.next_running_report, self._commits.first_uncommitted)
        validated = min(committed, self._validations.first_pending)
        ready = self._until_committed.pop_up_to(committed)
        ready += self._until_validated.pop_up_to(validated)
        if ready:
            self._reply(ready)

    def _reply(self, queries: list[tuple[int, int]]) -> None:
        checkpoints = self._commits.registry.list_entries()
        for rank, request_id in queries:
            self._progress.on_checkpoints_reply(rank)
            self._send_command(
                rank, CheckpointListReply(request_id=request_id, checkpoints=checkpoints)
            )

    @property
    def is_waiting_for_validation(self) -> bool:
        """True if a rank is blocked until validations have finished."""
        first_pending = self._validations.first_pending
        return any(first_pending < next_report for next_report in self._until_validated.values())
