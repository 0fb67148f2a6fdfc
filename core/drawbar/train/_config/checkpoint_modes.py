"""Modes of `report()` and `get_all_reported_checkpoints()` for checkpoints."""

from __future__ import annotations

from enum import Enum


class CheckpointUploadMode(Enum):
    """Upload mode of a checkpoint: copied or committed in place, and with or without waiting.

    Attributes:
        SYNC: `report()` returns when the checkpoint is committed.
        ASYNC: `report()` returns as soon as the files may be overwritten, and the commit follows in
            the background. If two commits have not ended, `report()` waits for the older one. When
            the training function returns, Drawbar waits for all commits.
        NO_UPLOAD: The directory is committed in place. It may be in the run directory or anywhere
            else where the driver can read it. Directories outside the run directory are never
            deleted.

    Example:
        >>> train.report(
        ...     {"loss": loss},
        ...     checkpoint=path,
        ...     checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
        ... )
    """

    SYNC = "sync"
    ASYNC = "async"
    NO_UPLOAD = "no_upload"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Return whether `report()` moves the local directory by default.

        Returns:
            The default of `delete_local_checkpoint_after_upload`: True for ASYNC, else False.

        Example:
            >>> CheckpointUploadMode.ASYNC.default_delete_local_checkpoint_after_upload()
            True
        """
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(Enum):
    """Condition that `get_all_reported_checkpoints` waits for.

    COMMITTED waits until every checkpoint of this rank's reports is committed. VALIDATED also waits
    until the validations of these and all earlier checkpoints have ended.

    Example:
        ```python
        checkpoints = train.get_all_reported_checkpoints(
            consistency_mode=train.CheckpointConsistencyMode.VALIDATED
        )
        ```
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"
