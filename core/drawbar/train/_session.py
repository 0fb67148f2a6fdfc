"""The worker's side of one attempt: what `report()` and its companions do.

A session says messages, in order, and receives orders. It knows neither Ray nor threads of the
worker: `say` is any function that takes a message, and `obey` is called from any thread. So the
same session serves an actor, this very process (`num_workers=0`) and the threads of
`drawbar.train.testing`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from drawbar.train import _files
from drawbar.train._checkpoint import Checkpoint, remove_tree
from drawbar.train._data import fetch_shards
from drawbar.train._messages import (
    Answer,
    Asked,
    CollectiveCalled,
    CollectiveDone,
    CollectiveKind,
    Committed,
    Diagnosis,
    DiagnosisAsked,
    Interrupt,
    Message,
    Offer,
    Order,
    Persist,
    Persisted,
    Ranks,
    Reported,
)
from drawbar.train._metrics import normalise
from drawbar.train._preemption import Wishes
from drawbar.train._storage import RunDirectory
from drawbar.train._upload import CheckpointUploadMode

MAX_CHECKPOINTS_IN_FLIGHT = 2


class AttemptInterrupted(BaseException):
    """Raised inside the training function when the controller ends the attempt.

    A `BaseException`, like `KeyboardInterrupt`, so that `except Exception` in user code lets it
    through.
    """


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What one worker is told about its attempt. `shards` refers to its datasets, if any."""

    run_name: str
    run_id: str
    run_path: str
    attempt: int
    first_index: int
    ranks: Ranks
    checkpoint: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    gpu_ids: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    cpus: float | None = None
    working_directory: str = ""
    import_paths: tuple[str, ...] = ()
    shards: Any = None
    positions: dict[str, Any] = field(default_factory=dict)


class Session:
    """One attempt of one rank, from the first line of the function to its end."""

    def __init__(
        self, assignment: Assignment, say: Callable[[Message], None], cache: dict[Any, Any]
    ) -> None:
        self.assignment = assignment
        self.cache = cache
        self.directory = RunDirectory(Path(assignment.run_path))
        self.checkpoint = Checkpoint(assignment.checkpoint) if assignment.checkpoint else None
        self._say = say
        self._next_report = assignment.first_index
        self._next_collective = 0
        self._next_question = 0
        self._changed = threading.Condition()
        self._orders: dict[tuple[type[Order], int], Order] = {}
        self._offers: dict[int, Offer] = {}
        self._interrupted: str | None = None
        self._background: ThreadPoolExecutor | None = None
        self._in_flight: list[Future[None]] = []
        self._shards: dict[str, Any] | None = None
        self._position_of: dict[str, Callable[[], Any]] = {}

    @property
    def reports_made(self) -> int:
        """How often this rank has reported in this attempt."""
        return self._next_report - self.assignment.first_index

    # -- reports and checkpoints

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: Checkpoint | str | os.PathLike[str] | None,
        *,
        name: str | None,
        mode: CheckpointUploadMode,
        delete_local: bool | None,
    ) -> None:
        """Do what `drawbar.train.report` says."""
        values = normalise(metrics)
        offer = None
        if checkpoint is not None:
            offer = self._offer(Checkpoint(checkpoint), name=name)
        index, self._next_report = self._next_report, self._next_report + 1
        waits = offer is not None and mode is CheckpointUploadMode.SYNC
        if offer is None:
            self._say(Reported(index=index, metrics=values, time=time.time(), where=caller_line()))
            self._raise_if_interrupted()
            return
        if delete_local is None:
            delete_local = mode.default_delete_local_checkpoint_after_upload()
        self._offers[index] = offer
        if not waits:
            offer = self._make_safe_to_overwrite(offer, handed_over=delete_local)
        self._say(
            Reported(
                index=index,
                metrics=values,
                time=time.time(),
                where=caller_line(),
                offer=offer,
                waits=waits,
                positions={name: position() for name, position in self._position_of.items()},
            )
        )
        if waits:
            self._follow(index, offer, delete_local)
        else:
            self._follow_in_background(index, offer, delete_local)

    def _offer(self, checkpoint: Checkpoint, *, name: str | None) -> Offer:
        directory = Path(checkpoint.path)
        if not directory.is_dir():
            raise FileNotFoundError(
                f"report() was given the checkpoint {directory}, which is not a directory "
                f"on this worker's node ({os.uname().nodename})"
            )
        return Offer(
            directory=str(directory),
            files=_files.list_files(directory),
            staged=self.directory.is_staged(directory),
            name=name,
        )

    def _make_safe_to_overwrite(self, offer: Offer, *, handed_over: bool) -> Offer:
        """Before an asynchronous report returns: the user may write to their directory again."""
        if offer.staged or handed_over:
            return offer
        return self._stage(offer, offer.files, move=False)

    def _stage(self, offer: Offer, files: tuple[Any, ...], *, move: bool) -> Offer:
        target = self.directory.new_stage(f"rank_{self.assignment.ranks.world_rank}")
        act = _files.move_files if move else _files.copy_files
        act(Path(offer.directory), target, files)
        return Offer(directory=str(target), files=files, staged=True, name=offer.name)

    def _follow(self, index: int, offer: Offer, delete_local: bool) -> None:
        """See one checkpoint through: persist this rank's share, wait for the commit."""
        order = self._wait_for_any((Persist, index), (Committed, index))
        if isinstance(order, Persist):
            staged = self._stage(offer, order.files, move=delete_local)
            self._say(Persisted(index=index, directory=staged.directory))
            order = self._wait_for_any((Committed, index))
        assert isinstance(order, Committed)
        if delete_local and not offer.staged:
            remove_tree(Path(offer.directory))

    def _follow_in_background(self, index: int, offer: Offer, delete_local: bool) -> None:
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="drawbar-checkpoint")
        while len([f for f in self._in_flight if not f.done()]) >= MAX_CHECKPOINTS_IN_FLIGHT:
            self._in_flight.pop(0).result()
        self._in_flight.append(self._background.submit(self._follow, index, offer, delete_local))

    def flush(self) -> None:
        """Wait until every asynchronous checkpoint is committed; raise what went wrong with one."""
        while self._in_flight:
            self._in_flight.pop(0).result()
        if self._background is not None:
            self._background.shutdown()

    @contextmanager
    def checkpoint_dir(self) -> Iterator[Path]:
        """Do what `drawbar.train.checkpoint_dir` says."""
        path = self.directory.new_stage(f"rank_{self.assignment.ranks.world_rank}")
        try:
            yield path
        except BaseException:
            remove_tree(path)
            raise

    def all_checkpoints(self, timeout: float | None) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Ask the controller for the committed checkpoints that are kept, oldest first."""
        number, self._next_question = self._next_question, self._next_question + 1
        self._say(Asked(number=number))
        answer = self._wait_for_any((Answer, number), timeout=timeout)
        assert isinstance(answer, Answer)
        return [(Checkpoint(path), metrics) for path, metrics in answer.checkpoints]

    def dataset_shard(self, name: str) -> Any:
        """Do what `drawbar.train.get_dataset_shard` says."""
        if self._shards is None:
            self._shards = fetch_shards(self.assignment.shards)
        try:
            return self._shards[name]
        except KeyError:
            names = ", ".join(map(repr, self._shards)) or "none"
            raise KeyError(
                f"the trainer was given no dataset {name!r}; its datasets: {names}"
            ) from None

    def keep_data_position(self, name: str, position: Callable[[], Any]) -> Any:
        """Do what `drawbar.train.backend.keep_data_position` says."""
        self._position_of[name] = position
        return self.assignment.positions.get(name)

    # -- collectives

    def collective(self, kind: CollectiveKind, value: object = None) -> list[Any]:
        """Meet all ranks once; gives the values that came of it (none for a barrier)."""
        sequence, self._next_collective = self._next_collective, self._next_collective + 1
        rank = self.assignment.ranks.world_rank
        gives = kind == "all_gather" or (kind == "broadcast_from_rank_zero" and rank == 0)
        self._say(
            CollectiveCalled(
                sequence=sequence,
                kind=kind,
                payload=cloudpickle.dumps(value) if gives else None,
                where=caller_line(),
            )
        )
        done = self._wait_for_any((CollectiveDone, sequence))
        assert isinstance(done, CollectiveDone)
        return [cloudpickle.loads(p) for p in done.payloads if p is not None]

    def wishes(self) -> Wishes:
        """Ask, together with all ranks, what the controller wishes."""
        (wishes,) = self.collective("wishes")
        found: Wishes = wishes
        return found

    def diagnose(self) -> str:
        """Have the stacks of all ranks written; gives what tells them apart."""
        number, self._next_question = self._next_question, self._next_question + 1
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
                case Answer() | Diagnosis():
                    self._orders[type(order), order.number] = order
                case CollectiveDone():
                    self._orders[type(order), order.sequence] = order
                case Persist():
                    self._orders[type(order), order.index] = order
                case Committed():
                    self.checkpoint = Checkpoint(order.path)
                    if self._offers.pop(order.index, None) is not None:
                        self._orders[type(order), order.index] = order
            self._changed.notify_all()

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
