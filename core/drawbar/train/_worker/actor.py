"""Ray actor that runs the training function and streams its messages.

`Worker.run` is a streaming generator. Reports, printed lines, collective calls, and the return
value or error form one ordered stream that the controller awaits. Commands of the controller
arrive in a separate concurrency group. All messages and commands are encoded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar._process import sentinel
from drawbar._process.codec import RayValue
from drawbar._process.imported_modules import FORK_ERROR_VARIABLE, ModulesImported
from drawbar._process.ranks import WorkerInfo
from drawbar._process.serialization import Serialized
from drawbar._process.stack import STACK
from drawbar._storage.run_directory import RunDirectory, finish_on_node
from drawbar.train._protocol.assignment import WORKER_INFO, WorkerAssignment
from drawbar.train._protocol.commands import COMMANDS
from drawbar.train._protocol.messages import (
    FINAL_MESSAGE_TYPES,
    MESSAGE_BATCHES,
    Message,
    RankFinished,
    Report,
)
from drawbar.train._worker.context import get_node_address
from drawbar.train._worker.rank_runner import RankRunner, execute, use_worker_process
from drawbar.train._worker.session import Session

if TYPE_CHECKING:
    from ray import ObjectRef

REPORT_BATCH_S = 0.25
"""Minimum time between two batches if the second one begins with a report of `report_buffered`."""

MAX_BATCHES_PER_S = 100
"""Maximum rate, over all ranks, of batches with only reports. Each costs the driver about 1 ms."""

MAX_BATCH_INTERVAL_S = 2.0
"""Maximum time that a report waits for others."""

BURST_REPORTS = 100
"""Number of reports of all ranks that are sent at once before the maximum rate applies."""


class Worker:
    """Ray actor of one rank. It can run several attempts in sequence.

    Args:
        run_path: Local path of the run directory.
    """

    def __init__(self, run_path: str) -> None:
        self._runner = RankRunner()
        report = RunDirectory(Path(run_path)).get_exit_report_path(os.uname().nodename, os.getpid())
        # On a node that does not share the run directory, no other process creates this path.
        report.parent.mkdir(parents=True, exist_ok=True)
        # Start in a thread: the rest of the initialization would wait about 10 ms for it.
        self._sentinel = threading.Thread(target=sentinel.start, args=(report,), daemon=True)
        self._sentinel.start()
        _restore_default_sigterm()
        # Ray enables it only for the crashing thread. A bug in the training function may crash a
        # library's thread instead, so dump all threads.
        faulthandler.enable(2, all_threads=True)

    def initialize(self, process_setup: Callable[[], object] | None) -> bytes:
        """Run the backend's process setup and return the encoded `WorkerInfo`."""
        if process_setup is not None:
            self._sentinel.join()  # it reports the exit status if the setup crashes
            process_setup()
        import ray

        context = ray.get_runtime_context()
        info = WorkerInfo(
            node_id=context.get_node_id(),
            node_ip=get_node_address(),
            hostname=os.uname().nodename,
            pid=os.getpid(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", ())),
            fork_error=take_fork_error(),
        )
        return WORKER_INFO.encode(info)

    def execute(self, call: Serialized) -> object:
        """Run a serialized (function, args, kwargs) for a backend and return its result."""
        return execute(call)

    def run(
        self, assignment: WorkerAssignment, train_loop: Sequence[ObjectRef[Serialized]]
    ) -> Iterator[RayValue]:
        """Run the training function and yield its messages in encoded batches.

        Args:
            assignment: Rank, checkpoint, and datasets for this attempt.
            train_loop: Sequence with one reference to a serialized `TrainLoop`. Ray does not
                resolve references inside a sequence.
        """
        self._sentinel.join()  # before user code can start a process that must not outlive this one
        outbox = Outbox(assignment.ranks.world_size)
        session = self._runner.start_attempt(assignment, outbox.put)
        run = partial(
            self._runner.run,
            session,
            train_loop[0],
            partial(_put_final_message, outbox),
            use_environment=use_worker_process,
        )
        thread = threading.Thread(target=run, name="training")
        thread.start()
        while True:
            # Yield in batches, because Ray's cost per item does not depend on its size.
            batch = outbox.take_batch()
            if (message := _take_imported_modules(session, batch)) is not None:
                batch.insert(0, message)
            yield MESSAGE_BATCHES.encode_for_ray(batch)
            if isinstance(batch[-1], FINAL_MESSAGE_TYPES):
                # The end of the stream signals the controller that this process can run another
                # attempt. The controller replaces the process if the stream ends too late.
                thread.join()
                session.uploads.async_commits.join()
                return

    def handle_command(self, attempt: int, command: RayValue) -> None:
        """Handle a command (control group). Commands for an attempt that has ended are ignored."""
        self._runner.handle_command(COMMANDS.decode_from_ray(command), attempt)

    def capture_stack(self) -> bytes:
        """Return the encoded stack of the training function or its program (control group)."""
        return STACK.encode(self._runner.capture_stack())

    def shut_down(self) -> None:
        """Run exit handlers and clean up the node; the caller kills the process afterwards."""
        import ray

        atexit.unregister(ray.shutdown)  # it would abort the reply to this call
        atexit._run_exitfuncs()
        session = self._runner.session
        if session is not None and session.should_clean_up_node:
            finish_on_node(session.directory, session.assignment.ranks.world_rank)


def take_fork_error() -> str:
    """Return why this process was not forked from the fork server, "" if it was or need not be."""
    return os.environ.pop(FORK_ERROR_VARIABLE, "")


def _take_imported_modules(session: Session, batch: Sequence[Message]) -> ModulesImported | None:
    """Return the modules that rank 0 has imported by its first report or its end, once."""
    modules = session.imported_modules
    if modules is None or not any(isinstance(message, Report | RankFinished) for message in batch):
        return None
    session.imported_modules = None
    if session.assignment.ranks.world_rank != 0:
        return None
    return modules.make_message()


class Outbox:
    """Ordered buffer for the messages of a worker.

    Reports without a checkpoint wait if the ranks report faster than `MAX_BATCHES_PER_S`. All other
    messages are sent at once, together with earlier reports, because a process may be waiting for
    them.

    Args:
        world_size: Number of ranks, which share the maximum rate.
    """

    def __init__(self, world_size: int) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._has_urgent = threading.Event()
        self._interval = min(world_size / MAX_BATCHES_PER_S, MAX_BATCH_INTERVAL_S)
        self._max_lead = max(BURST_REPORTS / world_size - 1, 0) * self._interval
        self._last_batch_time = -REPORT_BATCH_S
        # Time of the next batch at the maximum rate. A batch may be earlier by `_max_lead`.
        self._next_batch_time = 0.0

    def put(self, message: Message) -> None:
        """Add a message. Can be called from any thread."""
        self._messages.put(message)
        # `set()` takes a lock each time, and a loop that prints calls this a million times.
        can_wait = isinstance(message, Report) and message.offer is None
        if not can_wait and not self._has_urgent.is_set():
            self._has_urgent.set()

    def take_batch(self) -> list[Message]:
        """Wait for a message and return all messages that have been added.

        If all of them can wait, return them when the next batch is due.
        """
        batch = [self._messages.get()]
        is_urgent = self._has_urgent.wait(max(self._get_due_time(batch[0]) - time.monotonic(), 0))
        # Clear before emptying the queue, so that no urgent message is missed.
        self._has_urgent.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._messages.get_nowait())
        self._last_batch_time = time.monotonic()
        if not is_urgent:  # urgent messages do not delay later reports
            self._next_batch_time = (
                max(self._next_batch_time, self._last_batch_time) + self._interval
            )
        return batch

    def _get_due_time(self, message: Message) -> float:
        """Return when a batch that begins with a message is due if no message is urgent."""
        if isinstance(message, Report) and message.is_buffered:
            return self._last_batch_time + max(REPORT_BATCH_S, self._interval)
        return self._next_batch_time - self._max_lead


def _put_final_message(outbox: Outbox, message: Message | None) -> None:
    assert message is not None  # Ctrl-C does not reach the thread of a worker process
    outbox.put(message)


def _restore_default_sigterm() -> None:
    """Restore the default action of SIGTERM, which ends the process.

    Ray's handler asks Python's main thread to exit, but an actor with concurrency groups runs
    nothing in the main thread (ray-project/ray#53771). The process would stay alive while its
    peers wait for it. `signal.signal` only works in the main thread, so call the C library.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(None))
