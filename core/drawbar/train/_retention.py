"""Which checkpoints stay, and which is best. Pure: the files are deleted elsewhere.

The newest checkpoint always stays, however poor its score, since a restart begins there. One that
is being validated stays too, and pushes no other one out: its score is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from drawbar.train._config import CheckpointConfig
from drawbar.train._manifest import Manifest
from drawbar.train._validation import ReportedCheckpointStatus


def score(metrics: Mapping[str, Any], attribute: str) -> float | None:
    """Look up the metric that ranks a checkpoint.

    Args:
        metrics: As reported; mappings may be nested.
        attribute: The metric's key. A key that is there as written wins; otherwise "/" separates
            the keys of nested mappings, so that "eval/loss" finds `{"eval": {"loss": 0.1}}`.

    Returns:
        The metric, or None if it is missing, not a real number, or NaN.
    """
    value = _find(metrics, attribute)
    if not isinstance(value, Real) or math.isnan(value):
        return None
    return float(value)


def ranked(checkpoints: Sequence[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """Sort checkpoints from worst to best.

    Without `checkpoint_score_attribute` newer is better. With it, a checkpoint that has no score is
    worse than every one that has, for "max" and for "min"; of equal scores the newer is better.
    """

    def key(checkpoint: Manifest) -> tuple[bool, float, int]:
        attribute = config.checkpoint_score_attribute
        found = None if attribute is None else score(checkpoint.metrics, attribute)
        if found is None:
            return (False, 0.0, checkpoint.index)
        higher_is_better = config.checkpoint_score_order == "max"
        return (True, found if higher_is_better else -found, checkpoint.index)

    return sorted(checkpoints, key=key)


def to_delete(checkpoints: Sequence[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """List what to delete, worst first.

    All but the `num_to_keep` best of those that are not being validated, and the newest.
    """
    if config.num_to_keep is None or not checkpoints:
        return []
    newest = max(checkpoint.index for checkpoint in checkpoints)
    pending = ReportedCheckpointStatus.PENDING_VALIDATION
    settled = [checkpoint for checkpoint in checkpoints if checkpoint.status is not pending]
    surplus = ranked(settled, config)[: -config.num_to_keep]
    return [checkpoint for checkpoint in surplus if checkpoint.index != newest]


def _find(metrics: Mapping[str, Any], attribute: str) -> object:
    if attribute in metrics:
        return metrics[attribute]
    for key, value in metrics.items():
        if isinstance(value, Mapping) and attribute.startswith(f"{key}/"):
            found = _find(value, attribute.removeprefix(f"{key}/"))
            if found is not None:
                return found
    return None
