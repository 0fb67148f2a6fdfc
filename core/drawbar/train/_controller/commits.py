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

from drawbar.train._controller.handed_over import HandedOver
from drawbar.train._controller.kept import KeptCheckpoints
from drawbar.train._controller.later import Later, logged
from drawbar.train._controller.pending import Pending
from drawbar.train._controller.pieces import Pieces
from drawbar.train._controller.progress import Round
from drawbar.train._history.events import (
    CheckpointCommitted,
)
from drawbar.train._history.stream import Emit
from drawbar.train._messages import FileSent, Persisted
from drawbar.train._orders import Committed, FileTaken, Order, Persist
from drawbar.train._settings.run_config import CheckpointConfig
from drawbar.train._storage import fault_points, upkeep
from drawbar.train._storage.checkpoint_store import Draft
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import (
    Manifest,
    committed_already,
)
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import Part
from drawbar.train._threads import in_daemon_thread


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
        # Written once: each commit would do it on the event loop again.
        self._metadata = json.dumps(metadata).encode() if metadata else None
        self._emit = emit
        self._on_commit = committed
        self._on_failure = failed
        self._pending: dict[int, Pending] = {}
        self._ready: asyncio.Queue[Pending] = asyncio.Queue()
        self._committing: set[int] = set()
        self.pieces = Pieces(directory, failed)
        self.handed_over = HandedOver()
        self._later = Later()
        self.kept = KeptCheckpoints(directory, config, emit, self._later)
        self._task: asyncio.Task[None] | None = None

    def what_is_left(self) -> str:
        """Say which checkpoint a failed run has, and where what was handed over for another is."""
        return "\n".join((self.kept.what_loads(), *self.handed_over.left))

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
        if any(each.name == name for each in self.kept.all):
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
            # What an upload function puts there nobody knows, and ranks may meet in it; so each
            # of them is asked, also one all of whose files lower ranks give.
            elif share or offer.in_place:
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
        # The rank waits for an answer in any case: it sends the next piece only then.
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
        self.kept.all.append(manifest)
        # Before the ranks hear of it: the answers for which they wait depend on what is committing.
        self._committing.discard(manifest.index)
        self.handed_over.committed(manifest.index)
        self._on_commit(manifest)
        self.kept.retain()
        # Out of the way by a rename: by the time of the deletion more may have been set aside.
        given_up = self._staging.bury(self._staging.uncommitted)
        self._later.do(self._after_commit, manifest.name, given_up)

    def _after_commit(self, name: str, given_up: Path) -> None:
        """Do what no checkpoint depends on in one go: each change of threads holds training up."""
        logged(self._checkpoints.write_checksums, name)
        remove_tree(given_up)
        self._directory.files.publish()

    def committing(self, before: int) -> bool:
        """Whether a checkpoint of a complete round before this one is not committed yet."""
        return any(index < before for index in self._committing)

    def committed_order(self, manifest: Manifest) -> Committed:
        """Give the order that tells a rank of this commit."""
        return Committed(index=manifest.index, name=manifest.name)

    async def settle(self) -> None:
        """Finish the commits that every rank has persisted, drop the rest: the attempt is over."""
        # Else whoever asks for all checkpoints waits for these without end.
        self._committing.difference_update(self._pending)
        self._pending.clear()
        # Their pieces are written into the stages that are removed below.
        await self.pieces.settle()
        # Not dropped, though the attempt is over: all ranks have persisted, and a restart from
        # there saves the most.
        await self._ready.join()
        await in_daemon_thread(self.handed_over.tell)
        # Before the stages are removed: these files are nowhere else.
        await in_daemon_thread(upkeep.set_aside, self._directory)
        for stage in self._staging.stages():
            self._later.do(remove_tree, stage)

    def give_up(self) -> None:
        """Have `close` wait no longer for what no checkpoint depends on."""
        self._later.give_up()

    async def close(self) -> None:
        """Finish everything, checksums and deletions too."""
        await self.settle()
        await self._later.close(self._emit)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
