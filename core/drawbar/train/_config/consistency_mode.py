"""`CheckpointConsistencyMode`: condition that `get_all_reported_checkpoints` waits for."""

from __future__ import annotations

from enum import Enum


class CheckpointConsistencyMode(Enum):
    """Condition that `get_all_reported_checkpoints` waits for.

    COMMITTED waits until every checkpoint of this rank's reports is committed. VALIDATED also waits
    until the validations of these and all earlier checkpoints have ended.

    Example:
        checkpoints = train.get_all_reported_checkpoints(
            consistency_mode=train.CheckpointConsistencyMode.VALIDATED
        )
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"
