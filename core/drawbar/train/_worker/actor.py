"""Ray actor that runs the training function and streams its messages.

`Worker.run` is a streaming generator. Reports, printed lines, collective calls, and the return
value or error form one ordered stream that the controller awaits. Commands of the controller
arrive in a separate concurrency group. `run_train_loop` also runs the function in the driver's
process for `num_workers=0`, and then without Ray, so this module imports Ray in functions.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from drawbar.train._config.backend import BackendConfig
from drawbar.train._protocol.assignment import WORKER_INFO, WorkerAssignment, WorkerInfo
from drawbar.train._protocol.codec import RayValue
from drawbar.train._protocol.commands import COMMANDS
from drawbar.train._protocol.messages import (
    FINAL_MESSAGE_TYPES,
    MESSAGE_BATCHES,
    FunctionFailed,
    FunctionStarted,
    Message,
    OutputLine,
    RankFailed,
    RankFinished,
    RankInterrupted,
)
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._storage import upkeep
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker import sentinel
from drawbar.train._worker.active_session import use_session
from drawbar.train._worker.addresses import get_node_address
from drawbar.train._worker.failure import describe_exception
from drawbar.train._worker.interrupt import AttemptInterrupted
from drawbar.train._worker.outbox import Outbox
from drawbar.train._worker.output import capture_output
from drawbar.train._worker.session import FAILURE_FLUSH_S, Session
from drawbar.train._worker.stack import STACK, capture_stack
from drawbar.train._worker.worker_env import make_worker_env, set_env_vars

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class TrainLoop:
    """Training function, its config, and its backend.

    The driver serializes it once. Each rank deserializes it before running it.
    """

    function: Callable[..., object]
    takes_config: bool
    config: object
    backend_config: BackendConfig

    def run(self) -> object:
        """Call the training function and return its result."""
        if not self.takes_config:
            return self.function()
        return self.function({} if self.config is None else self.config)


class Worker:
    """Ray actor of one rank. It can run several attempts in sequence.

    Args:
        run_path: Local path of the run directory.
    """

    def __init__(self, run_path: str) -> None:
        self._cache: dict[object, object] = {}
        self._session: Session | None = None
        self._thread: threading.Thread | None = None
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
        )
        return WORKER_INFO.encode(info)

    def execute(self, call: Serialized) -> object:
        """Run a serialized (function, args, kwargs) for a backend and return its result."""
        function, args, kwargs = call.deserialize()
        return function(*args, **kwargs)

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
        session = Session(assignment, outbox.put, self._cache)
        # Set before the function starts: the controller may send a command after its first message.
        self._session = session
        self._thread = threading.Thread(
            target=_run_and_send_outcome, args=(session, train_loop[0], outbox.put), name="training"
        )
        self._thread.start()
        while True:
            # Yield in batches, because Ray's cost per item does not depend on its size.
            batch = outbox.take_batch()
            yield MESSAGE_BATCHES.encode_for_ray(batch)
            if isinstance(batch[-1], FINAL_MESSAGE_TYPES):
                # The end of the stream signals the controller that this process can run another
                # attempt. The controller replaces the process if the stream ends too late.
                self._thread.join()
                session.uploads.async_commits.join()
                return

    def handle_command(self, attempt: int, command: RayValue) -> None:
        """Handle a command (control group). Commands for an attempt that has ended are ignored."""
        if self._session is not None and self._session.assignment.attempt == attempt:
            self._session.handle_command(COMMANDS.decode_from_ray(command))

    def capture_stack(self) -> bytes:
        """Return the encoded stack of the training function or its program (control group)."""
        program = self._session.program if self._session is not None else None
        stack = capture_stack(self._thread) if program is None else program.capture_stack()
        return STACK.encode(stack)

    def shut_down(self) -> None:
        """Run exit handlers and clean up the node; the caller kills the process afterwards."""
        import ray

        atexit.unregister(ray.shutdown)  # it would abort the reply to this call
        atexit._run_exitfuncs()
        if self._session is not None and self._session.should_clean_up_node:
            upkeep.finish_on_node(
                self._session.directory, self._session.assignment.ranks.world_rank
            )


def _restore_default_sigterm() -> None:
    """Restore the default action of SIGTERM, which ends the process.

    Ray's handler asks Python's main thread to exit, but an actor with concurrency groups runs
    nothing in the main thread (ray-project/ray#53771). The process would stay alive while its
    peers wait for it. `signal.signal` only works in the main thread, so call the C library.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(None))


def _run_and_send_outcome(
    session: Session, train_loop: ObjectRef[Serialized], send: Callable[[Message], None]
) -> None:
    """Run an attempt in a worker process and always send its final message."""
    final_message: Message
    try:
        final_message = _run_with_driver_env(session, train_loop, send)
    except AttemptInterrupted:
        final_message = RankInterrupted()  # second interrupt while the first one was handled
    except BaseException as error:
        failure = describe_exception(error, session.assignment, session.report_count)
        final_message = RankFailed(failure=failure)
    send(final_message)


def _run_with_driver_env(
    session: Session, train_loop: ObjectRef[Serialized], send: Callable[[Message], None]
) -> RankFinished | RankFailed | RankInterrupted:
    """Run an attempt with captured output and the driver's environment."""
    rank = session.assignment.ranks.world_rank
    with (
        enable_transfers_if_node_local(session, send),
        capture_output(
            session.directory.get_log_path(rank), send, errors_only=rank != 0, redirect_fds=True
        ),
    ):
        driver_env = session.assignment.spec.driver_env
        assert driver_env is not None  # every worker process receives it
        with driver_env.apply():
            return run_train_loop(session, train_loop, send, is_process_wide=True)


@contextlib.contextmanager
def enable_transfers_if_node_local(
    session: Session, send: Callable[[Message], None]
) -> Iterator[None]:
    """Transfer checkpoints and the log if this node does not share the run directory.

    Args:
        session: Session of this rank.
        send: Callback that sends messages to the controller.
    """
    assignment = session.assignment
    if session.directory.is_on_this_node(assignment.run_id):
        yield
        return
    # The path is missing or unrelated. Create it, because a rank's files need a local directory.
    upkeep.create_directories(session.directory)
    if session.directory.filesystem is None:
        send(OutputLine(text=_describe_node_local_storage(assignment), stream="stderr"))
        session.use_node_local_storage()
    try:
        yield
    finally:
        rank = assignment.ranks.world_rank
        session.should_clean_up_node = _upload_log(session.directory, rank, send)


def _upload_log(directory: RunDirectory, rank: int, send: Callable[[Message], None]) -> bool:
    """Upload the log to the run's storage and return whether that succeeded."""
    try:
        directory.run_files.upload_log(directory.get_log_path(rank))
    except Exception as error:  # no storage error may change the outcome of the function
        text = f"Could not upload the log of rank {rank} from node {os.uname().nodename}: {error}"
        send(OutputLine(text=text, stream="stderr"))
        return False
    return True


def _describe_node_local_storage(assignment: WorkerAssignment) -> str:
    return (
        f"Node {os.uname().nodename} of rank {assignment.ranks.world_rank} does not share "
        f"{assignment.run_directory.local_path} with the driver's node, so checkpoints are sent to "
        "the driver (slow) and the log stays on the node. Set RunConfig(storage_path=...) to a "
        "directory that all nodes share, or to an object store."
    )


def run_train_loop(
    session: Session,
    train_loop: ObjectRef[Serialized] | TrainLoop,
    send: Callable[[Message], None],
    *,
    is_process_wide: bool,
) -> RankFinished | RankFailed | RankInterrupted:
    """Run the training function and return its final message.

    Args:
        session: Session of this rank.
        train_loop: What to run. In a worker process, a reference to the serialized object.
        send: Callback that sends messages to the controller.
        is_process_wide: Whether no other rank runs in this process, so the session applies to all
            threads and environment variables can be set.
    """
    raised_at: float | None = None
    try:
        session.interrupt_scope.begin()
        with use_session(session, is_process_wide=is_process_wide):
            # Threads share the environment, so ranks in threads of one process do not change it.
            if is_process_wide:
                set_env_vars(make_worker_env(session.assignment))
            loop = train_loop if isinstance(train_loop, TrainLoop) else _fetch(train_loop)
            with loop.backend_config.train_func_context():
                send(FunctionStarted(time=time.time()))
                session.thread_guard.reset_reporting_thread()
                try:
                    value = loop.run()
                except AttemptInterrupted:
                    raise
                except BaseException:
                    raised_at = time.time()  # other ranks fail once the backend's context ends
                    send(FunctionFailed(time=raised_at))
                    raise
                session.thread_guard.reset_reporting_thread()
                # Inside the backend's context: ranks that still train must not lose this peer
                # while its last checkpoint is in flight.
                session.uploads.async_commits.flush()
        session.interrupt_scope.end()
        # The owner of objects in the return value is a worker process that ends before they are
        # read, so transfer the ownership.
        finished = _make_finished(
            value, should_transfer_ownership=not isinstance(train_loop, TrainLoop)
        )
        return msgspec.structs.replace(finished, final_notices=tuple(session.final_notices))
    except AttemptInterrupted:
        session.interrupt_scope.end()
        # Do not wait for checkpoints in flight: the controller drops files not yet persisted.
        session.close(0.0)
        return RankInterrupted()
    except BaseException as error:
        try:  # noqa: SIM105  # suppress() itself could be interrupted
            session.interrupt_scope.end()
        except AttemptInterrupted:
            pass  # too late: the function has already failed
        if isinstance(error, KeyboardInterrupt) and _in_main_thread():
            raise  # Ctrl-C in the user's process, with num_workers=0
        num_reports = session.report_count
        failure = describe_exception(error, session.assignment, num_reports, raised_at)
        session.close(FAILURE_FLUSH_S)
        return RankFailed(failure=failure)


def _fetch(reference: ObjectRef[Serialized]) -> TrainLoop:
    import ray

    train_loop: TrainLoop = ray.get(reference).deserialize()
    return train_loop


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _make_finished(value: object, *, should_transfer_ownership: bool) -> RankFinished:
    try:
        serialized = serialize(value, should_transfer_ownership=should_transfer_ownership)
        return RankFinished(time=time.time(), return_value=serialized)
    except Exception as error:
        reason = f"Cannot pickle the return value ({type(value).__qualname__}): {error}"
        return RankFinished(time=time.time(), serialization_error=reason)
