"""What ranks want to know of the run's checkpoints, until it can be answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drawbar.train._controller.commits import Committer
from drawbar.train._controller.progress import Progress
from drawbar.train._controller.validations import Validations
from drawbar.train._messages import CheckpointConsistencyMode, CheckpointsAsked
from drawbar.train._orders import CheckpointsAnswer, Order


@dataclass(frozen=True)
class _Question:
    """A rank wants to know the checkpoints, once those before report `before` are so far."""

    until: CheckpointConsistencyMode | None
    before: int


class Questions:
    """The questions of an attempt's ranks. Each is answered when all that it asks for is there.

    Args:
        progress: How often each rank has reported.
        commits: Has the checkpoints.
        validations: Those that have not ended.
        order: Gives one rank an order.
    """

    def __init__(
        self,
        progress: Progress,
        commits: Committer,
        validations: Validations,
        order: Callable[[int, Order], None],
    ) -> None:
        self._progress = progress
        self._commits = commits
        self._validations = validations
        self._order = order
        self._asked: dict[tuple[int, int], _Question] = {}  # by rank and number

    def ask(self, rank: int, asked: CheckpointsAsked) -> None:
        """Take a question. One under the same number takes the place of the first."""
        # It counts the reports made so far, since the rank stands still until it has the answer.
        before = self._progress.ranks[rank].reports
        self._asked[rank, asked.number] = _Question(asked.until, before)
        self._progress.asked(rank, asked)
        self.answer()

    def answer(self) -> None:
        """Tell the ranks whose questions can be answered by now."""
        for (rank, number), question in list(self._asked.items()):
            if self._is_settled(question):
                del self._asked[rank, number]
                self._progress.answered(rank)
                self._order(
                    rank, CheckpointsAnswer(number=number, checkpoints=self._commits.kept.listing())
                )

    def _is_settled(self, question: _Question) -> bool:
        before = question.before
        if question.until is None:
            return True
        if self._progress.collecting(before) or self._commits.committing(before):
            return False
        validated = question.until is CheckpointConsistencyMode.VALIDATED
        return not (validated and self._validations.pending(before))

    @property
    def await_validation(self) -> bool:
        """Whether a rank stands still until validations have ended."""
        return any(
            question.until is CheckpointConsistencyMode.VALIDATED
            and self._validations.pending(question.before)
            for question in self._asked.values()
        )
