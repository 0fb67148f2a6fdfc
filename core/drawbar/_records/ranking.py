"""Rank checkpoints and select those that retention deletes.

Pure decisions: the files are deleted elsewhere.
- The newest checkpoint is always kept, even with a poor score, because a restart resumes from it.
- A checkpoint that is being validated is kept and does not count, because its score is unknown.
- While no checkpoint has a score, all are kept: the name of the metric may be misspelled, or later
  reports may have it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import NamedTuple

from drawbar._base.metrics import describe_available, flatten
from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._storage.manifest import (
    BEST_CHECKPOINT_SOURCE,
    Manifest,
    ReportedCheckpointStatus,
)


def get_score(metrics: Mapping[str, object], attribute: str) -> float | None:
    """Return the metric that ranks a checkpoint.

    Args:
        metrics: Reported metrics; mappings can be nested.
        attribute: Key of the metric. An exact match takes precedence; otherwise "/" separates the
            keys of nested mappings, so that "eval/loss" finds `{"eval": {"loss": 0.1}}`.

    Returns:
        The metric, or None if it is missing, not a real number, NaN, or an integer that is too
        large for a float.
    """
    value = _look_up_metric(metrics, attribute)
    if not isinstance(value, Real):
        return None
    try:
        score = float(value)
    except OverflowError:
        return None
    return None if math.isnan(score) else score


def rank_checkpoints(checkpoints: Sequence[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """Sort checkpoints from worst to best.

    Without `checkpoint_score_attribute`, newer checkpoints are better. Otherwise, checkpoints
    without a score are the worst, for both "max" and "min", and the newer one of two equal
    checkpoints is better.
    """
    return sorted(checkpoints, key=lambda checkpoint: _make_rank_key(checkpoint, config))


class RankKey(NamedTuple):
    """Sort key of a checkpoint. Better checkpoints have higher keys."""

    has_score: bool
    score: float
    report_index: int


def _make_rank_key(checkpoint: Manifest, config: CheckpointConfig) -> RankKey:
    attribute = config.checkpoint_score_attribute
    score = None if attribute is None else get_score(checkpoint.metrics, attribute)
    if score is None:
        return RankKey(has_score=False, score=0.0, report_index=checkpoint.index)
    higher_is_better = config.checkpoint_score_order == "max"
    return RankKey(
        has_score=True,
        score=score if higher_is_better else -score,
        report_index=checkpoint.index,
    )


class SurplusQueue:
    """Checkpoints that are not being validated, worst first.

    They are in a sorted list, so that a commit does not have to sort them. An addition or
    removal among 10,000 checkpoints takes less than 0.1 ms.

    Args:
        config: Retention policy.
        checkpoints: Checkpoints to add.
    """

    def __init__(self, config: CheckpointConfig, checkpoints: Iterable[Manifest] = ()) -> None:
        self._config = config
        self._keys: dict[str, RankKey] = {}
        self._ranked: list[tuple[RankKey, str]] = []
        for checkpoint in checkpoints:
            self.add(checkpoint)

    def add(self, checkpoint: Manifest) -> None:
        """Add a checkpoint, or update its score after its validation."""
        self.remove(checkpoint.name)
        if self._config.num_to_keep is not None and _is_settled(checkpoint):
            key = self._keys[checkpoint.name] = _make_rank_key(checkpoint, self._config)
            bisect.insort(self._ranked, (key, checkpoint.name))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if it is in the queue."""
        if (key := self._keys.pop(name, None)) is not None:
            del self._ranked[bisect.bisect_left(self._ranked, (key, name))]

    def pop_surplus(self, newest: str) -> list[str]:
        """Remove and return the names of the checkpoints to delete, worst first.

        Args:
            newest: Name of the newest checkpoint, which is always kept.
        """
        num_to_keep = self._config.num_to_keep
        if num_to_keep is None or not self._can_rank():
            return []
        worst = self._ranked[: max(len(self._ranked) - num_to_keep, 0)]
        surplus = [name for _, name in worst if name != newest]
        for name in surplus:
            self.remove(name)
        return surplus

    def _can_rank(self) -> bool:
        """Return True if the newest checkpoints are kept, or if any checkpoint has a score."""
        if self._config.checkpoint_score_attribute is None:
            return True
        return bool(self._ranked) and self._ranked[-1][0].has_score


def select_surplus(checkpoints: Collection[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """Return the checkpoints to delete, worst first.

    Keeps the `num_to_keep` best of the checkpoints that are not being validated, and the newest. If
    the score ranks checkpoints and none of them has it, returns none.
    """
    if not checkpoints:
        return []
    by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.index)
    return [by_name[name] for name in SurplusQueue(config, checkpoints).pop_surplus(newest.name)]


def find_best_of_framework(checkpoints: Collection[Manifest]) -> set[str]:
    """Return the names of the checkpoints that the training framework calls its best.

    They are named by the newest checkpoint that names any; see
    `drawbar.train.backend.register_best_checkpoint`.
    """
    newest_first = sorted(checkpoints, key=lambda checkpoint: checkpoint.index, reverse=True)
    references = next(filter(None, map(_list_best_references, newest_first)), [])
    return {
        checkpoint.name
        for checkpoint in checkpoints
        if any(_refers_to(reference, checkpoint) for reference in references)
    }


def _list_best_references(checkpoint: Manifest) -> list[object]:
    positions = checkpoint.data_positions.items()
    return [value for name, value in positions if name.startswith(f"{BEST_CHECKPOINT_SOURCE}-")]


def _refers_to(reference: object, checkpoint: Manifest) -> bool:
    if isinstance(reference, Mapping):
        return reference.items() <= checkpoint.metrics.items()
    return reference == checkpoint.name


def describe_missing_scores(
    checkpoints: Collection[Manifest], config: CheckpointConfig
) -> str | None:
    """Return a message if there are checkpoints but none has a score, with the available metrics.

    Returns None if a checkpoint has a score, or may get one from a running validation.
    """
    attribute = config.checkpoint_score_attribute
    # This stops at the first score.
    if attribute is None or any(
        _is_settled(checkpoint) and get_score(checkpoint.metrics, attribute) is not None
        for checkpoint in checkpoints
    ):
        return None
    settled = [checkpoint for checkpoint in checkpoints if _is_settled(checkpoint)]
    if not settled:
        return None
    newest = max(settled, key=lambda checkpoint: checkpoint.index)
    setting = f"CheckpointConfig(checkpoint_score_attribute={attribute!r})"
    values = flatten(newest.metrics)
    if attribute in values:
        value = values[attribute]
        return f"{setting}: {newest.name} has the value {value!r}, which cannot be ranked."
    available = describe_available([newest.metrics], missing_name=attribute)
    return f"{setting}: {newest.name} does not have this metric. {available}"


def _is_settled(checkpoint: Manifest) -> bool:
    return checkpoint.status is not ReportedCheckpointStatus.PENDING_VALIDATION


def _look_up_metric(metrics: Mapping[str, object], attribute: str) -> object:
    if attribute in metrics:
        return metrics[attribute]
    for key, value in metrics.items():
        if isinstance(value, Mapping) and attribute.startswith(f"{key}/"):
            metric = _look_up_metric(value, attribute.removeprefix(f"{key}/"))
            if metric is not None:
                return metric
    return None
