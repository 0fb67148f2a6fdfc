"""Run the controller in a thread of this process, and functions in the thread that waits for it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from drawbar._process.errors import ControllerError
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records.event_stream import Emit, EventStream
from drawbar._records.live_events import ControllerFailed, Notice
from drawbar._records.timeline import FINAL_STATUSES, RunState
from drawbar._recovery.failure_policy import MakeFailurePolicy
from drawbar._storage.files import inherit_directory_mode, write_atomically
from drawbar.train._controller.assignments import RunAssignmentPlanner
from drawbar.train._controller.callbacks import CallbackRunner
from drawbar.train._controller.controller import Controller
from drawbar.train._controller.run import (
    ControllerOutcome,
    MakeWatcher,
    OpenRun,
    RunSpec,
)
from drawbar.train._driver.open_run import open_run
from drawbar.train._worker_group.cluster import is_connected_to_ray
from drawbar.train._worker_group.validator import Validator
from drawbar.train._worker_group.worker_group import SubmitCall, WorkerGroup

DIAGNOSIS_TIMEOUT_S = 10.0
EXIT_SECONDS = 3.0
STOPPED_AT_EXIT = (
    "the program exits before the run has ended: the run is stopped, and can be resumed"
)

_logger = logging.getLogger("drawbar.train")


Call = Callable[[], None]


class FunctionInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a function that ran in the thread that waits for the run."""


class CallerExecutor:
    """Executor of functions that a run calls in this process, mainly the training function.

    Args:
        use_caller_thread: Run functions in the thread that waits for the run, where `pdb` works and
            Ctrl-C arrives, instead of a new thread for each.
    """

    def __init__(self, *, use_caller_thread: bool) -> None:
        self._use_caller_thread = use_caller_thread
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()

    def submit(self, call: Call) -> None:
        """Submit a function."""
        if self._use_caller_thread:
            self._queue.put(call)
        else:
            threading.Thread(target=call, name="drawbar-function", daemon=True).start()

    def run_until(self, ended: threading.Event, timeout: float | None) -> bool:
        """Run functions until `ended` is set or the timeout expires. Return whether it is set.

        Raises:
            FunctionInterrupted: The user pressed Ctrl-C while a function ran.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ended.is_set():
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                call = self._queue.get(timeout=remaining)
            except queue.Empty:
                return False
            if call is None:
                self.wake_up()  # other waiting threads
            else:
                try:
                    call()
                except KeyboardInterrupt as error:
                    raise FunctionInterrupted from error
        return True

    def wake_up(self) -> None:
        """Make waiting threads check whether the run has ended."""
        self._queue.put(None)


class ControlSocket(Protocol):
    """Socket through which other processes on this host control a run."""

    def close(self) -> None:
        """Stop handling requests."""
        ...


class ControllerThread:
    """Opens a run and runs its controller in a thread.

    Args:
        spec: The run.
        make_worker_group: Creates the worker group. Receives the local path of the run, and a
            function that submits calls to a thread of this process, which `num_workers=0` needs.
        watchers: Create the watchers of the run, such as the console. The callbacks of the user
            follow them.
        make_control_socket: Creates the control socket from the local path of the run.
        make_failure_policy: Creates the policy that finds the causes of failures.
        validator: Runs validations, or None.
        is_on_ray: Whether the workers die when this process disconnects from Ray.
        use_caller_thread: Run calls, and start the controller, in the thread that calls `join`, so
            that `pdb` works and Ctrl-C arrives in the training function. Otherwise each has a new
            thread.
        on_end: Called with this run after its end, before `join` returns.

    Raises:
        ResumeError: `RunConfig.resume` conflicts with the run directory.
        RunInProgressError: The run is in progress.
        OSError: The storage cannot be written.
        CheckpointError: The initial checkpoint does not exist.
    """

    def __init__(
        self,
        spec: RunSpec,
        make_worker_group: Callable[[str, SubmitCall], WorkerGroup],
        watchers: Sequence[MakeWatcher],
        make_control_socket: Callable[[Path, Self], ControlSocket],
        make_failure_policy: MakeFailurePolicy,
        *,
        validator: Validator | None = None,
        is_on_ray: bool = False,
        use_caller_thread: bool = False,
        on_end: Callable[[Self], object] | None = None,
    ) -> None:
        self._spec = spec
        self._on_end = None if on_end is None else partial(on_end, self)
        self._make_worker_group = make_worker_group
        self._make_failure_policy = make_failure_policy
        self._validator = validator
        self._is_on_ray = is_on_ray
        self._executor = CallerExecutor(use_caller_thread=use_caller_thread)
        self._controller: Controller | None = None
        # Calls that were requested before the controller existed.
        self._deferred_calls: list[Callable[[Controller], object]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._outcome = ControllerOutcome()
        # In the thread of the caller, so that errors are raised at the user's line.
        self._open_run = open_run(spec)
        self.directory = self._open_run.directory
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._open_run.journal.close)
            self._events = EventStream(
                self._open_run.journal, self._open_run.reports, self._open_run.state
            )
            on_error.callback(self._events.close)
            for make_watcher in watchers:
                self._events.add(make_watcher(self._open_run, self._events.emit))
            self._callbacks = CallbackRunner(spec.run_config.callbacks, self._open_run.context)
            self._events.add(self._callbacks)
            # Under the lock of the journal: its holder replaces the socket of a killed process.
            self._socket = make_control_socket(self.directory.local_path, self)
            on_error.pop_all()  # from here on, `_close` closes them
        try:
            self._plan = _plan_run(self._open_run, self._events.emit)
        except BaseException:
            self._close()
            raise
        self._thread = self._start(use_caller_thread=use_caller_thread)

    @property
    def path(self) -> str:
        """Run directory, as a path or URI."""
        return self.directory.uri

    def _start(self, *, use_caller_thread: bool) -> threading.Thread:
        """Notify the callbacks, and start the thread of the controller."""
        self._callbacks.on_run_start()
        # A daemon thread: Python waits for other threads before it calls exit handlers, so the run
        # would block the exit of the program until it ends.
        thread = threading.Thread(target=self._run, name="drawbar-controller", daemon=True)
        if use_caller_thread:
            self._executor.submit(thread.start)
        else:
            thread.start()
        return thread

    # -- in the controller thread

    def _run(self) -> None:
        # Handlers run in reverse order: this one before Ray's, which would kill the workers.
        atexit.register(self._stop_at_exit)
        try:
            self._outcome = asyncio.run(self._run_controller())
        except BaseException as error:
            controller_error = _make_controller_error(error)
            self._outcome = ControllerOutcome(error=controller_error)
            self._events.emit(ControllerFailed(controller_error.error_message))
        try:
            self._close()
        except Exception:
            _logger.exception("the run has ended, but not all of %s could be closed", self.path)
        finally:
            atexit.unregister(self._stop_at_exit)
            self._release_user_objects()
            self._notify_end()
            self._ended.set()
            self._executor.wake_up()

    async def _run_controller(self) -> ControllerOutcome:
        group = self._make_worker_group(str(self.directory.local_path), self._executor.submit)
        policy = self._make_failure_policy(
            self._open_run.failed_attempts, self._spec.run_config.failure_config
        )
        controller = Controller(
            self._open_run, self._plan, group, self._validator, policy, self._events.emit
        )
        with self._lock:
            self._controller = controller
        # stop() may have been called while the run was being opened.
        for call in self._deferred_calls:
            call(controller)
        try:
            return await controller.run()
        finally:
            await run_in_daemon_thread(self._plan.close)

    def _release_user_objects(self) -> None:
        """Drop all references to user objects, even if this object is still referenced."""
        self._spec.release()
        self._validator = None
        # It references the pool, and with it the training function and its captured variables.
        del self._make_worker_group
        with self._lock:
            self._controller = None

    def _close(self) -> None:
        with contextlib.ExitStack() as reversed_steps:  # all steps run, even if one raises
            reversed_steps.callback(self._open_run.journal.close)
            reversed_steps.callback(self._socket.close)  # under the lock, before another start
            reversed_steps.callback(self._upload_and_finish)
            reversed_steps.callback(self._open_run.reports.close)
            reversed_steps.callback(self._events.close)
            reversed_steps.callback(self._callbacks.drain, self._events.emit)

    def _notify_end(self) -> None:
        try:
            if self._on_end is not None:
                self._on_end()
        except Exception:
            _logger.exception("the run has ended, but not all processes received its outcome")

    def _upload_and_finish(self) -> None:
        """Upload all run files, while the lock of the journal keeps other processes away."""
        if self.directory.run_files.upload(everything=True):
            self.directory.finish()

    # -- called from any thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended, running calls meanwhile. Return whether it has."""
        if not self._executor.run_until(self._ended, timeout):
            return False
        self._thread.join()
        return True

    def stop(self, *, save: bool | None) -> None:
        """Stop the run. See `Controller.stop`."""
        self._call_controller(lambda controller: controller.stop(save=save))

    def kill(self) -> None:
        """Kill every process of the run immediately."""
        self.stop(save=False)
        self._call_controller(Controller.kill)

    def _call_controller(self, call: Callable[[Controller], object]) -> None:
        with self._lock:
            controller = self._controller
            if controller is None:
                self._deferred_calls.append(call)
                return
        try:
            call(controller)
        except RuntimeError:  # the loop is closed: only callbacks are still running
            self._callbacks.stop_waiting()

    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in."""
        controller = self._controller
        if controller is None or self._has_ended:
            return ""
        return controller.write_diagnosis().result(DIAGNOSIS_TIMEOUT_S)

    def get_state(self) -> RunState:
        """Return the current or final state of the run."""
        return self._events.copy_state()

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none."""
        return self.directory.read_log(rank)

    @property
    def _has_ended(self) -> bool:
        """True after training has ended. Callbacks may still be running."""
        return self.get_state().status in FINAL_STATUSES

    def get_controller_outcome(self) -> ControllerOutcome:
        """Return the return values or the error of the run, after its end."""
        return self._outcome

    def _stop_at_exit(self) -> None:
        """Stop the run, because the program exits and its workers would be killed."""
        if self._is_on_ray and not is_connected_to_ray():
            return  # the workers are dead
        if not self._has_ended:
            self._events.emit(Notice(STOPPED_AT_EXIT))
            self.stop(save=False)
        if not self._ended.wait(EXIT_SECONDS):
            self.kill()
            self._ended.wait(EXIT_SECONDS)


def _plan_run(run: OpenRun, emit: Emit) -> RunAssignmentPlanner:
    """Write the state of the trainer, check the initial checkpoint, and open the datasets."""
    directory = run.directory
    write_atomically(
        directory.trainer_path, run.spec.trainer_state, temp_directory=directory.staging.path
    )
    inherit_directory_mode(directory.trainer_path)
    # If the driver dies before the first worker starts, others can find and restore the run.
    directory.run_files.upload(everything=True)
    if run.warning:
        emit(Notice(run.warning))
    checkpoint = run.spec.resume_from_checkpoint
    # A resumed run uses its own checkpoints, and the initial one may have been deleted.
    if checkpoint is not None and not directory.checkpoints.list_intact():
        checkpoint.check_exists()
    plan = RunAssignmentPlanner(run)
    for text in plan.notices:
        emit(Notice(text))
    return plan


def _make_controller_error(error: BaseException) -> ControllerError:
    message = f"the run's controller failed: {type(error).__name__}: {error}"
    controller_error = ControllerError(message, error if isinstance(error, Exception) else None)
    controller_error.__cause__ = error
    return controller_error
