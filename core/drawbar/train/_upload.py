"""How `report()` treats a checkpoint: whether it waits, and what becomes of the local files."""

from __future__ import annotations

from enum import Enum


class CheckpointUploadMode(Enum):
    """Whether `report()` waits for the commit.

    SYNC: it returns when the checkpoint is committed. ASYNC: it returns as soon as the files may be
    overwritten, and the commit follows; at most two are in flight, then `report()` waits for the
    oldest. The end of the training function waits for all of them.
    """

    SYNC = "sync"
    ASYNC = "async"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether `report()` takes over the local directory if the caller does not say."""
        return self is CheckpointUploadMode.ASYNC
