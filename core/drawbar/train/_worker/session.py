"""The worker's side of one attempt: what `report()` and its companions do.

A session says messages, in order, and receives orders. It knows neither Ray nor threads of the
worker: `say` is any function that takes a message, and `obey` is called from any thread. So the
same session serves an actor, this very process (`num_workers=0`) and the threads of
`drawbar.train.testing`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from drawbar.train._config.validation_config import resolve_validation
from drawbar.train._messages import (
    Assignment,
    CheckpointConsistencyMode,
    CheckpointsAsked,
    DiagnosisAsked,
    Discarded,
    FileAsked,
    FileSent,
    Message,
    Offer,
    PassEnded,
    Reported,
    Retired,
)
from drawbar.train._metrics import Metrics, normalize
from drawbar.train._orders import (
    CheckpointsAnswer,
    Committed,
    Diagnosis,
    FileTaken,
    Interrupt,
    Order,
)
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import UploadTarget, make_default_name
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.node_local_storage import FileReply, NodeLocalStorage
from drawbar.train._worker.collectives import Collectives
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.data_sources import DataSources
from drawbar.train._worker.interrupt import InterruptScope
from drawbar.train._worker.report_checks import check_name, check_upload_fn
from drawbar.train._worker.stack import Stack
from drawbar.train._worker.thread_guard import ThreadGuard
from drawbar.train._worker.uploads import (
    CheckpointUploadFn,
    CheckpointUploadMode,
    Uploads,
    check_upload_mode,
)
from drawbar.train._worker.user_frames import format_caller_location

T = TypeVar("T")


class ProgramProxy(Protocol):
    """A program that runs in the place of the training function."""

    def obey(self, order: Order) -> None:
        """Take an order from the controller. From any thread; never blocks."""
        ...

    def capture_stack(self) -> Stack:
        """Say where it stands."""
        ...


class Session:
    """One attempt of one rank, from the first line of the function to its end."""

    def __init__(
        self, assignment: Assignment, say: Callable[[Message], None], cache: dict[object, object]
    ) -> None:
        self.assignment = assignment
        self.cache = cache
        self.directory = assignment.directory
        self.checkpoint = assignment.checkpoint
        self.should_clean_up_node = (
            False  # which does not share the run's directory, and is to be tidied
        )
        self._node_local_storage: NodeLocalStorage | None = None
        self._staging_label = f"rank_{assignment.ranks.world_rank}"
        self._say = say
        self.interrupt_scope = InterruptScope()
        self._mailbox = CommandQueue(say, self.interrupt_scope)
        self.data_sources = DataSources(
            assignment.shards, assignment.positions, self._send_epoch_ended
        )
        self.uploads = self._make_uploads(self.directory.checkpoints)
        self.thread_guard = ThreadGuard(assignment.ranks)
        self._send_lock = threading.RLock()  # one number after the other, said in that order
        self.collectives = Collectives(
            assignment.ranks.world_rank, self.thread_guard, self._send_lock, say, self._mailbox
        )
        self._next_report = assignment.first_index
        self._offers: dict[int, Offer] = {}
        self.final_notices: list[str] = []
        self._locals: dict[object, Any] = {}  # of integrations, by factory
        self.training_count = itertools.count(1)  # of the function, which may train several times
        self.program: ProgramProxy | None = None

    def get_local(self, factory: Callable[[], T]) -> T:
        """Return the object of this attempt that a factory makes at the first call."""
        with self._send_lock:
            if factory not in self._locals:
                self._locals[factory] = factory()
            made: T = self._locals[factory]
        return made

    @property
    def is_storage_node_local(self) -> bool:
        """Whether this node does not share the run's directory."""
        return self._node_local_storage is not None

    def forward(self, message: Message) -> None:
        """Say what the program says that stands in for the function."""
        with self._send_lock:
            if isinstance(message, Reported):
                self._next_report = message.index + 1
            self._say(message)

    @property
    def report_count(self) -> int:
        """How often this rank has reported in this attempt."""
        return self._next_report - self.assignment.first_index

    # -- reports and checkpoints

    def report_metrics(self, metrics: Mapping[str, object], *, is_buffered: bool = False) -> None:
        """Do what `report` says of metrics alone, or what `backend.report_buffered` says."""
        # Before the number is taken: a metric that is refused must not leave a gap, since ranks'
        # reports belong together by their numbers.
        values = normalize(metrics)
        where = format_caller_location()
        with self._send_lock:
            self.thread_guard.check_reporting_thread("report()")
            index, self._next_report = self._next_report, self._next_report + 1
            now = time.time()
            self._say(
                Reported(index=index, metrics=values, time=now, where=where, may_wait=is_buffered)
            )
        # An interruption hits the function's own thread alone: any other one that reports hears
        # here that the attempt is over.
        self._mailbox.raise_if_interrupted()

    def report(
        self,
        metrics: Mapping[str, object],
        checkpoint: Checkpoint | str | os.PathLike[str] | None,
        *,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
        upload_fn: CheckpointUploadFn | None = None,
        validation: object = False,
    ) -> None:
        """Do what `drawbar.train.report` says."""
        if checkpoint is None and validation is False:
            self.report_metrics(metrics)
            return
        # Before a report without a checkpoint goes its way: it says what is wrong there.
        to_validate = resolve_validation(
            validation, self.assignment.spec.validation, has_checkpoint=checkpoint is not None
        )
        if checkpoint is None:
            self.report_metrics(metrics)
            return
        values = normalize(metrics)
        check_upload_mode(mode)
        if upload_fn is not None:
            check_upload_fn(upload_fn)
        if name is not None:
            check_name(name)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        if delete_local is None:
            delete_local = self._should_move(checkpoint, mode)
        is_blocking = mode is not CheckpointUploadMode.ASYNC
        where = format_caller_location()
        with self._send_lock:
            self.thread_guard.check_reporting_thread("report()")
            index = self._next_report
            offer = self.uploads.make_offer(
                checkpoint,
                name=make_default_name(index) if name is None else name,
                mode=mode,
                upload_fn=upload_fn,
                should_move=delete_local,
            )
            # After the offer: one that raises has not been made, and the user may report again.
            self._next_report += 1
            self._offers[index] = offer
            self._say(
                Reported(
                    index=index,
                    metrics=values,
                    time=time.time(),
                    where=where,
                    offer=offer,
                    waits=is_blocking,
                    positions=self.data_sources.get_positions(),
                    validation=to_validate,
                )
            )
        # Outside the lock: other threads may report while this one waits for its commit.
        follow = self.uploads.persist_and_wait if is_blocking else self.uploads.async_commits.submit
        follow(index, offer)

    def _should_move(self, checkpoint: Checkpoint, mode: CheckpointUploadMode) -> bool:
        """Whether a folder becomes the run's, where the user does not say."""
        taken_over = mode.default_delete_local_checkpoint_after_upload()
        return taken_over and self.directory.checkpoints.get_child_name(checkpoint) is None

    def _send_epoch_ended(self, ended: PassEnded) -> None:
        with self._send_lock:
            self._say(msgspec.structs.replace(ended, index=self._next_report))

    def use_node_local_storage(self) -> None:
        """Have checkpoints travel: this node does not share the run's directory."""

        def send(name: str, path: str, offset: int, data: bytes) -> None:
            self._mailbox.request(
                lambda number: FileSent(
                    number=number, name=name, path=path, offset=offset, data=data
                ),
                FileTaken,
            )

        def ask(name: str, path: str, offset: int) -> FileReply:
            return self._mailbox.request(
                lambda number: FileAsked(number=number, name=name, path=path, offset=offset),
                FileReply,
            )

        sink = self._node_local_storage = NodeLocalStorage(self.directory, send, ask)
        self.uploads = self._make_uploads(sink)

    def _make_uploads(self, sink: UploadTarget) -> Uploads:
        attempt = self.assignment.attempt
        return Uploads(
            self.directory, sink, self._staging_label, attempt, self._say, self._mailbox.wait
        )

    def get_resume_checkpoint(self) -> Checkpoint | None:
        """Do what `drawbar.train.backend.get_resume_checkpoint` says."""
        made_here = self.checkpoint is not self.assignment.checkpoint
        return None if made_here else self.get_latest_checkpoint()

    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Do what `drawbar.train.get_checkpoint` says."""
        return self.ensure_local(self.checkpoint)

    def ensure_local(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Give a checkpoint of the run, of which this node has a copy if it does not share it."""
        if self._node_local_storage is not None and checkpoint is not None:
            self._node_local_storage.fetch_checkpoint(checkpoint)
        return checkpoint

    def retire_process(self) -> None:
        """Do what `drawbar.train.backend.retire_process` says."""
        self._say(Retired())

    def close(self, flush_timeout: float) -> None:
        """End early: checkpoints in flight get so long, and nothing waits for orders any more."""
        self.uploads.async_commits.drain(flush_timeout)
        self._mailbox.interrupt(self._mailbox.interrupt_reason or "the training function has ended")

    @contextmanager
    def checkpoint_dir(self) -> Iterator[Path]:
        """Do what `drawbar.train.checkpoint_dir` says."""
        path = self.directory.staging.make_directory(self._staging_label)
        try:
            yield path
        except BaseException:
            # What was reported is the controller's by now, and may be part of a commit.
            if all(offer.directory != str(path) for offer in self._offers.values()):
                remove_tree(path)
            raise

    def get_all_checkpoints(
        self, consistency_mode: CheckpointConsistencyMode, timeout: float | None
    ) -> list[tuple[Checkpoint, Metrics, ReportedCheckpointStatus]]:
        """Do what `drawbar.train.get_all_reported_checkpoints` says."""
        timed, where = timeout is not None, format_caller_location()
        answer = self._mailbox.request(
            lambda number: CheckpointsAsked(
                number=number, until=consistency_mode, timed=timed, where=where
            ),
            CheckpointsAnswer,
            timeout,
            lambda number: CheckpointsAsked(number=number, until=None),
        )
        return [
            (self.directory.checkpoints.get_checkpoint(name), metrics, status)
            for name, metrics, status in answer.checkpoints
        ]

    def discard_checkpoint(self, name: str) -> None:
        """Do what `drawbar.train.backend.discard_checkpoint` says."""
        self._say(Discarded(name=name))

    def diagnose(self) -> str:
        """Have the stacks of all ranks written; gives what tells them apart."""
        answer = self._mailbox.request(lambda number: DiagnosisAsked(number=number), Diagnosis)
        return answer.text

    # -- orders

    def obey(self, order: Order) -> None:
        """Take an order from the controller. Called from any thread; never blocks."""
        # Read once: the thread that waits for the program may let go of it meanwhile.
        program = self.program
        if program is None or isinstance(order, Interrupt):
            self._apply_command(order)
        if program is not None:
            program.obey(order)

    def _apply_command(self, order: Order) -> None:
        match order:
            case Interrupt():
                # The mailbox first: a thread that waits there cannot be hit by an exception until
                # it wakes (python/cpython#144748).
                self._mailbox.interrupt(order.reason)
                self.interrupt_scope.interrupt()
            case Committed():
                self.checkpoint = self.directory.checkpoints.get_checkpoint(order.name)
                # Only who has offered files waits for it; elsewhere nobody would take it.
                if self._offers.pop(order.index, None) is not None:
                    self._mailbox.put(order)
            case _:
                self._mailbox.put(order)
