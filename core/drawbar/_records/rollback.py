"""`Rollback`: a run has left its newest checkpoints and a part of its data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from drawbar._base.wording import format_count


class _Committed(Protocol):
    """Identity of a checkpoint, as in `Manifest`. A later one may have the same name."""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        ...

    @property
    def attempt(self) -> int:
        """Number of the attempt that committed it."""
        ...


_CommittedT = TypeVar("_CommittedT", bound=_Committed)


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `drawbar.train.rollback`.

    Attributes:
        attempt: Number of the attempt that ended.
        reason: Reason that the training function passed.
        skip: Number of batches that the data loader skips after its position at the call.
        report_index: Number of reports of the run before the call.
        checkpoint: Name of the checkpoint from which the run resumes, "" if it starts again.
        discarded: Names of the newer checkpoints, from which the run never resumes.
        data_positions: Positions of the data sources after the skipped batches.

    Example: `print(event.rollback.reason, event.rollback.checkpoint)`
    """

    attempt: int
    reason: str
    skip: int
    report_index: int
    checkpoint: str
    discarded: list[str] = []
    data_positions: dict[str, object] = {}

    def discards(self, checkpoint: _Committed) -> bool:
        """Return whether no attempt resumes from this checkpoint any longer."""
        return checkpoint.name in self.discarded and checkpoint.attempt <= self.attempt

    def describe(self) -> str:
        """Return a line for users."""
        target = self.checkpoint or "the start of the run"
        text = (
            f"rolled back after {format_count(self.report_index, 'report')} to {target}, "
            f"skipping {self.skip} {'batch' if self.skip == 1 else 'batches'}: {self.reason}"
        )
        if not self.discarded:
            return text
        return f"{text}. Not used any longer: {', '.join(self.discarded)}"


def decide_rollback(
    committed: Sequence[str],
    *,
    attempt: int,
    reason: str,
    skip: int,
    to: int,
    report_index: int,
    data_positions: dict[str, object],
) -> Rollback:
    """Choose the checkpoint to which a run returns.

    Args:
        committed: Names of the committed checkpoints, oldest first.
        attempt: Number of the attempt that ended.
        reason: Reason for users.
        skip: Number of skipped batches.
        to: Number of checkpoints to go back; 1 is the latest one. If there are fewer, the oldest
            one is chosen.
        report_index: Number of reports before the call.
        data_positions: Positions after the skipped batches.
    """
    kept = max(len(committed) - to + 1, min(len(committed), 1))
    return Rollback(
        attempt=attempt,
        reason=reason,
        skip=skip,
        report_index=report_index,
        checkpoint=committed[kept - 1] if kept else "",
        discarded=list(committed[kept:]),
        data_positions=data_positions,
    )


def remove_discarded(
    committed: Iterable[_CommittedT], rollbacks: Collection[Rollback]
) -> list[_CommittedT]:
    """Return the checkpoints from which a run can resume after its rollbacks."""
    return [each for each in committed if not any(r.discards(each) for r in rollbacks)]


def find_positions(
    rollbacks: Iterable[Rollback], checkpoint: _Committed | None
) -> dict[str, object] | None:
    """Return the positions at which an attempt resumes instead of those in its checkpoint.

    Args:
        rollbacks: Rollbacks of the run, oldest first.
        checkpoint: Checkpoint of this run from which the attempt resumes; None without one.

    Returns:
        None if no rollback has returned to this checkpoint.
    """
    positions = None
    for rollback in rollbacks:
        is_target = rollback.checkpoint == (checkpoint.name if checkpoint else "")
        if is_target and (checkpoint is None or checkpoint.attempt <= rollback.attempt):
            positions = rollback.data_positions
    return positions
