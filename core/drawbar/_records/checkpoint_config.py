"""`CheckpointConfig`: which checkpoints of a run are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from drawbar._base import fields

ScoreOrder = Literal["max", "min"]

_SAVING_ADVICE = (
    "a checkpoint is saved whenever the function calls report(checkpoint=...); the report "
    "callbacks of the integrations have separate options, such as "
    "RayTrainReportCallback(frequency=10)"
)


@dataclass(frozen=True, repr=False)
class CheckpointConfig(fields.ConfigRepr):
    """Retention and durability of checkpoints.

    Args:
        num_to_keep: Number of best checkpoints to keep; None keeps all. The latest checkpoint is
            also kept, since restarts resume from it.
        checkpoint_score_attribute: Reported metric that ranks checkpoints; nested keys are joined
            with "/". None ranks by age, latest first. Checkpoints without the metric, or with NaN,
            rank last. While no checkpoint has the metric, the console shows a warning and none is
            deleted.
        checkpoint_score_order: "max" if a higher score is better, "min" if a lower score is better.
        durable: Whether committed checkpoints also survive a power loss. Each file and directory is
            then flushed with fsync before the commit. Without it, a committed checkpoint survives
            the death of any process.
        memory_replication: Whether each node copies the checkpoints of `save_async` to the memory
            of another node of the run. A restart after the loss of a node then reads them from
            there, and not from the storage. Needs workers that are Ray actors. The copies need
            memory for two checkpoints of the ranks on one node.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `num_to_keep` is below 1, or `checkpoint_score_order` is unknown.

    Example:
        >>> CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
        CheckpointConfig(num_to_keep=2, checkpoint_score_attribute='accuracy')
    """

    _replacements: ClassVar[Mapping[str, str]] = {
        "checkpoint_frequency": _SAVING_ADVICE,
        "checkpoint_at_end": _SAVING_ADVICE,
    }

    num_to_keep: Annotated[int | None, fields.at_least(1)] = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: ScoreOrder = "max"
    _: KW_ONLY
    durable: bool = False
    memory_replication: bool = False


def parse_checkpoint_config(config: Mapping[str, object]) -> CheckpointConfig:
    """Return the retention policy of a journaled configuration.

    Settings that this version does not have are omitted.
    """
    journaled = config.get("checkpoint_config")
    settings = journaled if isinstance(journaled, Mapping) else {}
    known = {field.name for field in dataclasses.fields(CheckpointConfig)}
    try:
        # Runs of other versions can have other settings.
        return CheckpointConfig(**{k: v for k, v in settings.items() if k in known})
    except (TypeError, ValueError):
        return CheckpointConfig()
