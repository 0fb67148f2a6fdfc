"""Commit the checkpoint of a complete round.

Ranks whose files are not staged yet receive a command to persist them. When all files are staged,
the checkpoint is committed and journaled, every rank is notified, and retention is applied. Commits
run one at a time, in order, outside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._controller.background import BackgroundTasks, run_and_log_errors
from drawbar.train._controller.checkpoint_registry import CheckpointRegistry
from drawbar.train._controller.moved_files import MovedFiles
from drawbar.train._controller.pending_checkpoint import PendingCheckpoint
from drawbar.train._controller.report_rounds import ReportRound
from drawbar.train._controller.transfers import FileTransfers
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import (
    CheckpointCommitted,
)
from drawbar.train._protocol.commands import Command, CommitCompleted, FileChunkAck, PersistFiles
from drawbar.train._protocol.messages import FileChunk, FilesPersisted
from drawbar.train._storage import fault_points, upkeep
from drawbar.train._storage.checkpoint_store import CheckpointDraft
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import (
    Manifest,
    make_already_committed_error,
)
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import StagedFiles, make_shared_name
from drawbar.train._threads import run_in_daemon_thread


class CheckpointCommitter:
    """Commit the checkpoints of a run, across all its attempts.

    Args:
        directory: Run directory.
        config: Retention policy and durability.
        metadata: The trainer's metadata, which is saved in each checkpoint.
        emit: Callback that publishes events.
        on_committed: Called on the event loop after each commit has been journaled.
        on_failed: Called on the event loop when a commit fails, for example because the disk is
            full.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        metadata: dict[str, object],
        emit: Emit,
        on_committed: Callable[[Manifest], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._staging = directory.staging
        self._config = config
        # Encode once, not on the event loop in every commit.
        self._metadata = json.dumps(metadata).encode() if metadata else None
        self._emit = emit
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ready: asyncio.Queue[PendingCheckpoint] = asyncio.Queue()
        self._committing: set[int] = set()
        self._reserving: set[asyncio.Task[None]] = set()
        self.transfers = FileTransfers(directory, on_failed)
        self.moved_files = MovedFiles()
        self._background = BackgroundTasks()
        self.registry = CheckpointRegistry(directory, config, emit, self._background)
        self._task: asyncio.Task[None] | None = None

    def describe_remaining_files(self) -> str:
        """Describe the latest checkpoint and the moved files that were not committed."""
        return "\n".join((self.registry.describe_recoverable(), *self.moved_files.remaining))

    def start(
        self,
        report_round: ReportRound,
        *,
        run_id: str,
        attempt: int,
        world_size: int,
        send_command: Callable[[int, Command], None],
    ) -> None:
        """Start to commit the files that ranks offer in this round, if there are any.

        Args:
            report_round: Complete round of reports.
            run_id: ID of the run.
            attempt: Number of the attempt.
            world_size: Number of ranks.
            send_command: Sends a command to one rank.
        """
        offers = report_round.offers
        if not offers:
            return
        name = offers[min(offers)].checkpoint_name
        # Check before any upload: on an object store, the ranks would write their files into the
        # committed checkpoint before the rename fails.
        if name in self.registry:
            self._on_failed(make_already_committed_error(self._checkpoints.path(name)))
            return
        pending = self._make_pending(name, report_round, run_id, attempt, world_size)
        commands: dict[int, PersistFiles] = {}
        for rank, offer in offers.items():
            assigned_files = report_round.assigned_files[rank]
            if offer.is_staged:
                pending.staged_files[rank] = StagedFiles(Path(offer.directory), assigned_files)
            # A checkpoint that is stored by a user's upload function involves all ranks, even those
            # without assigned files: the function may write other files or call a collective.
            elif assigned_files or offer.is_in_place:
                pending.awaited_files[rank] = assigned_files
                commands[rank] = PersistFiles(
                    report_index=report_round.index,
                    files=assigned_files,
                    checkpoint_name=pending.name,
                )
        self._pending[report_round.index] = pending
        # Record the commit as unfinished before the last file is persisted: requests for the list
        # of checkpoints must wait for it.
        self._committing.add(report_round.index)
        if commands and self._directory.remote_path is not None and not pending.in_place:
            task = asyncio.create_task(self._reserve_and_send(pending, commands, send_command))
            self._reserving.add(task)
            task.add_done_callback(self._reserving.discard)
            return
        for rank, command in commands.items():
            send_command(rank, command)
        self._commit_if_ready(report_round.index)

    def _make_pending(
        self, name: str, report_round: ReportRound, run_id: str, attempt: int, world_size: int
    ) -> PendingCheckpoint:
        offers = report_round.offers
        # Ranks may report different metrics. Use the metrics of the lowest rank that has files.
        report = report_round.reports[min(offers)]
        validations = [report_round.reports[rank].validation for rank in offers]

        def make_manifest(staged_files: list[StagedFiles]) -> Manifest:
            manifest = Manifest(
                name=name,
                index=report_round.index,
                attempt=attempt,
                run_id=run_id,
                world_size=world_size,
                time=time.time(),
                metrics=report.metrics,
                data_positions=report.data_positions,
                validation=next((value for value in validations if value is not None), None),
            )
            return manifest.with_files(file for part in staged_files for file in part.files)

        return PendingCheckpoint(
            report_round.index,
            make_manifest,
            time.monotonic(),
            name,
            self._staging.path / make_shared_name(attempt, report_round.index),
            any(offer.is_in_place for offer in offers.values()),
        )

    async def _reserve_and_send(
        self,
        pending: PendingCheckpoint,
        commands: Mapping[int, PersistFiles],
        send_command: Callable[[int, Command], None],
    ) -> None:
        """Reserve the directory in remote storage, and let the ranks write to it."""
        try:
            await run_in_daemon_thread(self._checkpoints.reserve, pending.name)
        except OSError as error:
            self._on_failed(error)
            return
        if self._pending.get(pending.index) is pending:  # it has not been dropped in the meantime
            for rank, command in commands.items():
                send_command(rank, command)

    def on_persisted(self, rank: int, message: FilesPersisted) -> None:
        """Record that a rank has staged its assigned files."""
        pending = self._pending.get(message.report_index)
        # Ignore messages of earlier attempts. Their checkpoints were dropped, and the names may
        # have been used again.
        if pending is not None and rank in pending.awaited_files:
            assigned_files = pending.awaited_files.pop(rank)
            directory = Path(message.staging_directory) if message.staging_directory else None
            if rank in pending.transferring_ranks:
                directory = pending.staging_directory
            pending.staged_files[rank] = StagedFiles(directory, assigned_files, message.checksums)
            if message.checkpoint_name:
                pending.uploaded_names[rank] = message.checkpoint_name
            self._commit_if_ready(message.report_index)

    def on_chunk(self, rank: int, chunk: FileChunk, reply: Callable[[Command], None]) -> None:
        """Write a chunk that a rank with node-local storage sends, and acknowledge it."""
        # Always reply: the rank sends the next chunk only after the reply.
        pending = next((p for p in self._pending.values() if p.name == chunk.checkpoint_name), None)
        if pending is None:  # the checkpoint was dropped
            reply(FileChunkAck(request_id=chunk.request_id))
            return
        pending.transferring_ranks.add(rank)
        self.transfers.write_chunk(chunk, pending.staging_directory, reply)

    def _commit_if_ready(self, index: int) -> None:
        if self._pending[index].awaited_files:
            return
        # Commit one at a time and in order, although some disks could commit several in parallel.
        # Otherwise an older checkpoint could be committed last and become the latest one.
        self._ready.put_nowait(self._pending.pop(index))
        if self._task is None:
            self._task = asyncio.create_task(self._commit_loop())

    async def _commit_loop(self) -> None:
        while True:
            pending = await self._ready.get()
            try:
                await self._commit(pending)
            except Exception as error:  # any error must reach the controller
                self._on_failed(error)
            finally:
                self._committing.discard(pending.index)
                self._ready.task_done()

    async def _commit(self, pending: PendingCheckpoint) -> None:
        staged_files = [pending.staged_files[rank] for rank in sorted(pending.staged_files)]
        manifest = pending.make_manifest(staged_files)
        draft = CheckpointDraft(
            manifest=msgspec.structs.replace(manifest, name=pending.resolve_name()),
            staged_files=staged_files,
            durable=self._config.durable,
            metadata=self._metadata,
            is_in_place=pending.in_place,
        )
        manifest = await run_in_daemon_thread(self._checkpoints.commit, draft)
        seconds = time.monotonic() - pending.start_time
        # Journal the commit first: nothing may resume from a checkpoint that is not journaled.
        self._emit(CheckpointCommitted.of(manifest, seconds=seconds))
        fault_points.maybe_stop_at("commit.journaled")
        self.registry.add(manifest)
        # Update `_committing` before the ranks are notified: it determines which of their requests
        # for the list of checkpoints can be answered.
        self._committing.discard(manifest.index)
        self.moved_files.on_committed(manifest.index)
        self._on_committed(manifest)
        self.registry.apply_retention()
        # Rename the directory now, because the background task deletes it later. Files that are
        # preserved in the meantime must not be deleted.
        trash = self._staging.move_to_trash(self._staging.preserved_path)
        self._background.submit(self._finalize, manifest.name, trash)

    def _finalize(self, name: str, trash: Path) -> None:
        """Write checksums, delete preserved files, and upload the journal."""
        # One task instead of three, since each switch between threads delays the training.
        run_and_log_errors(self._checkpoints.write_checksums, name)
        remove_tree(trash)
        self._directory.run_files.upload()

    @property
    def first_uncommitted(self) -> float:
        """Index of the first complete round whose checkpoint is not committed; else infinity."""
        return min(self._committing, default=math.inf)

    def make_committed_command(self, manifest: Manifest) -> CommitCompleted:
        """Return the command that notifies a rank of this commit."""
        return CommitCompleted(report_index=manifest.index, checkpoint_name=manifest.name)

    async def finish_attempt(self) -> None:
        """Finish the commits whose files are all persisted, and drop the others."""
        # Requests for the list of checkpoints would wait for the dropped commits forever.
        self._committing.difference_update(self._pending)
        self._pending.clear()
        if self._reserving:
            await asyncio.wait(self._reserving)
        # Wait until all received chunks are written: their staging directories are removed below.
        await self.transfers.finish()
        # Finish the other commits. All ranks have persisted their files, so a restart can resume
        # from these checkpoints.
        await self._ready.join()
        await run_in_daemon_thread(self.moved_files.warn_of_remaining)
        # Preserve moved files before the staging directories are removed: there is no other copy.
        await run_in_daemon_thread(upkeep.preserve_uncommitted, self._directory)
        for directory in self._staging.list_directories():
            self._background.submit(remove_tree, directory)

    def stop_waiting(self) -> None:
        """Make `close()` return without waiting for checksums and deletions."""
        self._background.stop_waiting()

    async def close(self) -> None:
        """Finish all commits, checksums, and deletions."""
        await self.finish_attempt()
        self.transfers.close()
        await self._background.close(self._emit)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
