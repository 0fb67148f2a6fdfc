"""Run the attempts of one rank, and handle commands and requests of the controller.

`RankRunner` is the same in Ray actors, in threads, and in the processes of torchrun. They differ in
how a process starts, in how its death is detected, and in the environment of the function.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from drawbar._process.failure import describe_exception
from drawbar._process.output import capture_output, tee_output
from drawbar._process.output_lines import OutputLine
from drawbar._process.serialization import Serialized
from drawbar._process.stack import Stack, capture_stack
from drawbar._process.training_thread import AttemptInterrupted
from drawbar._process.worker_env import preserve_environment
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import Message, RankFailed, RankInterrupted
from drawbar.train._worker.session import ProgramProxy, Session
from drawbar.train._worker.train_loop import TrainLoop, is_main_thread, run_train_loop

if TYPE_CHECKING:
    from ray import ObjectRef


class RankRunner:
    """One rank of a run in this process. It can run several attempts in sequence.

    `run` is called in the thread of the training function, all other methods in any thread.

    Attributes:
        session: Session of the latest attempt, None before the first one.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self._cache: dict[object, object] = {}
        self._thread: threading.Thread | None = None

    @property
    def program(self) -> ProgramProxy | None:
        """Program that runs in place of the training function, if one runs."""
        return self.session.program if self.session is not None else None

    def start_attempt(
        self, assignment: WorkerAssignment, send: Callable[[Message], None]
    ) -> Session:
        """Create the session of an attempt.

        Must be called before `run`: the controller may send a command after the first message.

        Args:
            assignment: Rank, checkpoint, and datasets for this attempt.
            send: Callback that sends messages to the controller.
        """
        self._thread = None
        is_first = self.session is None
        self.session = Session(assignment, send, self._cache)
        self.session.is_first_of_process = is_first
        return self.session

    def run(
        self,
        session: Session,
        train_loop: ObjectRef[Serialized] | TrainLoop,
        on_end: Callable[[Message | None], None],
        *,
        use_environment: Callable[[Session], AbstractContextManager[object]] | None,
    ) -> None:
        """Run the training function in this thread, and always pass its final message.

        Args:
            session: Result of `start_attempt`.
            train_loop: What to run. In a worker process, a reference to the serialized object.
            on_end: Receives the final message, or None after a Ctrl-C, which is raised here.
            use_environment: Returns the environment of the function, which ends before the final
                message is passed. None if other ranks run in this process.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C, and this is the main thread.
        """
        self._thread = threading.current_thread()
        final_message: Message | None = RankInterrupted()
        try:
            environment = nullcontext() if use_environment is None else use_environment(session)
            with environment, contextlib.ExitStack() as samplers:
                for sampler in session.assignment.spec.samplers:
                    samplers.enter_context(sampler(session.assignment, session.send))
                final_message = run_train_loop(
                    session, train_loop, is_process_wide=use_environment is not None
                )
        except AttemptInterrupted:
            pass  # a second interruption, during the handling of the first
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and is_main_thread():
                final_message = None  # Ctrl-C is not a failure: the caller stops the run
                raise
            failure = describe_exception(
                error,
                session.assignment.ranks.world_rank,
                session.assignment.log_path,
                session.report_count,
            )
            final_message = RankFailed(failure=failure)
        finally:
            on_end(final_message)

    def end_run(self) -> None:
        """Free the objects that all attempts of this process have shared.

        Call it at the end of a run if the process outlives it.
        """
        self._cache.clear()

    def handle_command(self, command: Command, attempt: int | None = None) -> None:
        """Handle a command of the controller. Never blocks.

        Args:
            command: Command to handle.
            attempt: Attempt that the command is for. It is ignored if that attempt has ended.
                Default: the latest attempt.
        """
        session = self.session
        if session is not None and attempt in (None, session.assignment.attempt):
            session.handle_command(command)

    def capture_stack(self) -> Stack | None:
        """Return the stack of the training function, or of the program that runs in its place.

        Returns:
            The stack, or None if the program does not reply.
        """
        program, session = self.program, self.session
        if program is not None:
            return program.capture_stack()
        if session is None:
            return capture_stack(self._thread, 0)
        report_index = session.assignment.first_report_index + session.report_count
        batches = session.timer.batches[0]
        return capture_stack(self._thread, session.get_log_size(), batches, report_index)


def execute(call: Serialized) -> object:
    """Run a serialized (function, args, kwargs) for a backend and return its result."""
    function, args, kwargs = call.deserialize()
    return function(*args, **kwargs)


# -- environments of a training function


@contextlib.contextmanager
def use_worker_process(session: Session) -> Iterator[None]:
    """Prepare a worker process for the function: capture output, apply the driver's environment.

    Args:
        session: Session of this rank.
    """
    rank = session.assignment.ranks.world_rank
    log = session.directory.get_log_path(rank)
    driver_env = session.assignment.spec.driver_env
    assert driver_env is not None  # every worker process receives it
    with (
        _transfer_if_node_local(session),
        capture_output(log, session.send, errors_only=rank != 0) as session.get_log_size,
        driver_env.apply(),
    ):
        yield


@contextlib.contextmanager
def use_caller_process(session: Session) -> Iterator[None]:
    """Let the function use the process that called `fit()`, and restore its environment.

    Args:
        session: Session of this rank.
    """
    log = session.directory.get_log_path(session.assignment.ranks.world_rank)
    with (
        _transfer_if_node_local(session),
        preserve_environment(),
        tee_output(log) as session.get_log_size,
    ):
        yield


@contextlib.contextmanager
def _transfer_if_node_local(session: Session) -> Iterator[None]:
    """Transfer checkpoints and the log if this node does not share the run directory.

    Args:
        session: Session of this rank.
    """
    assignment = session.assignment
    if session.directory.is_on_this_node(assignment.run_id):
        yield
        return
    # The path is missing or unrelated. Create it, because a rank's files need a local directory.
    session.directory.create_directories()
    if session.directory.filesystem is None:
        session.send(OutputLine(text=_describe_node_local_storage(assignment), stream="stderr"))
        session.use_node_local_storage()
    try:
        yield
    finally:
        session.should_clean_up_node = _upload_log(session)


def _upload_log(session: Session) -> bool:
    """Upload the log to the run's storage and return whether that succeeded."""
    directory, rank = session.directory, session.assignment.ranks.world_rank
    try:
        directory.run_files.upload_log(directory.get_log_path(rank))
    except Exception as error:  # no storage error may change the outcome of the function
        text = f"Could not upload the log of rank {rank} from node {os.uname().nodename}: {error}"
        session.send(OutputLine(text=text, stream="stderr"))
        return False
    return True


def _describe_node_local_storage(assignment: WorkerAssignment) -> str:
    return (
        f"Node {os.uname().nodename} of rank {assignment.ranks.world_rank} does not share "
        f"{assignment.run_directory.local_path} with the driver's node, so checkpoints are sent to "
        "the driver (slow) and the log stays on the node. Set a storage path that all nodes share, "
        "or an object store."
    )
