"""From a complete round of reports to a committed checkpoint.

Ranks whose files are not staged yet are told which to persist; when the last one has, the
checkpoint is committed, journaled, retention is applied, and every rank is told. Commits happen one
at a time, in order, off the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from drawbar.train._controller.handed_over import HandedOver
from drawbar.train._controller.pending import Pending
from drawbar.train._controller.pieces import Pieces
from drawbar.train._controller.progress import Round
from drawbar.train._history import ranking
from drawbar.train._history.events import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    Notice,
)
from drawbar.train._history.stream import Emit
from drawbar.train._messages import (
    Committed,
    FileSent,
    FileTaken,
    Order,
    Persist,
    Persisted,
)
from drawbar.train._metrics import Metrics
from drawbar.train._settings.run_config import CheckpointConfig
from drawbar.train._storage import fault_points, starting_point
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import Draft
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import (
    Manifest,
    ReportedCheckpointStatus,
    Validation,
    committed_already,
    read_manifest,
)
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import Part
from drawbar.train._threads import DaemonThreads, in_daemon_thread

_logger = logging.getLogger("drawbar.train")


class Committer:
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
        self._metadata = json.dumps(metadata).encode() if metadata else None
        self._emit = emit
        self._on_commit = committed
        self._on_failure = failed
        self._said_unranked = False
        self._pending: dict[int, Pending] = {}
        self._ready: asyncio.Queue[Pending] = asyncio.Queue()
        self._committing: set[int] = set()
        self._background: set[asyncio.Future[None]] = set()
        self.pieces = Pieces(directory, failed)
        self.handed_over = HandedOver()
        # One thread: a checkpoint is hashed before it is deleted, never while it is.
        self._later = DaemonThreads(1, "drawbar-later", _yield_to_others)
        self._task: asyncio.Task[None] | None = None
        self.kept = self._checkpoints.intact()

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint, which a restart goes on from."""
        return self.kept[-1] if self.kept else None

    def what_is_left(self) -> str:
        """Say which checkpoint a failed run has, and where what was handed over for another is."""
        return "\n".join((self._what_loads(), *self.handed_over.left))

    def _what_loads(self) -> str:
        """Say in one line which checkpoint a failed run has; it may have been deleted."""
        is_local = self._directory.filesystem is None
        for manifest in reversed(self.kept):
            if not is_local or self._checkpoints.is_intact(manifest.name):
                return f"newest committed checkpoint: {self.checkpoint(manifest).path}"
        if self.kept:
            place = self._checkpoints.place(self.kept[-1].name)
            return f"no committed checkpoint is there any more in full; the newest was {place}"
        return "no checkpoint was committed"

    async def pass_over_damaged(self) -> None:
        """Let go of the newest checkpoints as long as they are damaged, and say so."""
        self.kept, damage = await in_daemon_thread(
            starting_point.pass_over_damaged, self._checkpoints, self.kept
        )
        for name, what in damage.items():
            self._emit(CheckpointDeleted(time=time.time(), name=name))
            self._emit(Notice(f"damaged, so passed over: {what}"))
            await in_daemon_thread(starting_point.set_aside, self._checkpoints, name)

    def begin(
        self,
        complete: Round,
        *,
        run_id: str,
        attempt: int,
        world_size: int,
        order: Callable[[int, Order], None],
    ) -> None:
        """Make a checkpoint of what the ranks offered in this round."""
        offers = complete.offers
        if not offers:
            return
        # Ranks may report different metrics; the checkpoint has those of the lowest with files.
        report = complete.reports[min(offers)]
        name = offers[min(offers)].name
        # Found out here rather than by the rename: on an object store the ranks would already be
        # writing their files into the committed checkpoint.
        if any(each.name == name for each in self.kept):
            self._on_failure(committed_already(self._checkpoints.place(name)))
            return
        validations = [complete.reports[rank].validation for rank in offers]

        def manifest(parts: list[Part]) -> Manifest:
            described = Manifest(
                name=name,
                index=complete.index,
                attempt=attempt,
                run_id=run_id,
                world_size=world_size,
                time=time.time(),
                metrics=report.metrics,
                positions=report.positions,
                validation=next((each for each in validations if each is not None), None),
            )
            return described.holding(file for part in parts for file in part.files)

        in_place = any(offer.in_place for offer in offers.values())
        pending = Pending(complete.index, manifest, time.monotonic(), name, in_place)
        for rank, offer in offers.items():
            share = complete.shares[rank]
            if offer.staged:
                pending.parts[rank] = Part(Path(offer.directory), share)
            elif share or (offer.in_place and not offer.files):
                pending.awaited[rank] = share
                order(rank, Persist(index=complete.index, files=share, name=name))
        self._pending[complete.index] = pending
        # From the complete round on, not from the last `Persisted`: whoever asks for all
        # checkpoints waits for this one too.
        self._committing.add(complete.index)
        self._commit_if_ready(complete.index)

    def persisted(self, rank: int, message: Persisted) -> None:
        """Take note that a rank has staged its share."""
        pending = self._pending.get(message.index)
        # Otherwise it is of an attempt that was dropped, and names may have been given anew.
        if pending is not None and rank in pending.awaited:
            share = pending.awaited.pop(rank)
            travelled = self.pieces.stage(pending.name, rank)
            directory = Path(message.directory) if message.directory else travelled
            pending.parts[rank] = Part(directory, share, message.checksums)
            if message.name:
                pending.places[rank] = message.name
            self._commit_if_ready(message.index)

    def take(self, rank: int, sent: FileSent, answer: Callable[[Order], None]) -> None:
        """Take a piece of a share that travels here from a node of its own, then say so."""
        if any(each.name == sent.name for each in self._pending.values()):
            self.pieces.take(rank, sent, answer)
        else:  # of a checkpoint that was dropped
            answer(FileTaken(number=sent.number))

    def _commit_if_ready(self, index: int) -> None:
        if self._pending[index].awaited:
            return
        # One at a time and in this order, though disks could do more: `newest` must never go back.
        self._ready.put_nowait(self._pending.pop(index))
        if self._task is None:
            self._task = asyncio.create_task(self._commit_forever())

    async def _commit_forever(self) -> None:
        while True:
            pending = await self._ready.get()
            try:
                await self._commit(pending)
            except Exception as error:  # whatever it is, the controller must hear of it
                self._on_failure(error)
            finally:
                self._committing.discard(pending.index)
                self._ready.task_done()

    async def _commit(self, pending: Pending) -> None:
        parts = [pending.parts[rank] for rank in sorted(pending.parts)]
        manifest = pending.manifest(parts)
        draft = Draft(
            manifest=msgspec.structs.replace(manifest, name=pending.placed()),
            parts=parts,
            durable=self._config.durable,
            metadata=self._metadata,
            in_place=pending.in_place,
        )
        manifest = await in_daemon_thread(self._checkpoints.commit, draft)
        seconds = time.monotonic() - pending.began
        # The journal first: nothing may go on from a checkpoint that it does not know.
        self._emit(CheckpointCommitted.of(manifest, seconds=seconds))
        fault_points.reached("commit.journaled")
        self.kept.append(manifest)
        # Before the ranks hear of it: the answers for which they wait depend on what is committing.
        self._committing.discard(manifest.index)
        self.handed_over.committed(manifest.index)
        self._on_commit(manifest)
        self._retain()
        # Out of the way by a rename: by the time of the deletion more may have been set aside.
        given_up = self._staging.bury(self._staging.uncommitted)
        self._in_background(self._after_commit, manifest.name, given_up)

    def _after_commit(self, name: str, given_up: Path) -> None:
        """Do what no checkpoint depends on in one go: each change of threads holds training up."""
        _logged(self._checkpoints.write_checksums, name)
        remove_tree(given_up)
        self._directory.files.publish()

    async def keep_validation(self, manifest: Manifest, validation: Validation) -> None:
        """Add what came of a checkpoint's validation to it, and rank the checkpoints anew.

        Raises:
            OSError: It cannot be written down; the checkpoint has it as long as this run goes on.
        """
        validated = manifest.validated(validation)
        # In memory before it is on disk: retention ranks by it, whether or not it can be written.
        self.kept[self.kept.index(manifest)] = validated
        try:
            self._emit(CheckpointValidated.of(manifest, validation))
            keep = partial(
                self._checkpoints.keep_validation, validated, durable=self._config.durable
            )
            await in_daemon_thread(keep)
        finally:
            self._retain()
        self._in_background(self._directory.files.publish)

    def discard(self, name: str) -> None:
        """Delete a checkpoint before retention would, unless a restart or a validation needs it."""
        pending = ReportedCheckpointStatus.PENDING_VALIDATION
        for manifest in self.kept[:-1]:
            if manifest.name == name and manifest.status is not pending:
                self._delete(manifest)

    def _retain(self) -> None:
        unranked = ranking.why_unranked(self.kept, self._config)
        if unranked is not None and not self._said_unranked:
            self._said_unranked = True
            self._emit(Notice(f"{unranked} Until a checkpoint has that score, none is deleted"))
        for manifest in ranking.to_delete(self.kept, self._config):
            self._delete(manifest)

    def _delete(self, manifest: Manifest) -> None:
        # In this order a kill leaves a checkpoint too many, never a journal that promises one.
        self.kept.remove(manifest)
        self._emit(CheckpointDeleted(time=time.time(), name=manifest.name))
        self._in_background(self._delete_files, manifest.name)

    def _delete_files(self, name: str) -> None:
        """Delete a checkpoint, unless it has this name from the user, who wants to keep it."""
        found = read_manifest(self._checkpoints.place(name))
        if found is None or found.name == name:
            self._checkpoints.delete(name)

    def _in_background(self, action: Callable[..., object], *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        later = loop.run_in_executor(self._later, _logged, action, *arguments)
        self._background.add(later)
        later.add_done_callback(self._background.discard)

    def checkpoint(self, manifest: Manifest) -> Checkpoint:
        """Give the checkpoint of a manifest."""
        return self._checkpoints.checkpoint(manifest.name)

    def listing(self) -> tuple[tuple[str, Metrics, ReportedCheckpointStatus], ...]:
        """List the checkpoints that are kept, oldest first, as (name, metrics, status)."""
        return tuple((each.name, each.metrics, each.status) for each in self.kept)

    def committing(self, before: int) -> bool:
        """Whether a checkpoint of a complete round before this one is not committed yet."""
        return any(index < before for index in self._committing)

    def committed_order(self, manifest: Manifest) -> Committed:
        """Give the order that tells a rank of this commit."""
        return Committed(index=manifest.index, name=manifest.name)

    async def settle(self) -> None:
        """Finish the commits that every rank has persisted, drop the rest: the attempt is over."""
        self._committing.difference_update(self._pending)
        self._pending.clear()
        # Their pieces are written into the stages that are removed below.
        await self.pieces.settle()
        # Not dropped, though the attempt is over: all ranks have persisted, and a restart from
        # there saves the most.
        await self._ready.join()
        await in_daemon_thread(self.handed_over.tell)
        # Before the stages are removed: these files are nowhere else.
        await in_daemon_thread(self._directory.set_aside)
        for stage in self._staging.stages():
            self._in_background(remove_tree, stage)

    async def close(self) -> None:
        """Finish everything, checksums and deletions too."""
        await self.settle()
        if self._background:
            await asyncio.wait(self._background)
        self._later.shutdown()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def _yield_to_others() -> None:
    """Give this thread a low priority: hashing must not slow the commits and the training."""
    if sys.platform != "linux":
        return  # elsewhere it would be the whole process
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _logged(action: Callable[..., object], *arguments: object) -> None:
    """Do something that no checkpoint depends on."""
    try:
        action(*arguments)
    except Exception as error:  # fsspec's filesystems raise what their libraries do
        _logger.warning("%s", error)
