"""Track the committed checkpoints of a run and apply the retention policy."""

from __future__ import annotations

import time
from collections.abc import Sequence

from drawbar._base.metrics import Metrics
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records import ranking
from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._records.event_stream import Emit
from drawbar._records.events import CheckpointDeleted, CheckpointValidated
from drawbar._records.live_events import Notice
from drawbar._records.rollback import Rollback
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_store import quarantine, split_damaged, uncommit
from drawbar._storage.contents import is_external
from drawbar._storage.manifest import (
    Manifest,
    ReportedCheckpointStatus,
    Validation,
    read_manifest,
)
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._controller.background import BackgroundTasks


class CheckpointRegistry:
    """Committed checkpoints that have not been deleted, across all attempts of a run.

    Must be used on the event loop.

    Args:
        directory: Run directory.
        config: Retention policy and durability.
        emit: Callback that publishes events.
        background: Runs file deletions outside the event loop.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        emit: Emit,
        background: BackgroundTasks,
    ) -> None:
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._config = config
        self._emit = emit
        self._background = background
        self._has_warned_unranked = False
        self._set_manifests(self._checkpoints.list_intact())

    def _set_manifests(self, manifests: Sequence[Manifest]) -> None:
        self._manifests = {manifest.name: manifest for manifest in manifests}
        self._surplus = ranking.SurplusQueue(self._config, manifests)

    def __contains__(self, name: str) -> bool:
        return name in self._manifests

    @property
    def manifests(self) -> list[Manifest]:
        """Manifests of the checkpoints, oldest first."""
        return list(self._manifests.values())

    def add(self, manifest: Manifest) -> None:
        """Add a checkpoint that was committed, or update its validation."""
        is_late = manifest.name not in self and self.latest and manifest.index < self.latest.index
        self._manifests[manifest.name] = manifest
        if is_late:  # an asynchronous checkpoint may be committed after a newer one
            oldest_first = sorted(self._manifests.values(), key=lambda each: each.index)
            self._manifests = {each.name: each for each in oldest_first}
        self._surplus.add(manifest)

    @property
    def latest(self) -> Manifest | None:
        """Latest committed checkpoint, from which a restart resumes."""
        return next(reversed(self._manifests.values()), None)

    def get_checkpoint(self, manifest: Manifest) -> Checkpoint:
        """Return the checkpoint of a manifest."""
        return self._checkpoints.get_checkpoint(manifest.name)

    def get_path(self, manifest: Manifest) -> str:
        """Return the path of a checkpoint, or the name of an external one, for the journal."""
        name = manifest.name
        return name if is_external(name) else self.get_checkpoint(manifest).path

    def list_entries(self) -> tuple[tuple[str, Metrics, ReportedCheckpointStatus], ...]:
        """Return name, metrics, and status of each checkpoint, oldest first."""
        return tuple(
            (manifest.name, manifest.metrics, manifest.status)
            for manifest in self._manifests.values()
        )

    def describe_recoverable(self) -> str:
        """Return one line that names the checkpoint from which a failed run can be resumed."""
        is_local = self._directory.filesystem is None
        for manifest in reversed(self._manifests.values()):
            if not is_local or self._checkpoints.is_intact(manifest.name):
                return f"Latest committed checkpoint: {self.get_checkpoint(manifest).path}"
        if self.latest is not None:
            path = self._checkpoints.path(self.latest.name)
            return f"No complete checkpoint is left. The latest one was {path}."
        return "No checkpoint was committed."

    async def drop_damaged(self) -> None:
        """Remove damaged checkpoints from the end of the list and move them to quarantine."""
        intact, damage = await run_in_daemon_thread(
            split_damaged, self._checkpoints, self.manifests
        )
        self._set_manifests(intact)
        for name, reason in damage.items():
            self._emit(Notice(f"Skipped damaged checkpoint {name}: {reason}"))
            # Before the deletion is journaled: after a crash, the next start moves only checkpoints
            # in the journal.
            await run_in_daemon_thread(quarantine, self._checkpoints, name)
            self._emit(CheckpointDeleted(time=time.time(), name=name))

    async def remove_discarded(self, rollback: Rollback) -> None:
        """Remove the checkpoints to which a rollback does not return.

        Raises:
            OSError: The storage failed. The next start of the run removes them.
        """
        for name in rollback.discarded:
            del self._manifests[name]
            self._surplus.remove(name)
        # Before a file changes: the journal in the storage must have the rollback.
        await run_in_daemon_thread(self._directory.run_files.upload)
        for name in rollback.discarded:
            await run_in_daemon_thread(uncommit, self._checkpoints, name)
            self._emit(CheckpointDeleted(time=time.time(), name=name))

    def add_validation(self, manifest: Manifest, validation: Validation) -> Manifest:
        """Attach a validation result to a checkpoint and journal it.

        Returns:
            The manifest with the result, for `save_validation`.

        Raises:
            OSError: The result cannot be journaled.
            ValueError: The checkpoint was removed: it is damaged, or a rollback discards it.
        """
        if self._manifests.get(manifest.name) != manifest:
            raise ValueError("the checkpoint was removed: damaged, or discarded by a rollback")
        validated = manifest.with_validation(validation)
        # Update memory first: retention must use the new score even if the write fails.
        self.add(validated)
        self._emit(CheckpointValidated.from_manifest(manifest, validation))
        return validated

    async def save_validation(self, validated: Manifest) -> None:
        """Write the result of a validation to the run directory.

        Raises:
            OSError: The result could not be written. It is used for ranking until the run ends,
                but is lost after that.
        """
        durable = self._config.durable
        await run_in_daemon_thread(
            lambda: self._checkpoints.write_validation(validated, durable=durable)
        )
        self._background.submit(self._directory.run_files.upload)

    def apply_retention(self) -> None:
        """Delete the checkpoints that the retention policy does not keep."""
        if not self._has_warned_unranked:
            unranked = ranking.describe_missing_scores(self._manifests.values(), self._config)
            if unranked is not None:
                self._has_warned_unranked = True
                self._emit(Notice(f"{unranked} No checkpoint is deleted until one has this score."))
        if self.latest is not None:
            for name in self._surplus.pop_surplus(self.latest.name):
                self._delete(self._manifests[name])

    def discard(self, name: str) -> None:
        """Delete a checkpoint now, unless a restart or a pending validation needs it."""
        manifest = self._manifests.get(name)
        if manifest is None or manifest is self.latest:
            return
        if manifest.status is not ReportedCheckpointStatus.PENDING_VALIDATION:
            self._delete(manifest)

    def _delete(self, manifest: Manifest) -> None:
        # Emit before deleting files. A crash in between leaves an extra directory, but never a
        # journal entry for a checkpoint that no longer exists.
        del self._manifests[manifest.name]
        self._surplus.remove(manifest.name)
        self._emit(CheckpointDeleted(time=time.time(), name=manifest.name))
        self._background.submit(self._delete_files, manifest.name)

    def _delete_files(self, name: str) -> None:
        """Delete a checkpoint, unless the user has copied another one to its path."""
        manifest = read_manifest(self._checkpoints.path(name))
        if manifest is None or manifest.name == name:
            self._checkpoints.delete(name)
