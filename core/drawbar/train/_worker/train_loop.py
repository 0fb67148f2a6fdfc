"""Run the training function of a rank, and make its final message.

This module imports Ray in functions, because ranks also run in processes without Ray.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drawbar._process.failure import describe_exception
from drawbar._process.imported_modules import ImportedModules
from drawbar._process.rank_attributes import set_rank
from drawbar._process.script_names import use_script_names
from drawbar._process.serialization import Serialized, serialize
from drawbar._process.training_thread import AttemptInterrupted
from drawbar._process.worker_env import set_env_vars
from drawbar.train._config.backend import BackendConfig
from drawbar.train._protocol.messages import (
    FunctionFailed,
    FunctionImported,
    FunctionStarted,
    ProcessRetired,
    RankFailed,
    RankFinished,
    RankInterrupted,
)
from drawbar.train._worker.active_session import use_session
from drawbar.train._worker.session import FAILURE_FLUSH_S, Session

if TYPE_CHECKING:
    from ray import ObjectRef


@dataclass(frozen=True)
class TrainLoop:
    """Training function, its config, and its backend.

    The driver serializes it once for all worker processes.

    Attributes:
        function: Training function.
        takes_config: Whether the function has an argument.
        config: Argument of the function; None for {}.
        backend_config: Backend that sets up the workers.

    Example:
        ```python
        train_loop = train_loop.with_function(log_times(train_loop.function))
        ```
    """

    function: Callable[..., object]
    takes_config: bool
    config: object
    backend_config: BackendConfig

    def with_function(self, function: Callable[..., object]) -> TrainLoop:
        """Return a copy with another function, which has the same arguments.

        Args:
            function: Training function.
        """
        return dataclasses.replace(self, function=function)

    def run(self) -> object:
        """Call the training function and return its result."""
        if not self.takes_config:
            return self.function()
        return self.function({} if self.config is None else self.config)


def run_train_loop(
    session: Session, train_loop: ObjectRef[Serialized] | TrainLoop, *, is_process_wide: bool
) -> RankFinished | RankFailed | RankInterrupted:
    """Run the training function and return its final message.

    Args:
        session: Session of this rank.
        train_loop: What to run. In a worker process, a reference to the serialized object.
        is_process_wide: Whether no other rank runs in this process, so the session applies to all
            threads and environment variables can be set.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C, and this is the main thread.
    """
    raised_at: float | None = None
    try:
        session.interrupt_scope.begin()
        with use_session(session, is_process_wide=is_process_wide):
            # Threads share the environment, so ranks in threads of one process do not change it.
            if is_process_wide:
                set_env_vars(environment := session.assignment.make_worker_env())
                set_rank(environment)
            loop, script_names = _make_copy(session, train_loop)
            session.send(FunctionImported())
            with use_script_names(script_names), loop.backend_config.train_func_context():
                session.send(FunctionStarted(time=time.time()))
                session.timer.start()
                session.thread_guard.reset_reporting_thread()
                try:
                    value = loop.run()
                except AttemptInterrupted:
                    raise
                except BaseException:
                    _send_times(session)
                    raised_at = time.time()  # other ranks fail once the backend's context ends
                    session.send(FunctionFailed(time=raised_at))
                    raise
                session.thread_guard.reset_reporting_thread()
                session.progress.flush()
                # Inside the backend's context: ranks that still train must not lose this peer
                # while its last checkpoint is in flight.
                session.uploads.async_commits.flush()
                _send_times(session)
        session.interrupt_scope.end()
        return _make_finished(session, value, train_loop)
    except AttemptInterrupted as interrupt:
        session.interrupt_scope.end()
        _retire_after_import(session, interrupt)
        # Do not wait for checkpoints in flight: the controller drops files not yet persisted.
        session.close(0.0)
        return RankInterrupted()
    except BaseException as error:
        try:  # noqa: SIM105  # suppress() itself could be interrupted
            session.interrupt_scope.end()
        except AttemptInterrupted:
            pass  # too late: the function has already failed
        if isinstance(error, KeyboardInterrupt) and is_main_thread():
            raise  # Ctrl-C in the user's process, with num_workers=0
        _retire_after_import(session, error)
        return _make_failed(session, error, raised_at)


def _retire_after_import(session: Session, error: BaseException) -> None:
    """Do not use this process for another attempt if an exception has ended an import.

    Python removes only the module that failed. Modules that it had imported until then remain and
    may depend on it, so that its next import fails.
    """
    described = "".join(traceback.TracebackException.from_exception(error).format())
    # Python leaves out the frames of the import machinery while it runs a module.
    if ", in <module>\n" in described or '"<frozen importlib.' in described:
        session.send(ProcessRetired())


def _send_times(session: Session) -> None:
    """Send the times of this rank, unless a program has sent its own."""
    if not session.is_timed_by_program:
        session.send(session.timer.observe())


def _make_copy(
    session: Session,
    train_loop: ObjectRef[Serialized] | TrainLoop,
) -> tuple[TrainLoop, dict[str, object]]:
    """Return a copy for this rank, whose config the function may change, and the script's names.

    In the script's own process, the names are empty: its `__main__` has them.
    """
    if isinstance(train_loop, TrainLoop):
        return dataclasses.replace(train_loop, config=copy.deepcopy(train_loop.config)), {}
    import ray

    if session.is_first_of_process:
        session.imported_modules = ImportedModules()
    serialized: Serialized = ray.get(train_loop)
    return serialized.deserialize_with_script_names()


def is_main_thread() -> bool:
    """Return whether the calling thread is the main thread, in which Ctrl-C arrives."""
    return threading.current_thread() is threading.main_thread()


def _make_failed(session: Session, error: BaseException, raised_at: float | None) -> RankFailed:
    """Return the message about an exception, after the checkpoints in flight were completed."""
    log = session.assignment.log_path
    failure = describe_exception(
        error, session.assignment.ranks.world_rank, log, session.report_count, raised_at
    )
    session.close(FAILURE_FLUSH_S)
    return RankFailed(failure=failure)


def _make_finished(
    session: Session, value: object, train_loop: ObjectRef[Serialized] | TrainLoop
) -> RankFinished:
    """Return the message with the return value.

    A worker process owns the objects in the value and ends before they are read, so their
    ownership is transferred.
    """
    notices = tuple(session.final_notices)
    try:
        is_in_worker_process = not isinstance(train_loop, TrainLoop)
        serialized = serialize(value, should_transfer_ownership=is_in_worker_process)
        return RankFinished(time=time.time(), return_value=serialized, final_notices=notices)
    except Exception as error:
        reason = f"Cannot pickle the return value ({type(value).__qualname__}): {error}"
        return RankFinished(time=time.time(), serialization_error=reason, final_notices=notices)
