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
from drawbar.train._metrics import Metrics, normalise
from drawbar.train._orders import (
    CheckpointsAnswer,
    Committed,
    Diagnosis,
    FileTaken,
    Interrupt,
    Order,
)
from drawbar.train._settings.validation_config import asked_for
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import ShareSink, default_name
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.unshared_node import FileAnswer, UnsharedNode
from drawbar.train._worker.acceptable import check_name, check_upload_fn
from drawbar.train._worker.callers import Callers
from drawbar.train._worker.collectives import Collectives
from drawbar.train._worker.data_sources import DataSources
from drawbar.train._worker.interrupt import Interruptible
from drawbar.train._worker.mailbox import Mailbox
from drawbar.train._worker.stack import Stack
from drawbar.train._worker.uploads import (
    CheckpointUploadFn,
    CheckpointUploadMode,
    Uploads,
    check_mode,
)
from drawbar.train._worker.user_code import caller_line

T = TypeVar("T")


class StandIn(Protocol):
    """A program that runs in the place of the training function."""

    def obey(self, order: Order) -> None:
        """Take an order from the controller. From any thread; never blocks."""
        ...

    def stack(self) -> Stack:
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
        self.leaves_node = False  # which does not share the run's directory, and is to be tidied
        self._unshared: UnsharedNode | None = None
        self._label = f"rank_{assignment.ranks.world_rank}"
        self._say = say
        self.user_code = Interruptible()
        self._mailbox = Mailbox(say, self.user_code)
        self.data = DataSources(assignment.shards, assignment.positions, self._tell_pass)
        self.uploads = self._uploads_to(self.directory.checkpoints)
        self.callers = Callers(assignment.ranks)
        self._order = threading.RLock()  # one number after the other, said in that order
        self.collectives = Collectives(
            assignment.ranks.world_rank, self.callers, self._order, say, self._mailbox
        )
        self._next_report = assignment.first_index
        self._offers: dict[int, Offer] = {}
        self.remarks: list[str] = []
        self._locals: dict[object, Any] = {}  # of integrations, by factory
        self.trainings = itertools.count(1)  # of the function, which may train several times
        self.program: StandIn | None = None

    def get_local(self, factory: Callable[[], T]) -> T:
        """Return the object of this attempt that a factory makes at the first call."""
        with self._order:
            if factory not in self._locals:
                self._locals[factory] = factory()
            made: T = self._locals[factory]
        return made

    @property
    def is_unshared(self) -> bool:
        """Whether this node does not share the run's directory."""
        return self._unshared is not None

    def pass_on(self, message: Message) -> None:
        """Say what the program says that stands in for the function."""
        with self._order:
            if isinstance(message, Reported):
                self._next_report = message.index + 1
            self._say(message)

    @property
    def reports_made(self) -> int:
        """How often this rank has reported in this attempt."""
        return self._next_report - self.assignment.first_index

    # -- reports and checkpoints

    def report_metrics(self, metrics: Mapping[str, object], *, may_wait: bool = False) -> None:
        """Do what `report` says of metrics alone, or what `backend.report_soon` says."""
        # Before the number is taken: a metric that is refused must not leave a gap, since ranks'
        # reports belong together by their numbers.
        values = normalise(metrics)
        where = caller_line()
        with self._order:
            self.callers.check_speaker("report()")
            index, self._next_report = self._next_report, self._next_report + 1
            now = time.time()
            self._say(
                Reported(index=index, metrics=values, time=now, where=where, may_wait=may_wait)
            )
        # An interruption hits the function's own thread alone: any other one that reports hears
        # here that the attempt is over.
        self._mailbox.check()

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
        to_validate = asked_for(
            validation, self.assignment.spec.validation, has_checkpoint=checkpoint is not None
        )
        if checkpoint is None:
            self.report_metrics(metrics)
            return
        values = normalise(metrics)
        check_mode(mode)
        if upload_fn is not None:
            check_upload_fn(upload_fn)
        if name is not None:
            check_name(name)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        if delete_local is None:
            delete_local = self._hands_over(checkpoint, mode)
        waits = mode is not CheckpointUploadMode.ASYNC
        where = caller_line()
        with self._order:
            self.callers.check_speaker("report()")
            index = self._next_report
            offer = self.uploads.offer(
                checkpoint,
                name=default_name(index) if name is None else name,
                mode=mode,
                upload_fn=upload_fn,
                handed_over=delete_local,
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
                    waits=waits,
                    positions=self.data.positions(),
                    validation=to_validate,
                )
            )
        # Outside the lock: other threads may report while this one waits for its commit.
        follow = self.uploads.follow if waits else self.uploads.in_flight.add
        follow(index, offer)

    def _hands_over(self, checkpoint: Checkpoint, mode: CheckpointUploadMode) -> bool:
        """Whether a folder becomes the run's, where the user does not say."""
        taken_over = mode.default_delete_local_checkpoint_after_upload()
        return taken_over and self.directory.checkpoints.name_of(checkpoint) is None

    def _tell_pass(self, ended: PassEnded) -> None:
        with self._order:
            self._say(msgspec.structs.replace(ended, index=self._next_report))

    def use_unshared(self) -> None:
        """Have checkpoints travel: this node does not share the run's directory."""

        def send(name: str, path: str, offset: int, data: bytes) -> None:
            self._mailbox.ask(
                lambda number: FileSent(
                    number=number, name=name, path=path, offset=offset, data=data
                ),
                FileTaken,
            )

        def ask(name: str, path: str, offset: int) -> FileAnswer:
            return self._mailbox.ask(
                lambda number: FileAsked(number=number, name=name, path=path, offset=offset),
                FileAnswer,
            )

        sink = self._unshared = UnsharedNode(self.directory, send, ask)
        self.uploads = self._uploads_to(sink)

    def _uploads_to(self, sink: ShareSink) -> Uploads:
        attempt = self.assignment.attempt
        return Uploads(self.directory, sink, self._label, attempt, self._say, self._mailbox.wait)

    def inherited_checkpoint(self) -> Checkpoint | None:
        """Do what `drawbar.train.backend.inherited_checkpoint` says."""
        made_here = self.checkpoint is not self.assignment.checkpoint
        return None if made_here else self.newest_checkpoint()

    def newest_checkpoint(self) -> Checkpoint | None:
        """Do what `drawbar.train.get_checkpoint` says."""
        return self.brought_here(self.checkpoint)

    def brought_here(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Give a checkpoint of the run, of which this node has a copy if it does not share it."""
        if self._unshared is not None and checkpoint is not None:
            self._unshared.bring(checkpoint)
        return checkpoint

    def retire(self) -> None:
        """Do what `drawbar.train.backend.retire_process` says."""
        self._say(Retired())

    def end(self, seconds: float) -> None:
        """End early: checkpoints in flight get so long, and nothing waits for orders any more."""
        self.uploads.in_flight.flush_for(seconds)
        self._mailbox.interrupt(self._mailbox.interrupted or "the training function has ended")

    @contextmanager
    def checkpoint_dir(self) -> Iterator[Path]:
        """Do what `drawbar.train.checkpoint_dir` says."""
        path = self.directory.staging.new(self._label)
        try:
            yield path
        except BaseException:
            # What was reported is the controller's by now, and may be part of a commit.
            if all(offer.directory != str(path) for offer in self._offers.values()):
                remove_tree(path)
            raise

    def all_checkpoints(
        self, until: CheckpointConsistencyMode, timeout: float | None
    ) -> list[tuple[Checkpoint, Metrics, ReportedCheckpointStatus]]:
        """Do what `drawbar.train.get_all_reported_checkpoints` says."""
        timed, where = timeout is not None, caller_line()
        answer = self._mailbox.ask(
            lambda number: CheckpointsAsked(number=number, until=until, timed=timed, where=where),
            CheckpointsAnswer,
            timeout,
            lambda number: CheckpointsAsked(number=number, until=None),
        )
        return [
            (self.directory.checkpoints.checkpoint(name), metrics, status)
            for name, metrics, status in answer.checkpoints
        ]

    def discard_checkpoint(self, name: str) -> None:
        """Do what `drawbar.train.backend.discard_checkpoint` says."""
        self._say(Discarded(name=name))

    def diagnose(self) -> str:
        """Have the stacks of all ranks written; gives what tells them apart."""
        answer = self._mailbox.ask(lambda number: DiagnosisAsked(number=number), Diagnosis)
        return answer.text

    # -- orders

    def obey(self, order: Order) -> None:
        """Take an order from the controller. Called from any thread; never blocks."""
        # Read once: the thread that waits for the program may let go of it meanwhile.
        program = self.program
        if program is None or isinstance(order, Interrupt):
            self._obey(order)
        if program is not None:
            program.obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Interrupt():
                # The mailbox first: a thread that waits there cannot be hit by an exception until
                # it wakes (python/cpython#144748).
                self._mailbox.interrupt(order.reason)
                self.user_code.interrupt()
            case Committed():
                self.checkpoint = self.directory.checkpoints.checkpoint(order.name)
                # Only who has offered files waits for it; elsewhere nobody would take it.
                if self._offers.pop(order.index, None) is not None:
                    self._mailbox.put(order)
            case _:
                self._mailbox.put(order)
