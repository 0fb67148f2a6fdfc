"""What ranks want to know of the run's checkpoints, until it can be answered."""

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
    """A rank wants to know the checkpoints, once those before report `before` are so far."""

    consistency_mode: CheckpointConsistencyMode | None
    next_report: int


class CheckpointQueries:
    """The questions of an attempt's ranks. Each is answered when all that it asks for is there.

    Args:
        progress: How often each rank has reported.
        commits: Has the checkpoints.
        validations: Those that have not ended.
        order: Gives one rank an order.
    """

    def __init__(
        self,
        progress: AttemptProgress,
        commits: CheckpointCommitter,
        validations: ValidationScheduler,
        order: Callable[[int, Order], None],
    ) -> None:
        self._progress = progress
        self._commits = commits
        self._validations = validations
        self._order = order
        self._queries: dict[tuple[int, int], _Query] = {}  # by rank and number

    def add(self, rank: int, asked: CheckpointsAsked) -> None:
        """Take a question. One under the same number takes the place of the first."""
        # It counts the reports made so far, since the rank stands still until it has the answer.
        before = self._progress.ranks[rank].reports
        self._queries[rank, asked.number] = _Query(asked.until, before)
        self._progress.on_checkpoints_requested(rank, asked)
        self.reply_to_ready()

    def reply_to_ready(self) -> None:
        """Tell the ranks whose questions can be answered by now."""
        for (rank, number), question in list(self._queries.items()):
            if self._is_ready(question):
                del self._queries[rank, number]
                self._progress.on_checkpoints_reply(rank)
                self._order(
                    rank,
                    CheckpointsAnswer(
                        number=number, checkpoints=self._commits.registry.list_entries()
                    ),
                )

    def _is_ready(self, question: _Query) -> bool:
        before = question.next_report
        if question.consistency_mode is None:
            return True
        if self._progress.has_missing_reports(before) or self._commits.has_uncommitted(before):
            return False
        validated = question.consistency_mode is CheckpointConsistencyMode.VALIDATED
        return not (validated and self._validations.has_pending(before))

    @property
    def is_waiting_for_validation(self) -> bool:
        """Whether a rank stands still until validations have ended."""
        return any(
            question.consistency_mode is CheckpointConsistencyMode.VALIDATED
            and self._validations.has_pending(question.next_report)
            for question in self._queries.values()
        )
