"""Coordinate everything that concerns the checkpoints of a run.

The coordinator has the registry of committed checkpoints, their retention, the commits in progress,
the transfers of files, the validations, and the requests of ranks. The controller, its attempts,
and the recovery use only the coordinator. Its work in threads ends with an event on the
controller's queue, and the controller calls the method for this event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from drawbar._base.indexed_heap import IndexedHeap
from drawbar._process.ranks import WorkerInfo
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._records.event_stream import Emit
from drawbar._records.rollback import Rollback
from drawbar._storage import fault_points
from drawbar._storage.files import remove_tree
from drawbar._storage.manifest import Manifest, make_already_committed_error
from drawbar._storage.moved_files import MovedFiles
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode
from drawbar.train._controller.background import BackgroundTasks, FileTransfers, run_and_log_errors
from drawbar.train._controller.checkpoint_registry import CheckpointRegistry
from drawbar.train._controller.commits import (
    CheckpointCommitter,
    CommitContext,
    CommitFinished,
    StorageFailed,
)
from drawbar.train._controller.progress import AttemptProgress, ReportRound
from drawbar.train._controller.validations import ValidationEvent, ValidationScheduler
from drawbar.train._protocol.commands import (
    CheckpointListReply,
    Command,
    CommitCompleted,
    FileChunkAck,
)
from drawbar.train._protocol.messages import (
    CheckpointDiscarded,
    CheckpointListRequest,
    FileChunk,
    FileRequest,
    FilesPersisted,
    Report,
)
from drawbar.train._worker_group.validator import Validator

CheckpointEvent = CommitFinished | StorageFailed | ValidationEvent
CheckpointMessage = (
    FilesPersisted | FileChunk | FileRequest | CheckpointListRequest | CheckpointDiscarded
)
"""Messages of ranks that the coordinator handles."""


class CheckpointCoordinator:
    """Checkpoints of a run, across all its attempts. Must be used on the event loop.

    Args:
        directory: Run directory.
        config: Retention policy and durability.
        metadata: The trainer's metadata, which is saved in each checkpoint.
        validator: Runs validations; None if the trainer has no `validation_config`.
        emit: Callback that publishes events.
        put_event: Puts an event on the controller's queue.

    Attributes:
        registry: Committed checkpoints.
        validations: Validations of committed checkpoints.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        metadata: dict[str, object],
        validator: Validator | None,
        emit: Emit,
        put_event: Callable[[CheckpointEvent], None],
    ) -> None:
        self._directory = directory
        self._emit = emit
        self._put_event = put_event
        self._background = BackgroundTasks()
        self.registry = CheckpointRegistry(directory, config, emit, self._background)
        self.validations = ValidationScheduler(validator, self.registry, emit, put_event)
        self._commits = CheckpointCommitter(directory, config, metadata, put_event)
        self._transfers = FileTransfers(directory, lambda error: put_event(StorageFailed(error)))
        self._moved_files = MovedFiles()
        self._context: CommitContext | None = None
        self._queries: CheckpointQueries | None = None

    # -- attempts

    def start_attempt(self, progress: AttemptProgress, context: CommitContext) -> None:
        """Handle messages of a new attempt from now on.

        Args:
            progress: Progress of the ranks.
            context: The attempt.
        """
        self._context = context
        self._queries = CheckpointQueries(
            progress, self.registry, self._commits, self.validations, context.send_command
        )

    async def finish_attempt(self) -> None:
        """Finish the commits whose files are all persisted, and drop the others."""
        self._queries = None  # the ranks do not wait any longer
        self._commits.drop_pending()
        await self._commits.wait_for_reservations()
        # Wait until all received chunks are written: their staging directories are removed below.
        await self._transfers.finish()
        # Finish the other commits. All ranks have persisted their files, so a restart can resume
        # from these checkpoints.
        await self._commits.wait_for_commits()
        await run_in_daemon_thread(self._moved_files.warn_of_remaining)
        # Preserve moved files before the staging directories are removed: there is no other copy.
        await run_in_daemon_thread(self._directory.preserve_uncommitted)
        if self._commits.has_uploads:
            await run_in_daemon_thread(self._directory.checkpoints.delete_uncommitted_uploads)
        for directory in self._directory.staging.list_directories():
            self._background.submit(remove_tree, directory)

    async def roll_back(self, rollback: Rollback) -> None:
        """Remove the checkpoints that a rollback discards. Unfinished validations start again."""
        # Later checkpoints may have the report numbers by which validations are tracked.
        await self.validations.cancel()
        await self.registry.remove_discarded(rollback)
        self.validations.resume_pending()

    def stop_waiting(self) -> None:
        """Make `close()` return without waiting for checksums and deletions."""
        self._background.stop_waiting()

    async def close(self) -> None:
        """Cancel validations, and finish all commits, checksums, and deletions."""
        # Validations first, because their results are saved by background tasks.
        await self.validations.cancel()
        await self.finish_attempt()
        self._transfers.close()
        await self._background.close(self._emit)

    def describe_remaining_files(self) -> str:
        """Describe the latest checkpoint and the moved files that were not committed."""
        return "\n".join((self.registry.describe_recoverable(), *self._moved_files.remaining))

    # -- reports and messages of ranks

    def record_moved_files(self, rank: int, worker: WorkerInfo, report: Report) -> None:
        """Record the directory of a report's files, if they can get lost unnoticed."""
        # Only files that are moved by a report that does not block.
        if report.offer is not None and report.offer.should_move and not report.is_blocking:
            self._moved_files.add(
                report.index, rank, node=worker.hostname, directory=report.offer.directory
            )

    def commit_round(self, report_round: ReportRound) -> None:
        """Start to commit the files that ranks offer in this round, if there are any."""
        offers = report_round.offers
        if not offers:
            return
        assert self._context is not None  # reports arrive during an attempt
        name = offers[min(offers)].checkpoint_name
        # Check before any upload: on an object store, the ranks would write their files into the
        # committed checkpoint before the rename fails.
        if name in self.registry:
            path = self._directory.checkpoints.path(name)
            self._put_event(StorageFailed(make_already_committed_error(path)))
            return
        self._commits.start(report_round, self._context)

    def is_waiting_for(self, rank: int) -> bool:
        """Return whether a rank has not persisted its files of a checkpoint yet."""
        return self._commits.is_waiting_for(rank)

    def get_storing_limit(self, ended: Collection[int]) -> float:
        """See `CheckpointCommitter.get_storing_limit`."""
        return self._commits.get_storing_limit(ended)

    def on_message(self, rank: int, message: CheckpointMessage) -> None:
        """Handle a message of a rank in the current attempt."""
        assert self._context is not None  # an attempt is running
        assert self._queries is not None
        reply = partial(self._context.send_command, rank)
        match message:
            case FilesPersisted():
                self._commits.on_persisted(rank, message)
            case FileChunk():
                pending = self._commits.find_pending(message.checkpoint_name)
                # Always reply: the rank sends the next chunk only after the reply.
                if pending is None:
                    reply(FileChunkAck(request_id=message.request_id))
                    return
                pending.transferring_ranks.add(rank)
                self._transfers.write_chunk(message, pending.staging_directory, reply)
            case FileRequest():
                self._transfers.read_chunk(message, reply)
            case CheckpointListRequest():
                self._queries.add(rank, message)
            case CheckpointDiscarded():
                self.registry.discard(message.checkpoint_name)

    def send_ready_replies(self) -> None:
        """Reply to the requests for the list of checkpoints that need not wait any longer."""
        if self._queries is not None:
            self._queries.send_ready_replies()

    @property
    def is_rank_waiting_for_validation(self) -> bool:
        """True if a rank is blocked until validations have finished."""
        return self._queries is not None and self._queries.is_waiting_for_validation

    # -- events

    def on_commit_finished(self, event: CommitFinished) -> tuple[Manifest, CommitCompleted]:
        """Journal a commit, and add the checkpoint to the list.

        Returns:
            The manifest, and the command that notifies a rank.

        Raises:
            Exception: The commit has failed, or cannot be journaled.
        """
        # Journal the commit first: nothing may resume from a checkpoint that is not journaled.
        try:
            self._emit(event.make_journal_entry())
        finally:
            # Before the ranks are notified: this determines which of their requests for the list of
            # checkpoints can be answered.
            self._commits.discard_uncommitted(event.index)
        fault_points.maybe_stop_at("commit.journaled")
        manifest = event.commit.result()
        self.registry.add(manifest)
        self._moved_files.on_committed(manifest.index)
        self.validations.schedule(manifest)
        return manifest, CommitCompleted(report_index=manifest.index, checkpoint_name=manifest.name)

    def clean_up_after_commit(self, manifest: Manifest) -> None:
        """Apply the retention policy, and delete files that the commit has replaced."""
        self.registry.apply_retention()
        # Rename the directory now, because the background task deletes it later. Files that are
        # preserved in the meantime must not be deleted.
        staging = self._directory.staging
        trash = staging.move_to_trash(staging.preserved_path)

        def finalize() -> None:
            # One task instead of three, since each switch between threads delays the training.
            run_and_log_errors(self._directory.checkpoints.write_checksums, manifest.name)
            remove_tree(trash)
            self._directory.run_files.upload()

        self._background.submit(finalize)

    def commit_next(self) -> None:
        """Start the next commit, when a `CommitFinished` event has been handled."""
        self._commits.commit_next()

    def on_validation_event(self, event: ValidationEvent) -> None:
        """Save the result of a validation, or reply to ranks that wait for saved ones."""
        self.validations.on_event(event)
        self.send_ready_replies()


class CheckpointQueries:
    """Unanswered queries of one attempt's ranks for the list of checkpoints.

    Args:
        progress: Progress of the ranks: which reports they have made.
        registry: Committed checkpoints.
        commits: Commits in progress.
        validations: Validates checkpoints.
        send_command: Sends a command to one rank.
    """

    def __init__(
        self,
        progress: AttemptProgress,
        registry: CheckpointRegistry,
        commits: CheckpointCommitter,
        validations: ValidationScheduler,
        send_command: Callable[[int, Command], None],
    ) -> None:
        self._progress = progress
        self._registry = registry
        self._commits = commits
        self._validations = validations
        self._send_command = send_command
        # Number of the rank's next report, by rank and request ID. The reply waits for the
        # checkpoints of all reports with a lower number, of all ranks.
        self._until_committed = IndexedHeap[tuple[int, int]]()
        self._until_validated = IndexedHeap[tuple[int, int]]()

    def add(self, rank: int, message: CheckpointListRequest) -> None:
        """Add a query. It replaces an earlier query of this rank with the same ID."""
        query = rank, message.request_id
        self._until_committed.discard(query)
        self._until_validated.discard(query)
        self._progress.on_checkpoints_requested(rank, message)
        # The number of reports cannot change, since the rank is blocked until it gets the reply.
        next_report = self._progress.ranks[rank].reports
        match message.consistency_mode:
            case CheckpointConsistencyMode.COMMITTED:
                self._until_committed.set(query, next_report)
            case CheckpointConsistencyMode.VALIDATED:
                self._until_validated.set(query, next_report)
            case None:
                self._reply([query])
        self.send_ready_replies()

    def send_ready_replies(self) -> None:
        """Reply to the queries whose checkpoints are committed, or also validated."""
        if not self._until_committed and not self._until_validated:
            return
        committed = min(self._progress.next_running_report, self._commits.first_uncommitted)
        validated = min(committed, self._validations.first_pending)
        ready = self._until_committed.pop_up_to(committed)
        ready += self._until_validated.pop_up_to(validated)
        if ready:
            self._reply(ready)

    def _reply(self, queries: list[tuple[int, int]]) -> None:
        checkpoints = self._registry.list_entries()
        for rank, request_id in queries:
            self._progress.on_checkpoints_reply(rank)
            self._send_command(
                rank, CheckpointListReply(request_id=request_id, checkpoints=checkpoints)
            )

    @property
    def is_waiting_for_validation(self) -> bool:
        """True if a rank is blocked until validations have finished."""
        first_pending = self._validations.first_pending
        return any(first_pending < next_report for next_report in self._until_validated.values())
