"""One worker: runs the training function in a thread of its own and streams what it says.

`Worker.run` is a streaming generator: reports, prints, collective calls, the return value and the
error as data are one ordered stream that the controller awaits. The control group takes the
controller's few orders meanwhile. The same `perform` runs the function in this process for
`num_workers=0`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import ray

from drawbar.train._config.backend import BackendConfig
from drawbar.train._messages import (
    Assignment,
    Failed,
    Finished,
    FunctionRaised,
    FunctionStarted,
    Interrupted,
    Message,
    Printed,
    Reported,
    WorkerInfo,
)
from drawbar.train._orders import Order
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._storage import upkeep
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker import sentinel
from drawbar.train._worker.addresses import get_node_address
from drawbar.train._worker.context import use_session
from drawbar.train._worker.failure import describe_exception
from drawbar.train._worker.interrupt import AttemptInterrupted
from drawbar.train._worker.output import capture_output
from drawbar.train._worker.session import Session
from drawbar.train._worker.stack import Stack, capture_stack
from drawbar.train._worker.worker_env import (
    compute_thread_count,
    count_available_cores,
    get_runtime_env_vars,
    make_thread_env_vars,
    make_torchrun_env_vars,
    set_env_vars,
)

if TYPE_CHECKING:
    from ray import ObjectRef

REPORT_BATCH_S = 0.25
"""How long after the last item a report that may wait is kept for the next one, at the most."""


class Outbox:
    """Keeps a worker's messages, in order, until they are taken."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._last = -REPORT_BATCH_S

    def put(self, message: Message) -> None:
        """Keep a message; called from any thread."""
        self._messages.put(message)
        # `set()` takes a lock each time, and a loop that prints calls this a million times.
        may_wait = isinstance(message, Reported) and message.may_wait
        if not may_wait and not self._urgent.is_set():
            self._urgent.set()

    def take_batch(self) -> list[Message]:
        """Give all messages, once there is one; if none is urgent, not too soon after the last."""
        batch = [self._messages.get()]
        self._urgent.wait(max(self._last + REPORT_BATCH_S - time.monotonic(), 0))
        self._urgent.clear()  # before the queue is emptied, so that none is overlooked
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._messages.get_nowait())
        self._last = time.monotonic()
        return batch


FAILURE_FLUSH_S = 2.0
"""How long checkpoints in flight may hold up the news that the function has raised."""

_FINAL_MESSAGE_TYPES = (Finished, Failed, Interrupted)


@dataclass(frozen=True)
class TrainLoop:
    """What every rank runs. Packed once in the driver; unpacked only where it runs."""

    function: Callable[..., object]
    takes_config: bool
    config: object
    backend_config: BackendConfig

    def run(self) -> object:
        """Run the training function inside its backend's context."""
        if not self.takes_config:
            return self.function()
        return self.function({} if self.config is None else self.config)


class Worker:
    """The actor. One per rank; it can run one attempt after another."""

    def __init__(self, run_path: str) -> None:
        self._cache: dict[object, object] = {}
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
        report = RunDirectory(Path(run_path)).get_exit_report_path(os.uname().nodename, os.getpid())
        # On a node that does not share the path nobody has made it.
        report.parent.mkdir(parents=True, exist_ok=True)
        # Beside the rest of the start, which would wait some 10 ms for it.
        self._sentinel = threading.Thread(target=sentinel.start, args=(report,), daemon=True)
        self._sentinel.start()
        _restore_default_sigterm()
        # Ray enables it too, for the thread that crashes alone: that one may be a library's, while
        # it was the training function's that broke something.
        faulthandler.enable(2, all_threads=True)

    def initialize(self, process_setup: Callable[[], object] | None) -> WorkerInfo:
        """Run a backend's setup of this process, and return where the worker is placed."""
        if process_setup is not None:
            self._sentinel.join()  # it reports how the process ends if the setup crashes
            process_setup()
        context = ray.get_runtime_context()
        return WorkerInfo(
            node_id=context.get_node_id(),
            node_ip=get_node_address(),
            hostname=os.uname().nodename,
            pid=os.getpid(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    def execute(self, call: Serialized) -> object:
        """Run a packed (function, args, kwargs) for a backend."""
        function, args, kwargs = call.deserialize()
        return function(*args, **kwargs)

    def run(
        self, assignment: Assignment, payload: Sequence[ObjectRef[Serialized]]
    ) -> Iterator[list[Message]]:
        """Run the training function; yields everything it says, all that has gathered at a time.

        `payload` has the one reference to a packed `Payload`, which Ray does not follow in a list.
        """
        self._sentinel.join()  # before user code can start a process that must not outlive this one
        outbox = Outbox()
        session = Session(assignment, outbox.put, self._cache)
        # Before the function begins: an order may come as soon as the controller hears of it.
        self._session = session
        self._thread = threading.Thread(
            target=_run_and_send_outcome, args=(session, payload[0], outbox.put), name="training"
        )
        self._thread.start()
        while True:
            # All that has gathered goes as one item, since Ray takes its time for each, whatever is
            # in it.
            batch = outbox.take_batch()
            yield batch
            if isinstance(batch[-1], _FINAL_MESSAGE_TYPES):
                # The stream's end is the sign that this process can run another attempt; it is kept
                # only if that comes in time.
                self._thread.join()
                session.uploads.async_commits.join()
                return

    def obey(self, attempt: int, order: Order) -> None:
        """Take an order (control group). One for an attempt that is over here comes too late."""
        if self._session is not None and self._session.assignment.attempt == attempt:
            self._session.obey(order)

    def capture_stack(self) -> Stack:
        """Say where the function, or the program in its place, stands (control group)."""
        program = self._session.program if self._session is not None else None
        return capture_stack(self._thread) if program is None else program.capture_stack()

    def shut_down(self) -> None:
        """Run the exit handlers of this process, which the caller kills next, and tidy its node."""
        atexit.unregister(ray.shutdown)  # it would cut off the answer to this call
        atexit._run_exitfuncs()
        if self._session is not None and self._session.should_clean_up_node:
            upkeep.finish_on_node(
                self._session.directory, self._session.assignment.ranks.world_rank
            )


def _restore_default_sigterm() -> None:
    """Have SIGTERM end this process, as it ends any other.

    Ray's handler asks Python's main thread to exit, which an actor with concurrency groups never
    gives the time to: the process would live on, and its peers wait for it. `signal.signal` is
    refused outside that thread, the C library's is not.
    """
    # Such an actor runs nothing in the main thread (ray-project/ray#53771).
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(None))


def _run_and_send_outcome(
    session: Session, payload: ObjectRef[Serialized], say: Callable[[Message], None]
) -> None:
    """Run an attempt in a worker process and say how it ended, whatever happens."""
    final_message: Message
    try:
        final_message = _run_with_driver_env(session, payload, say)
    except AttemptInterrupted:
        final_message = Interrupted()  # a second one, while the first was being dealt with
    except BaseException as error:
        failure = describe_exception(error, session.assignment, session.report_count)
        final_message = Failed(failure=failure)
    say(final_message)


def _run_with_driver_env(
    session: Session, payload: ObjectRef[Serialized], say: Callable[[Message], None]
) -> Finished | Failed | Interrupted:
    """Run an attempt while the streams, environment and folder of this process are the run's."""
    rank = session.assignment.ranks.world_rank
    with (
        enable_transfers_if_node_local(session, say),
        capture_output(
            session.directory.get_log_path(rank), say, errors_only=rank != 0, redirect_fds=True
        ),
    ):
        surroundings = session.assignment.spec.surroundings
        assert surroundings is not None  # a worker process gets its driver's
        with surroundings.apply():
            return run_train_loop(session, payload, say, is_process_wide=True)


@contextlib.contextmanager
def enable_transfers_if_node_local(
    session: Session, say: Callable[[Message], None]
) -> Iterator[None]:
    """Have checkpoints and the log travel if this node does not share the run's directory."""
    assignment = session.assignment
    if session.directory.is_on_this_node(assignment.run_id):
        yield
        return
    # A path that is there by chance, or none: what a rank writes needs a place on this node in any
    # case.
    upkeep.create_directories(session.directory)
    if session.directory.filesystem is None:
        say(Printed(text=_describe_node_local_storage(assignment), stream="stderr"))
        session.use_node_local_storage()
    try:
        yield
    finally:
        rank = assignment.ranks.world_rank
        session.should_clean_up_node = _upload_log(session.directory, rank, say)


def _upload_log(directory: RunDirectory, rank: int, say: Callable[[Message], None]) -> bool:
    """Put the log where others find it; tells whether it is there, or is to stay on this node."""
    try:
        directory.run_files.upload_log(directory.get_log_path(rank))
    except Exception as error:  # whatever the storage raises, it is not how the function ended
        text = f"the log of rank {rank} stays on node {os.uname().nodename}: {error}"
        say(Printed(text=text, stream="stderr"))
        return False
    return True


def _describe_node_local_storage(assignment: Assignment) -> str:
    return (
        f"node {os.uname().nodename} of rank {assignment.ranks.world_rank} does not share "
        f"{assignment.directory.local_path} with the driver's node: its checkpoints travel there, "
        "which "
        "is slow, and its log stays. Better set RunConfig.storage_path to a folder that all nodes "
        "share, or to an object store"
    )


def run_train_loop(
    session: Session,
    payload: ObjectRef[Serialized] | TrainLoop,
    say: Callable[[Message], None],
    *,
    is_process_wide: bool,
) -> Finished | Failed | Interrupted:
    """Run the training function and give how it ended, whatever happens.

    `payload` is a reference in a worker process, which will end before its value is looked at.
    """
    raised_at: float | None = None
    try:
        session.interrupt_scope.begin()
        with use_session(session, is_process_wide=is_process_wide):
            # Threads of one process share its environment, so the worlds of `testing` leave it
            # alone.
            if is_process_wide:
                set_env_vars(make_worker_env(session.assignment))
            work = payload if isinstance(payload, TrainLoop) else ray.get(payload).deserialize()
            with work.backend_config.train_func_context():
                say(FunctionStarted(time=time.time()))
                session.thread_guard.reset_reporting_thread()
                try:
                    value = work.run()
                except AttemptInterrupted:
                    raise
                except BaseException:
                    raised_at = time.time()  # peers fail as soon as the backend lets go of them
                    say(FunctionRaised(time=raised_at))
                    raise
                session.thread_guard.reset_reporting_thread()
                # Inside the backend's context: peers that still train must not lose this rank while
                # its last checkpoint is under way.
                session.uploads.async_commits.flush()
        session.interrupt_scope.end()
        finished = _make_finished(value, leaves=not isinstance(payload, TrainLoop))
        return msgspec.structs.replace(finished, remarks=tuple(session.final_notices))
    except AttemptInterrupted:
        session.interrupt_scope.end()
        # No time for what is in flight: the controller drops what is not persisted by now.
        session.close(0.0)
        return Interrupted()
    except BaseException as error:
        try:  # noqa: SIM105  # suppress() itself could be hit
            session.interrupt_scope.end()
        except AttemptInterrupted:
            pass  # too late: the function has failed by itself
        if isinstance(error, KeyboardInterrupt) and _in_main_thread():
            raise  # Ctrl-C in the user's own process, with num_workers=0
        made = session.report_count
        failure = describe_exception(error, session.assignment, made, raised_at)
        session.close(FAILURE_FLUSH_S)
        return Failed(failure=failure)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def make_worker_env(assignment: Assignment) -> dict[str, str]:
    """Give the variables that this worker's process gets before user code."""
    ranks = assignment.ranks
    threads = compute_thread_count(
        cpus_per_worker=assignment.spec.cpus,
        local_world_size=ranks.local_world_size,
        cores=count_available_cores(),
    )
    chosen = {**assignment.spec.environment, **get_runtime_env_vars()}
    # The ranks last: a RANK that the driver has forwarded, as from a torchrun, is not this one's.
    return {
        **chosen,
        **make_thread_env_vars(threads, os.environ, chosen),
        **make_torchrun_env_vars(ranks),
    }


def _make_finished(value: object, *, leaves: bool) -> Finished:
    try:
        return Finished(time=time.time(), value=serialize(value, should_transfer_ownership=leaves))
    except Exception as error:
        reason = f"the return value, a {type(value).__qualname__}, does not pickle: {error}"
        return Finished(time=time.time(), value_error=reason)
