"""Which checkpoints stay, and which is best. Pure: the files are deleted elsewhere.

The newest checkpoint always stays, however poor its score, since a restart begins there. One that
is being validated stays too, and pushes no other one out: its score is not known yet. As long as no
checkpoint has a score, all stay: the name of the score may be misspelt, or come with later reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._history.events import RunStarted
from drawbar.train._metrics import describe_available, flatten
from drawbar.train._storage.manifest import Manifest, ReportedCheckpointStatus


def parse_checkpoint_config(event: RunStarted) -> CheckpointConfig:
    """Give how a start ranked checkpoints, as far as this version knows its settings."""
    journaled = event.config.get("checkpoint_config")
    settings = journaled if isinstance(journaled, Mapping) else {}
    known = {each.name for each in fields(CheckpointConfig)}
    try:
        # A run of an older or newer version may know other settings.
        return CheckpointConfig(**{k: v for k, v in settings.items() if k in known})
    except (TypeError, ValueError):
        return CheckpointConfig()


def get_score(metrics: Mapping[str, object], attribute: str) -> float | None:
    """Look up the metric that ranks a checkpoint.

    Args:
        metrics: As reported; mappings may be nested.
        attribute: The metric's key. A key that is there as written wins; otherwise "/" separates
            the keys of nested mappings, so that "eval/loss" finds `{"eval": {"loss": 0.1}}`.

    Returns:
        The metric, or None if it is missing, not a real number, NaN, or an integer that is too
        large for a float.
    """
    value = _look_up_metric(metrics, attribute)
    if not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return None if math.isnan(found) else found


def rank_checkpoints(checkpoints: Sequence[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """Sort checkpoints from worst to best.

    Without `checkpoint_score_attribute` newer is better. With it, a checkpoint that has no score is
    worse than every one that has, for "max" and for "min"; of equal scores the newer is better.
    """

    def key(checkpoint: Manifest) -> tuple[bool, float, int]:
        attribute = config.checkpoint_score_attribute
        found = None if attribute is None else get_score(checkpoint.metrics, attribute)
        if found is None:
            return (False, 0.0, checkpoint.index)
        higher_is_better = config.checkpoint_score_order == "max"
        return (True, found if higher_is_better else -found, checkpoint.index)

    return sorted(checkpoints, key=key)


def select_surplus(checkpoints: Sequence[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """List what to delete, worst first.

    All but the `num_to_keep` best of those that are not being validated, and the newest. None, if
    they are ranked by a score and none of them has one.
    """
    settled = _exclude_pending(checkpoints)
    if config.num_to_keep is None or not settled or not _can_rank(settled, config):
        return []
    newest = max(checkpoint.index for checkpoint in checkpoints)
    surplus = rank_checkpoints(settled, config)[: -config.num_to_keep]
    return [checkpoint for checkpoint in surplus if checkpoint.index != newest]


def describe_missing_scores(
    checkpoints: Sequence[Manifest], config: CheckpointConfig
) -> str | None:
    """Say that there are checkpoints and none has a score, and what they have instead.

    None if one has a score, or may get it from a validation that goes on.
    """
    settled = _exclude_pending(checkpoints)
    attribute = config.checkpoint_score_attribute
    if not settled or attribute is None or _can_rank(settled, config):
        return None
    newest = max(settled, key=lambda checkpoint: checkpoint.index)
    setting = f"CheckpointConfig(checkpoint_score_attribute={attribute!r})"
    values = flatten(newest.metrics)
    if attribute in values:
        return f"{setting}: that is {values[attribute]!r} in {newest.name}, which ranks nothing."
    there_are = describe_available([newest.metrics], missing_name=attribute)
    return f"{setting}: {newest.name} has no such metric. {there_are}"


def _exclude_pending(checkpoints: Sequence[Manifest]) -> list[Manifest]:
    pending = ReportedCheckpointStatus.PENDING_VALIDATION
    return [checkpoint for checkpoint in checkpoints if checkpoint.status is not pending]


def _can_rank(checkpoints: Sequence[Manifest], config: CheckpointConfig) -> bool:
    attribute = config.checkpoint_score_attribute
    return attribute is None or any(
        get_score(c.metrics, attribute) is not None for c in checkpoints
    )


def _look_up_metric(metrics: Mapping[str, object], attribute: str) -> object:
    if attribute in metrics:
        return metrics[attribute]
    for key, value in metrics.items():
        if isinstance(value, Mapping) and attribute.startswith(f"{key}/"):
            found = _look_up_metric(value, attribute.removeprefix(f"{key}/"))
            if found is not None:
                return found
    return None
