"""The committed checkpoints of a run that are still there: which is the newest, which go."""

from __future__ import annotations

import time
from functools import partial

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._controller.background import BackgroundTasks
from drawbar.train._history import ranking
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import CheckpointDeleted, CheckpointValidated, Notice
from drawbar.train._metrics import Metrics
from drawbar.train._storage import resume_point
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.manifest import (
    Manifest,
    ReportedCheckpointStatus,
    Validation,
    read_manifest,
)
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import run_in_daemon_thread


class CheckpointRegistry:
    """Those that were committed and not deleted, over all attempts. For the event loop.

    Args:
        directory: Where the run lies.
        config: Retention and durability.
        emit: Tells events.
        later: Deletes what goes.

    Attributes:
        all: Their manifests, oldest first.
    """

    def __init__(
        self, directory: RunDirectory, config: CheckpointConfig, emit: Emit, later: BackgroundTasks
    ) -> None:
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._config = config
        self._emit = emit
        self._background = later
        self._has_warned_unranked = False
        self.manifests = self._checkpoints.list_intact()

    @property
    def latest(self) -> Manifest | None:
        """The newest checkpoint, which a restart goes on from."""
        return self.manifests[-1] if self.manifests else None

    def get_checkpoint(self, manifest: Manifest) -> Checkpoint:
        """Give the checkpoint of a manifest."""
        return self._checkpoints.get_checkpoint(manifest.name)

    def list_entries(self) -> tuple[tuple[str, Metrics, ReportedCheckpointStatus], ...]:
        """List them, oldest first, as (name, metrics, status)."""
        return tuple((each.name, each.metrics, each.status) for each in self.manifests)

    def describe_recoverable(self) -> str:
        """Say in one line which checkpoint a failed run has; it may have been deleted."""
        is_local = self._directory.filesystem is None
        for manifest in reversed(self.manifests):
            if not is_local or self._checkpoints.is_intact(manifest.name):
                return f"newest committed checkpoint: {self.get_checkpoint(manifest).path}"
        if self.manifests:
            place = self._checkpoints.path(self.manifests[-1].name)
            return f"no committed checkpoint is there any more in full; the newest was {place}"
        return "no checkpoint was committed"

    async def drop_damaged(self) -> None:
        """Let go of the newest ones as long as they are damaged, and say so."""
        self.manifests, damage = await run_in_daemon_thread(
            resume_point.split_damaged, self._checkpoints, self.manifests
        )
        for name, what in damage.items():
            self._emit(CheckpointDeleted(time=time.time(), name=name))
            self._emit(Notice(f"damaged, so passed over: {what}"))
            await run_in_daemon_thread(resume_point.quarantine, self._checkpoints, name)

    async def add_validation(self, manifest: Manifest, validation: Validation) -> None:
        """Add what came of a checkpoint's validation to it, and rank all of them anew.

        Raises:
            OSError: It cannot be written down; the checkpoint has it as long as this run goes on.
        """
        validated = manifest.with_validation(validation)
        # In memory before it is on disk: retention ranks by it, whether or not it can be written.
        self.manifests[self.manifests.index(manifest)] = validated
        try:
            self._emit(CheckpointValidated.from_manifest(manifest, validation))
            keep = partial(
                self._checkpoints.write_validation, validated, durable=self._config.durable
            )
            await run_in_daemon_thread(keep)
        finally:
            self.apply_retention()
        self._background.submit(self._directory.run_files.upload_journal)

    def apply_retention(self) -> None:
        """Delete those that the config does not keep."""
        unranked = ranking.describe_missing_scores(self.manifests, self._config)
        if unranked is not None and not self._has_warned_unranked:
            self._has_warned_unranked = True
            self._emit(Notice(f"{unranked} Until a checkpoint has that score, none is deleted"))
        for manifest in ranking.select_surplus(self.manifests, self._config):
            self._delete(manifest)

    def discard(self, name: str) -> None:
        """Delete one before retention would, unless a restart or a validation needs it."""
        pending = ReportedCheckpointStatus.PENDING_VALIDATION
        for manifest in self.manifests[:-1]:
            if manifest.name == name and manifest.status is not pending:
                self._delete(manifest)

    def _delete(self, manifest: Manifest) -> None:
        # In this order a kill leaves a checkpoint too many, never a journal that promises one.
        self.manifests.remove(manifest)
        self._emit(CheckpointDeleted(time=time.time(), name=manifest.name))
        self._background.submit(self._delete_files, manifest.name)

    def _delete_files(self, name: str) -> None:
        """Delete a checkpoint, unless it has this name from the user, who wants to keep it."""
        found = read_manifest(self._checkpoints.path(name))
        if found is None or found.name == name:
            self._checkpoints.delete(name)
