"""Reply to ranks that request the list of committed checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.indexed_heap import IndexedHeap
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._messages import CheckpointConsistencyMode, CheckpointsAsked
from drawbar.train._orders import CheckpointsAnswer, Order


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
        # By rank and request number: next report of the rank. A request covers the reports before.
        self._until_committed = IndexedHeap[tuple[int, int]]()
        self._until_validated = IndexedHeap[tuple[int, int]]()

    def add(self, rank: int, request: CheckpointsAsked) -> None:
        """Add a request. It replaces an earlier request of the same number."""
        query = rank, request.number
        self._until_committed.discard(query)
        self._until_validated.discard(query)
        self._progress.on_checkpoints_requested(rank, request)
        # The number of reports cannot change, since the rank is blocked until it gets the reply.
        next_report = self._progress.ranks[rank].reports
        match request.until:
            case CheckpointConsistencyMode.COMMITTED:
                self._until_committed.set(query, next_report)
            case CheckpointConsistencyMode.VALIDATED:
                self._until_validated.set(query, next_report)
            case None:
                self._reply([query])
        self.reply_to_ready()

    def reply_to_ready(self) -> None:
        """Reply to the requests whose checkpoints are ready."""
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
        for rank, number in queries:
            self._progress.on_checkpoints_reply(rank)
            self._send_command(rank, CheckpointsAnswer(number=number, checkpoints=checkpoints))

    @property
    def is_waiting_for_validation(self) -> bool:
        """True if a rank is blocked until validations have finished."""
        first_pending = self._validations.first_pending
        return any(first_pending < next_report for next_report in self._until_validated.values())
