"""From a complete round of reports to a committed checkpoint.

Ranks whose files are not staged yet are told which to persist; when the last one has, the
checkpoint is committed, journaled, retention is applied, and every rank is told. Commits happen one
at a time, in order, off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._controller.background import BackgroundTasks, run_and_log_errors
from drawbar.train._controller.checkpoint_registry import CheckpointRegistry
from drawbar.train._controller.moved_files import MovedFiles
from drawbar.train._controller.pending_checkpoint import PendingCheckpoint
from drawbar.train._controller.progress import ReportRound
from drawbar.train._controller.transfers import FileTransfers
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import (
    CheckpointCommitted,
)
from drawbar.train._messages import FileSent, Persisted
from drawbar.train._orders import Committed, FileTaken, Order, Persist
from drawbar.train._storage import fault_points, upkeep
from drawbar.train._storage.checkpoint_store import CheckpointDraft
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import (
    Manifest,
    make_already_committed_error,
)
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import StagedFiles
from drawbar.train._threads import run_in_daemon_thread


class CheckpointCommitter:
    """Commits the checkpoints of a run, over all its attempts.

    Args:
        directory: Where the run lies.
        config: Retention and durability.
        metadata: The trainer's metadata, put into each checkpoint.
        emit: Tells events.
        committed: Called on the event loop for each commit, after the journal has it.
        failed: Called on the event loop when a commit fails, such as on a full disk.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        metadata: dict[str, object],
        emit: Emit,
        committed: Callable[[Manifest], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._staging = directory.staging
        self._config = config
        # Written once: each commit would do it on the event loop again.
        self._metadata = json.dumps(metadata).encode() if metadata else None
        self._emit = emit
        self._on_commit = committed
        self._on_failure = failed
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ready: asyncio.Queue[PendingCheckpoint] = asyncio.Queue()
        self._committing: set[int] = set()
        self.transfers = FileTransfers(directory, failed)
        self.moved_files = MovedFiles()
        self._background = BackgroundTasks()
        self.registry = CheckpointRegistry(directory, config, emit, self._background)
        self._task: asyncio.Task[None] | None = None

    def describe_remaining_files(self) -> str:
        """Say which checkpoint a failed run has, and where what was handed over for another is."""
        return "\n".join((self.registry.describe_recoverable(), *self.moved_files.remaining))

    def start(
        self,
        report_round: ReportRound,
        *,
        run_id: str,
        attempt: int,
        world_size: int,
        send_command: Callable[[int, Order], None],
    ) -> None:
        """Make a checkpoint of what the ranks offered in this round."""
        offers = report_round.offers
        if not offers:
            return
        # Ranks may report different metrics; the checkpoint has those of the lowest with files.
        report = report_round.reports[min(offers)]
        name = offers[min(offers)].name
        # Found out here rather than by the rename: on an object store the ranks would already be
        # writing their files into the committed checkpoint.
        if any(each.name == name for each in self.registry.manifests):
            self._on_failure(make_already_committed_error(self._checkpoints.path(name)))
            return
        validations = [report_round.reports[rank].validation for rank in offers]

        def manifest(parts: list[StagedFiles]) -> Manifest:
            described = Manifest(
                name=name,
                index=report_round.index,
                attempt=attempt,
                run_id=run_id,
                world_size=world_size,
                time=time.time(),
                metrics=report.metrics,
                data_positions=report.positions,
                validation=next((each for each in validations if each is not None), None),
            )
            return described.with_files(file for part in parts for file in part.files)

        in_place = any(offer.in_place for offer in offers.values())
        pending = PendingCheckpoint(report_round.index, manifest, time.monotonic(), name, in_place)
        for rank, offer in offers.items():
            share = report_round.assigned_files[rank]
            if offer.staged:
                pending.staged_files[rank] = StagedFiles(Path(offer.directory), share)
            # What an upload function puts there nobody knows, and ranks may meet in it; so each
            # of them is asked, also one all of whose files lower ranks give.
            elif share or offer.in_place:
                pending.awaited_files[rank] = share
                send_command(rank, Persist(index=report_round.index, files=share, name=name))
        self._pending[report_round.index] = pending
        # From the complete round on, not from the last `Persisted`: whoever asks for all
        # checkpoints waits for this one too.
        self._committing.add(report_round.index)
        self._commit_if_ready(report_round.index)

    def on_persisted(self, rank: int, message: Persisted) -> None:
        """Take note that a rank has staged its share."""
        pending = self._pending.get(message.index)
        # Otherwise it is of an attempt that was dropped, and names may have been given anew.
        if pending is not None and rank in pending.awaited_files:
            share = pending.awaited_files.pop(rank)
            travelled = self.transfers.pop_staging_directory(pending.name, rank)
            directory = Path(message.directory) if message.directory else travelled
            pending.staged_files[rank] = StagedFiles(directory, share, message.checksums)
            if message.name:
                pending.uploaded_names[rank] = message.name
            self._commit_if_ready(message.index)

    def on_chunk(self, rank: int, chunk: FileSent, reply: Callable[[Order], None]) -> None:
        """Take a piece of a share that travels here from a node of its own, then say so."""
        # The rank waits for an answer in any case: it sends the next piece only then.
        if any(each.name == chunk.name for each in self._pending.values()):
            self.transfers.write_chunk(rank, chunk, reply)
        else:  # of a checkpoint that was dropped
            reply(FileTaken(number=chunk.number))

    def _commit_if_ready(self, index: int) -> None:
        if self._pending[index].awaited_files:
            return
        # One at a time and in this order, though disks could do more: `newest` must never go back.
        self._ready.put_nowait(self._pending.pop(index))
        if self._task is None:
            self._task = asyncio.create_task(self._commit_loop())

    async def _commit_loop(self) -> None:
        while True:
            pending = await self._ready.get()
            try:
                await self._commit(pending)
            except Exception as error:  # whatever it is, the controller must hear of it
                self._on_failure(error)
            finally:
                self._committing.discard(pending.index)
                self._ready.task_done()

    async def _commit(self, pending: PendingCheckpoint) -> None:
        parts = [pending.staged_files[rank] for rank in sorted(pending.staged_files)]
        manifest = pending.make_manifest(parts)
        draft = CheckpointDraft(
            manifest=msgspec.structs.replace(manifest, name=pending.resolve_name()),
            staged_files=parts,
            durable=self._config.durable,
            metadata=self._metadata,
            is_in_place=pending.in_place,
        )
        manifest = await run_in_daemon_thread(self._checkpoints.commit, draft)
        seconds = time.monotonic() - pending.start_time
        # The journal first: nothing may go on from a checkpoint that it does not know.
        self._emit(CheckpointCommitted.of(manifest, seconds=seconds))
        fault_points.maybe_stop_at("commit.journaled")
        self.registry.manifests.append(manifest)
        # Before the ranks hear of it: the answers for which they wait depend on what is committing.
        self._committing.discard(manifest.index)
        self.moved_files.on_committed(manifest.index)
        self._on_commit(manifest)
        self.registry.apply_retention()
        # Out of the way by a rename: by the time of the deletion more may have been set aside.
        given_up = self._staging.move_to_trash(self._staging.preserved_path)
        self._background.submit(self._finalize, manifest.name, given_up)

    def _finalize(self, name: str, trash: Path) -> None:
        """Do what no checkpoint depends on in one go: each change of threads holds training up."""
        run_and_log_errors(self._checkpoints.write_checksums, name)
        remove_tree(trash)
        self._directory.run_files.upload_journal()

    def has_uncommitted(self, before: int) -> bool:
        """Whether a checkpoint of a complete round before this one is not committed yet."""
        return any(index < before for index in self._committing)

    def make_committed_command(self, manifest: Manifest) -> Committed:
        """Give the order that tells a rank of this commit."""
        return Committed(index=manifest.index, name=manifest.name)

    async def finish_attempt(self) -> None:
        """Finish the commits that every rank has persisted, drop the rest: the attempt is over."""
        # Else whoever asks for all checkpoints waits for these without end.
        self._committing.difference_update(self._pending)
        self._pending.clear()
        # Their pieces are written into the stages that are removed below.
        await self.transfers.finish()
        # Not dropped, though the attempt is over: all ranks have persisted, and a restart from
        # there saves the most.
        await self._ready.join()
        await run_in_daemon_thread(self.moved_files.warn_of_remaining)
        # Before the stages are removed: these files are nowhere else.
        await run_in_daemon_thread(upkeep.preserve_uncommitted, self._directory)
        for stage in self._staging.list_directories():
            self._background.submit(remove_tree, stage)

    def stop_waiting(self) -> None:
        """Have `close` wait no longer for what no checkpoint depends on."""
        self._background.stop_waiting()

    async def close(self) -> None:
        """Finish everything, checksums and deletions too."""
        await self.finish_attempt()
        await self._background.close(self._emit)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
