"""The worker's side of one attempt: what `report()` and its companions do.

A session says messages, in order, and receives orders. It knows neither Ray nor threads of the
worker: `say` is any function that takes a message, and `obey` is called from any thread. So the
same session serves an actor, this very process (`num_workers=0`) and the threads of
`drawbar.train.testing`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawbar.train._carry import carry
from drawbar.train._data.split import fetch_shards, position_name
from drawbar.train._messages import (
    Assignment,
    CheckpointConsistencyMode,
    CheckpointsAnswer,
    CheckpointsAsked,
    CollectiveCalled,
    CollectiveDone,
    CollectiveKind,
    Committed,
    Diagnosis,
    DiagnosisAsked,
    Discarded,
    FileAsked,
    FileSent,
    FileTaken,
    Interrupt,
    Message,
    Offer,
    Order,
    Persist,
    Reported,
    Retired,
    Wishes,
)
from drawbar.train._metrics import normalise
from drawbar.train._settings.validation_config import asked_for
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import ShareSink, default_name
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.unshared_node import FileAnswer, UnsharedNode
from drawbar.train._worker.acceptable import check_name
from drawbar.train._worker.callers import Callers
from drawbar.train._worker.interrupt import AttemptInterrupted, Interruptible
from drawbar.train._worker.uploads import (
    CheckpointUploadFn,
    CheckpointUploadMode,
    Uploads,
    check_mode,
)


class Session:
    """One attempt of one rank, from the first line of the function to its end."""

    def __init__(
        self, assignment: Assignment, say: Callable[[Message], None], cache: dict[Any, Any]
    ) -> None:
        self.assignment = assignment
        self.cache = cache
        self.directory = assignment.directory
        self.checkpoint = assignment.checkpoint
        self._unshared: UnsharedNode | None = None
        self._label = f"rank_{assignment.ranks.world_rank}"
        self._say = say
        self.uploads = self._uploads_to(self.directory.checkpoints)
        self.callers = Callers(assignment.ranks)
        self._order = threading.RLock()  # one number after the other, said in that order
        self._next_report = assignment.first_index
        self._next_collective = 0
        self._questions = itertools.count()  # of any thread
        self._changed = threading.Condition()
        self._orders: dict[tuple[type[Order], int], Order] = {}
        self._offers: dict[int, Offer] = {}
        self._interrupted: str | None = None
        self.user_code = Interruptible()
        self._data = threading.RLock()
        self._shards: dict[str, Any] | None = None
        self._position_of: dict[str, Callable[[], Any]] = {}
        self._positions_left = dict(assignment.positions)  # of sources not opened yet
        self._sources = Counter[str]()

    @property
    def reports_made(self) -> int:
        """How often this rank has reported in this attempt."""
        return self._next_report - self.assignment.first_index

    # -- reports and checkpoints

    def report_metrics(self, metrics: Mapping[str, Any], *, may_wait: bool = False) -> None:
        """Do what `report` says of metrics alone, or what `backend.report_soon` says."""
        values = normalise(metrics)
        where = caller_line()
        with self._order:
            self.callers.check_speaker("report()")
            index, self._next_report = self._next_report, self._next_report + 1
            now = time.time()
            self._say(
                Reported(index=index, metrics=values, time=now, where=where, may_wait=may_wait)
            )
        self._raise_if_interrupted()

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | str | os.PathLike[str] | None,
        *,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
        upload_fn: CheckpointUploadFn | None = None,
        validation: object = False,
    ) -> None:
        """Do what `drawbar.train.report` says."""
        to_validate = asked_for(
            validation, self.assignment.spec.validation, has_checkpoint=checkpoint is not None
        )
        if checkpoint is None:
            self.report_metrics(metrics)
            return
        values = normalise(metrics)
        check_mode(mode)
        if name is not None:
            check_name(name)
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        if delete_local is None:
            taken_over = mode.default_delete_local_checkpoint_after_upload()
            delete_local = taken_over and self.directory.checkpoints.name_of(checkpoint) is None
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
                    positions=self._positions(),
                    validation=to_validate,
                )
            )
        follow = self.uploads.follow if waits else self.uploads.follow_in_background
        follow(index, offer)

    def use_unshared(self) -> None:
        """Have checkpoints travel: this node does not share the run's directory."""
        sink = self._unshared = UnsharedNode(self.directory, self._send, self._ask)
        self.uploads = self._uploads_to(sink)

    def _uploads_to(self, sink: ShareSink) -> Uploads:
        attempt = self.assignment.attempt
        return Uploads(self.directory, sink, self._label, attempt, self._say, self._wait_for_any)

    def _send(self, name: str, path: str, offset: int, data: bytes) -> None:
        number = next(self._questions)
        self._say(FileSent(number=number, name=name, path=path, offset=offset, data=data))
        self._wait_for_any((FileTaken, number))

    def _ask(self, name: str, path: str, offset: int) -> FileAnswer:
        number = next(self._questions)
        self._say(FileAsked(number=number, name=name, path=path, offset=offset))
        answer = self._wait_for_any((FileAnswer, number))
        assert isinstance(answer, FileAnswer)
        return answer

    def newest_checkpoint(self) -> Checkpoint | None:
        """Do what `drawbar.train.get_checkpoint` says."""
        newest = self.checkpoint
        if self._unshared is not None and newest is not None:
            self._unshared.bring(newest)
        return newest

    def retire(self) -> None:
        """Do what `drawbar.train.backend.retire_process` says."""
        self._say(Retired())

    def end(self, seconds: float) -> None:
        """End early: checkpoints in flight get so long, and nothing waits for orders any more."""
        self.uploads.flush_for(seconds)
        with self._changed:
            self._interrupted = self._interrupted or "the training function has ended"
            self._changed.notify_all()

    @contextmanager
    def checkpoint_dir(self) -> Iterator[Path]:
        """Do what `drawbar.train.checkpoint_dir` says."""
        path = self.directory.staging.new(self._label)
        try:
            yield path
        except BaseException:
            if all(offer.directory != str(path) for offer in self._offers.values()):
                remove_tree(path)
            raise

    def all_checkpoints(
        self, until: CheckpointConsistencyMode, timeout: float | None
    ) -> list[tuple[Checkpoint, dict[str, Any], ReportedCheckpointStatus]]:
        """Do what `drawbar.train.get_all_reported_checkpoints` says."""
        number = next(self._questions)
        self._say(CheckpointsAsked(number=number, until=until))
        try:
            answer = self._wait_for_any((CheckpointsAnswer, number), timeout=timeout)
        except TimeoutError:
            self._say(CheckpointsAsked(number=number, until=None))
            answer = self._wait_for_any((CheckpointsAnswer, number))
        assert isinstance(answer, CheckpointsAnswer)
        return [
            (self.directory.checkpoints.checkpoint(name), metrics, status)
            for name, metrics, status in answer.checkpoints
        ]

    def discard_checkpoint(self, name: str) -> None:
        """Do what `drawbar.train.backend.discard_checkpoint` says."""
        self._say(Discarded(name=name))

    def dataset_shard(self, name: str) -> Any:
        """Do what `drawbar.train.get_dataset_shard` says."""
        with self._data:
            if self._shards is None:
                shards = fetch_shards(self.assignment.shards)
                for each, shard in shards.items():
                    self.keep_data_position(position_name(each), shard.position)
                self._shards = shards
        try:
            return self._shards[name]
        except KeyError:
            names = ", ".join(map(repr, self._shards)) or "none"
            raise KeyError(
                f"the trainer was given no dataset {name!r}; its datasets: {names}"
            ) from None

    def keep_data_position(
        self, name: str, position: Callable[[], Any], *, numbered: bool = False
    ) -> Any:
        """Do what `drawbar.train.backend.keep_data_position` says."""
        with self._data:
            if numbered:
                self._sources[name] += 1
                name = f"{name}-{self._sources[name]}"
            self._position_of[name] = position
            return self._positions_left.pop(name, None)

    def _positions(self) -> dict[str, Any]:
        """Give the position of every source, also of those that are not opened again yet."""
        with self._data:
            sources, left = dict(self._position_of), dict(self._positions_left)
        positions = {name: position() for name, position in sources.items()}
        for name, value in positions.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"the position of the data source {name!r} goes into the checkpoint's "
                    f"manifest, which is JSON, but {error}; found {value!r}"
                ) from None
        known = {name: value for name, value in positions.items() if value is not None}
        return {**left, **known}

    # -- collectives

    @property
    def collectives_called(self) -> int:
        """Do what `drawbar.train.backend.collectives_called` says."""
        return self._next_collective

    def collective(self, kind: CollectiveKind, value: object = None) -> list[Any]:
        """Meet all ranks once; gives the values that came of it (none for a barrier)."""
        rank = self.assignment.ranks.world_rank
        gives = kind == "all_gather" or (kind == "broadcast_from_rank_zero" and rank == 0)
        payload = carry(value) if gives else None
        where = caller_line()
        with self._order:
            self.callers.check_speaker("a collective")
            sequence, self._next_collective = self._next_collective, self._next_collective + 1
            self._say(CollectiveCalled(sequence=sequence, kind=kind, payload=payload, where=where))
        done = self._wait_for_any((CollectiveDone, sequence))
        assert isinstance(done, CollectiveDone)
        return [p.unpack() for p in done.payloads if p is not None]

    def wishes(self) -> Wishes:
        """Ask, together with all ranks, what the controller wishes."""
        (wishes,) = self.collective("wishes")
        found: Wishes = wishes
        return found

    def diagnose(self) -> str:
        """Have the stacks of all ranks written; gives what tells them apart."""
        number = next(self._questions)
        self._say(DiagnosisAsked(number=number))
        answer = self._wait_for_any((Diagnosis, number))
        assert isinstance(answer, Diagnosis)
        return answer.text

    # -- orders

    def obey(self, order: Order) -> None:
        """Take an order from the controller. Called from any thread; never blocks."""
        with self._changed:
            match order:
                case Interrupt():
                    self._interrupted = order.reason
                case CheckpointsAnswer() | Diagnosis() | FileTaken() | FileAnswer():
                    self._orders[type(order), order.number] = order
                case CollectiveDone():
                    self._orders[type(order), order.sequence] = order
                case Persist():
                    self._orders[type(order), order.index] = order
                case Committed():
                    self.checkpoint = self.directory.checkpoints.checkpoint(order.name)
                    if self._offers.pop(order.index, None) is not None:
                        self._orders[type(order), order.index] = order
            self._changed.notify_all()
        if isinstance(order, Interrupt):
            self.user_code.interrupt()

    def _wait_for_any(self, *keys: tuple[type[Order], int], timeout: float | None = None) -> Order:
        def arrived() -> Order | None:
            for key in keys:
                if key in self._orders:
                    return self._orders.pop(key)
            self._raise_if_interrupted()
            return None

        with self._changed:
            order = self._changed.wait_for(arrived, timeout)
        if order is None:
            raise TimeoutError(f"the controller gave no answer within {timeout} s")
        return order

    def _raise_if_interrupted(self) -> None:
        if self._interrupted is not None:
            raise AttemptInterrupted(self._interrupted)


def caller_line() -> str:
    """Give the innermost line on this thread's stack outside Drawbar as `file:line in function`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("drawbar."):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
