"""Rank checkpoints and select those that retention deletes.

Pure decisions: the files are deleted elsewhere.
- The newest checkpoint is always kept, even with a poor score, because a restart resumes from it.
- A checkpoint that is being validated is kept and does not count, because its score is unknown.
- While no checkpoint has a score, all are kept: the name of the metric may be misspelled, or later
  reports may have it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from numbers import Real

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._metrics import describe_available, flatten
from drawbar.train._storage.manifest import Manifest, ReportedCheckpointStatus


def parse_checkpoint_config(config: Mapping[str, object]) -> CheckpointConfig:
    """Return the retention policy of a journaled configuration.

    Settings that this version does not have are omitted.
    """
    journaled = config.get("checkpoint_config")
    settings = journaled if isinstance(journaled, Mapping) else {}
    known = {field.name for field in fields(CheckpointConfig)}
    try:
        # Runs of other versions can have other settings.
        return CheckpointConfig(**{k: v for k, v in settings.items() if k in known})
    except (TypeError, ValueError):
        return CheckpointConfig()


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

    def key(checkpoint: Manifest) -> tuple[bool, float, int]:
        attribute = config.checkpoint_score_attribute
        score = None if attribute is None else get_score(checkpoint.metrics, attribute)
        if score is None:
            return (False, 0.0, checkpoint.index)
        higher_is_better = config.checkpoint_score_order == "max"
        return (True, score if higher_is_better else -score, checkpoint.index)

    return sorted(checkpoints, key=key)


def select_surplus(checkpoints: Collection[Manifest], config: CheckpointConfig) -> list[Manifest]:
    """Return the checkpoints to delete, worst first.

    Keeps the `num_to_keep` best of the checkpoints that are not being validated, and the newest. If
    the score ranks checkpoints and none of them has it, returns none.
    """
    # Do not look at each checkpoint if all are kept.
    if config.num_to_keep is None:
        return []
    settled = list(_exclude_pending(checkpoints))
    if not settled or not _can_rank(settled, config):
        return []
    newest = max(checkpoint.index for checkpoint in checkpoints)
    surplus = rank_checkpoints(settled, config)[: -config.num_to_keep]
    return [checkpoint for checkpoint in surplus if checkpoint.index != newest]


def describe_missing_scores(
    checkpoints: Collection[Manifest], config: CheckpointConfig
) -> str | None:
    """Return a message if there are checkpoints but none has a score, with the available metrics.

    Returns None if a checkpoint has a score, or may get one from a running validation.
    """
    attribute = config.checkpoint_score_attribute
    # This stops at the first score.
    if attribute is None or _can_rank(_exclude_pending(checkpoints), config):
        return None
    settled = list(_exclude_pending(checkpoints))
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


def _exclude_pending(checkpoints: Iterable[Manifest]) -> Iterator[Manifest]:
    pending = ReportedCheckpointStatus.PENDING_VALIDATION
    return (checkpoint for checkpoint in checkpoints if checkpoint.status is not pending)


def _can_rank(checkpoints: Iterable[Manifest], config: CheckpointConfig) -> bool:
    attribute = config.checkpoint_score_attribute
    return attribute is None or any(
        get_score(c.metrics, attribute) is not None for c in checkpoints
    )


def _look_up_metric(metrics: Mapping[str, object], attribute: str) -> object:
    if attribute in metrics:
        return metrics[attribute]
    for key, value in metrics.items():
        if isinstance(value, Mapping) and attribute.startswith(f"{key}/"):
            metric = _look_up_metric(value, attribute.removeprefix(f"{key}/"))
            if metric is not None:
                return metric
    return None
