"""Commit the checkpoints of complete rounds.

Ranks whose files are not staged yet receive a command to persist them. When all files are staged,
the checkpoint is committed in a thread. Commits run one at a time, in order. Each puts a
`CommitFinished` event on the controller's queue.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from drawbar._process.threads import run_in_daemon_thread
from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._records.events import CheckpointCommitted
from drawbar._recovery.decisions import get_storing_limit
from drawbar._storage.checkpoint_store import CheckpointDraft
from drawbar._storage.contents import FileEntry
from drawbar._storage.manifest import Manifest
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.staging import StagedFiles, make_shared_name
from drawbar.train._controller.progress import ReportRound
from drawbar.train._protocol.commands import Command, PersistFiles
from drawbar.train._protocol.messages import (
    FilesPersisted,
    InPlaceOffer,
    StagedOffer,
    UploadFnOffer,
)


@dataclass(frozen=True)
class CommitFinished:
    """Event: the files of a checkpoint are committed, or the commit has failed.

    Attributes:
        index: Index of the reports.
        seconds: Time since the last report of the round.
        commit: Ended task, with the manifest or the error.
    """

    index: int
    seconds: float
    commit: asyncio.Task[Manifest]

    def make_journal_entry(self) -> CheckpointCommitted:
        """Return the entry for the journal.

        Raises:
            Exception: The commit has failed.
        """
        return CheckpointCommitted.of(self.commit.result(), seconds=self.seconds)


@dataclass(frozen=True)
class StorageFailed:
    """Event: files of a checkpoint cannot be read or written, for example on a full disk."""

    error: Exception


@dataclass
class PendingCheckpoint:
    """Checkpoint whose files are being persisted.

    Attributes:
        name: Name of the checkpoint.
        index: Index of its reports.
        make_manifest: Returns its manifest when all files are staged.
        start_time: Time of its last report on the monotonic clock.
        staging_directory: Directory for the files of ranks with node-local storage.
        in_place: Whether its files are committed where they are.
        uploaded_names: Name that the user's upload function returned, by rank.
        staged_files: Files that have been persisted, by rank.
        awaited_files: Files that are not persisted yet, by rank.
        transferring_ranks: Ranks that have sent chunks of their files.
    """

    name: str
    index: int
    make_manifest: Callable[[list[StagedFiles]], Manifest]
    start_time: float
    staging_directory: Path
    in_place: bool = False
    uploaded_names: dict[int, str] = field(default_factory=dict)
    staged_files: dict[int, StagedFiles] = field(default_factory=dict)
    awaited_files: dict[int, tuple[FileEntry, ...]] = field(default_factory=dict)
    transferring_ranks: set[int] = field(default_factory=set)

    def resolve_name(self) -> str:
        """Return the name of the uploaded checkpoint, or its own name if it was not uploaded.

        Raises:
            ValueError: The upload function returned different names on the ranks.
        """
        if len(set(self.uploaded_names.values())) > 1:
            names = ", ".join(
                f"{name!r} (rank {rank})" for rank, name in self.uploaded_names.items()
            )
            raise ValueError(
                f"checkpoint_upload_fn must return the same path on all ranks, found {names}. "
                "Upload the files of all ranks to one directory"
            )
        return next(iter(self.uploaded_names.values()), self.name)


@dataclass(frozen=True)
class CommitContext:
    """Attempt whose checkpoints are committed.

    Attributes:
        run_id: ID of the run.
        attempt: Number of the attempt.
        world_size: Number of ranks.
        send_command: Sends a command to one rank.
    """

    run_id: str
    attempt: int
    world_size: int
    send_command: Callable[[int, Command], None]


class CheckpointCommitter:
    """Commit the checkpoints of a run, across all its attempts. Must be used on the event loop.

    Args:
        directory: Run directory.
        config: Durability of the checkpoints.
        metadata: The trainer's metadata, which is saved in each checkpoint.
        put_event: Puts an event on the controller's queue.

    Attributes:
        has_uploads: Whether ranks have written to the final directories of checkpoints.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        metadata: dict[str, object],
        put_event: Callable[[CommitFinished | StorageFailed], None],
    ) -> None:
        self.has_uploads = False
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._config = config
        # Encode once, not on the event loop in every commit.
        self._metadata = json.dumps(metadata).encode() if metadata else None
        self._put_event = put_event
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ready: deque[PendingCheckpoint] = deque()
        self._is_committing = False
        self._all_committed = asyncio.Event()
        self._all_committed.set()
        self._uncommitted: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, report_round: ReportRound, context: CommitContext) -> None:
        """Start to commit the files that ranks offer in this round.

        Args:
            report_round: Complete round of reports, with at least one offer.
            context: Attempt of the reports.
        """
        index = report_round.index
        pending = self._pending[index] = self._make_pending(report_round, context)
        commands: dict[int, PersistFiles] = {}
        for rank, offer in report_round.offers.items():
            assigned_files = report_round.assigned_files[rank]
            if isinstance(offer, StagedOffer | InPlaceOffer):
                pending.staged_files[rank] = StagedFiles(Path(offer.directory), assigned_files)
            elif assigned_files or isinstance(offer, UploadFnOffer):
                pending.awaited_files[rank] = assigned_files
                commands[rank] = PersistFiles(
                    report_index=index, files=assigned_files, checkpoint_name=pending.name
                )
        # Record the commit as unfinished before the last file is persisted: requests for the list
        # of checkpoints must wait for it.
        self._uncommitted.add(index)
        if commands and (self._directory.remote_path is not None or pending.in_place):
            task = asyncio.create_task(self._reserve_and_send(pending, commands, context))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        for rank, command in commands.items():
            context.send_command(rank, command)
        self._commit_if_ready(index)

    def _make_pending(self, report_round: ReportRound, context: CommitContext) -> PendingCheckpoint:
        offers = report_round.offers
        name = offers[min(offers)].checkpoint_name
        # Ranks may report different metrics. Use the metrics of the lowest rank that has files.
        report = report_round.reports[min(offers)]
        validations = [report_round.reports[rank].validation for rank in offers]

        def make_manifest(staged_files: list[StagedFiles]) -> Manifest:
            manifest = Manifest(
                name=name,
                index=report_round.index,
                attempt=context.attempt,
                run_id=context.run_id,
                world_size=context.world_size,
                time=time.time(),
                metrics=report.metrics,
                data_positions=report.data_positions,
                validation=next((value for value in validations if value is not None), None),
            )
            return manifest.with_files(file for part in staged_files for file in part.files)

        return PendingCheckpoint(
            name,
            report_round.index,
            make_manifest,
            time.monotonic(),
            self._directory.staging.path / make_shared_name(context.attempt, report_round.index),
            any(isinstance(offer, InPlaceOffer | UploadFnOffer) for offer in offers.values()),
        )

    async def _reserve_and_send(
        self,
        pending: PendingCheckpoint,
        commands: Mapping[int, PersistFiles],
        context: CommitContext,
    ) -> None:
        """Reserve the final directory, and let the ranks write to it."""
        store = self._checkpoints
        self.has_uploads |= pending.in_place
        reserve = store.begin_upload if pending.in_place else store.reserve
        try:
            await run_in_daemon_thread(reserve, pending.name)
        except OSError as error:
            self._put_event(StorageFailed(error))
            return
        if self._pending.get(pending.index) is pending:  # it has not been dropped in the meantime
            for rank, command in commands.items():
                context.send_command(rank, command)

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

    def is_waiting_for(self, rank: int) -> bool:
        """Return whether a rank has not persisted its files of a checkpoint yet."""
        return any(rank in pending.awaited_files for pending in self._pending.values())

    def get_storing_limit(self, ended: Collection[int]) -> float:
        """Return the seconds in which all ranks should have stored their files.

        Args:
            ended: Ranks that have ended and store no files.

        Returns:
            0 if no checkpoint can still be completed.
        """
        limits = [
            get_storing_limit(files)
            for pending in self._pending.values()
            if pending.awaited_files.keys().isdisjoint(ended)
            for files in pending.awaited_files.values()
        ]
        return max(limits, default=0.0)

    def find_pending(self, name: str) -> PendingCheckpoint | None:
        """Return the checkpoint whose files are being persisted; None if it was dropped."""
        return next((p for p in self._pending.values() if p.name == name), None)

    def _commit_if_ready(self, index: int) -> None:
        if not self._pending[index].awaited_files:
            self._ready.append(self._pending.pop(index))
            if not self._is_committing:
                self.commit_next()

    def commit_next(self) -> None:
        """Start the next commit. Call this when a `CommitFinished` event has been handled."""
        # Commit one at a time and in order, although some disks could commit several in parallel.
        # Otherwise an older checkpoint could be committed last and become the latest one.
        self._is_committing = bool(self._ready)
        if not self._is_committing:
            self._all_committed.set()
            return
        self._all_committed.clear()
        pending = self._ready.popleft()
        task = asyncio.create_task(self._commit(pending))
        task.add_done_callback(
            lambda commit: self._put_event(
                CommitFinished(pending.index, time.monotonic() - pending.start_time, commit)
            )
        )

    async def _commit(self, pending: PendingCheckpoint) -> Manifest:
        staged_files = [pending.staged_files[rank] for rank in sorted(pending.staged_files)]
        manifest = pending.make_manifest(staged_files)
        draft = CheckpointDraft(
            manifest=msgspec.structs.replace(manifest, name=pending.resolve_name()),
            staged_files=staged_files,
            durable=self._config.durable,
            metadata=self._metadata,
            is_in_place=pending.in_place,
            upload_name=pending.name if pending.uploaded_names else "",
        )
        return await run_in_daemon_thread(self._checkpoints.commit, draft)

    @property
    def first_uncommitted(self) -> float:
        """Index of the first complete round whose checkpoint is not committed; else infinity."""
        return min(self._uncommitted, default=math.inf)

    def discard_uncommitted(self, index: int) -> None:
        """Record that the commit of a round has ended."""
        self._uncommitted.discard(index)

    def drop_pending(self) -> None:
        """Drop the checkpoints whose files are not all persisted."""
        # Requests for the list of checkpoints would wait for the dropped commits forever.
        self._uncommitted.difference_update(self._pending)
        self._pending.clear()

    async def wait_for_reservations(self) -> None:
        """Wait for the calls that reserve the directories of checkpoints."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def wait_for_commits(self) -> None:
        """Wait for the commits whose files are all persisted."""
        await self._all_committed.wait()
