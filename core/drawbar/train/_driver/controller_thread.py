"""A run in the process of its controller: the controller's event loop has a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import threading
from collections.abc import Callable

import ray

from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._controller.callbacks import CallbackRunner
from drawbar.train._controller.controller import Controller
from drawbar.train._controller.run import ControllerOutcome, RunOutcome, RunSpec
from drawbar.train._data import split
from drawbar.train._driver.assignments import RunAssignmentPlanner
from drawbar.train._driver.caller_executor import CallerExecutor
from drawbar.train._driver.control import ControlSocket
from drawbar.train._driver.open_run import open_run
from drawbar.train._errors import ControllerError
from drawbar.train._history.event_stream import EventStream, Watcher
from drawbar.train._history.events import ControllerFailed, Notice
from drawbar.train._history.result import Result
from drawbar.train._history.timeline import FINAL_STATUSES, RunState
from drawbar.train._storage import upkeep
from drawbar.train._storage.files import inherit_directory_mode, write_atomically
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.actor import TrainLoop
from drawbar.train._worker_group.actor_pool import ActorPool
from drawbar.train._worker_group.cluster import (
    check_cluster_fits,
    check_dataset_cpus,
    check_validation_fits,
)
from drawbar.train._worker_group.placement import Placement
from drawbar.train._worker_group.ranks import get_local_gpu_ids
from drawbar.train._worker_group.ray_group import RayWorkerGroup
from drawbar.train._worker_group.thread_group import SubmitCall, ThreadWorkerGroup
from drawbar.train._worker_group.validators import RayValidator, ThreadValidator, Validator
from drawbar.train._worker_group.worker_group import WorkerGroup

DIAGNOSIS_TIMEOUT_S = 10.0
EXIT_SECONDS = 3.0
STOPPED_AT_EXIT = "the program ends without wait(): the run is stopped, and can be resumed"

_logger = logging.getLogger("drawbar.train")


class ControllerThread:
    """Opens a run and follows it to its end.

    Args:
        spec: What is to run.
        make_group: Makes its workers. Gets the run's local path, and a function that runs a job in
            a thread: `num_workers=0` has no other process for its training function.
        make_console: Makes what shows the run. Gets the run's location.
        validator: Runs its validations, if it has any.
        jobs_wait: Jobs, and the start of the controller itself, wait for a thread that calls
            `join`, so that the function runs where `pdb` works and Ctrl-C arrives. Otherwise each
            has a new thread.
        at_end: Gets how the run ended, before `join` tells that it has.

    Raises:
        ResumeError, RunInProgressError, OSError, CheckpointError: The run cannot be opened.
    """

    detached = False

    def __init__(
        self,
        spec: RunSpec,
        make_group: Callable[[str, SubmitCall], WorkerGroup],
        make_console: Callable[[str], Watcher],
        validator: Validator | None,
        *,
        use_caller_thread: bool = False,
        at_end: Callable[[RunOutcome], object] | None = None,
    ) -> None:
        self._spec = spec
        self._at_end = at_end
        self._make_group = make_group
        self._validator = validator
        self._executor = CallerExecutor(use_caller_thread=use_caller_thread)
        self._controller: Controller | None = None
        self._deferred_calls: list[Callable[[Controller], object]] = []  # given before there is one
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._outcome = ControllerOutcome()
        # In the thread of the caller, so that what is wrong is raised at the user's own line.
        self._open_run = open_run(spec)
        self.directory = self._open_run.directory
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._open_run.journal.close)
            self._console = make_console(self.path)
            on_error.callback(self._console.close)
            self._callbacks = CallbackRunner(spec.run_config.callbacks, self._open_run.context)
            self._events = EventStream(
                self._open_run.journal, self._open_run.state, [self._console, self._callbacks]
            )
            # Under the journal's lock: only its holder may take the socket over from one who was
            # killed.
            self._socket = ControlSocket(self.directory.local_path, self)
            on_error.pop_all()  # from here on, `_close` does it
        try:
            directory = self.directory
            write_atomically(
                directory.trainer_path, spec.trainer_state, temp_directory=directory.staging.path
            )
            inherit_directory_mode(directory.trainer_path)
            # Before the first worker: a driver that is lost in the start leaves a run that others
            # can find and restore.
            self.directory.run_files.upload_journal(everything=True)
            if self._open_run.warning:
                self._events.emit(Notice(self._open_run.warning))
            self._check_initial_checkpoint()
            self._plan = RunAssignmentPlanner(self._open_run)
            for text in self._plan.describe_left_out():
                self._events.emit(Notice(text))
        except BaseException:
            self._close()
            raise
        # A daemon: Python waits for other threads before it calls exit handlers, and the run would
        # hold up the end of the program for as long as it goes on.
        self._thread = threading.Thread(target=self._run, name="drawbar-controller", daemon=True)
        if use_caller_thread:
            self._executor.submit(self._thread.start)
        else:
            self._thread.start()

    @property
    def silence(self) -> str:
        """It is in this very process."""
        return ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._spec.name

    @property
    def path(self) -> str:
        """Where the run lies."""
        return self.directory.uri

    def _check_initial_checkpoint(self) -> None:
        start_from = self._spec.resume_from_checkpoint
        # A resumed run goes on from its own, and the one that it began with may be gone by now.
        if start_from is not None and not self.directory.checkpoints.list_intact():
            start_from.check_exists()

    # -- in the controller's thread

    def _run(self) -> None:
        # Handlers are called last to first: this one before Ray's own, which would take the workers
        # away.
        atexit.register(self._stop_at_exit)
        try:
            self._outcome = asyncio.run(self._run_controller())
        except BaseException as error:
            self._outcome = ControllerOutcome(error=_make_controller_error(error))
            self._events.emit(ControllerFailed())
        try:
            self._close()
        except Exception:
            _logger.exception("the run is over, but not all of %s could be closed", self.path)
        finally:
            atexit.unregister(self._stop_at_exit)
            self._release_user_objects()
            self._notify_end()
            self._over.set()
            self._executor.wake_up()

    async def _run_controller(self) -> ControllerOutcome:
        group = self._make_group(str(self.directory.local_path), self._executor.submit)
        controller = Controller(
            self._open_run, self._plan, group, self._validator, self._events.emit
        )
        with self._lock:
            self._controller = controller
        # A stop() that came while the run was still being opened is not lost.
        for order in self._deferred_calls:
            order(controller)
        try:
            return await controller.run()
        finally:
            await run_in_daemon_thread(self._plan.close)

    def _release_user_objects(self) -> None:
        """Hold nothing of the user's any longer, even where this is held on to."""
        self._spec.release()
        self._validator = None
        # It holds the pool, and with that the function and all that it captures.
        del self._make_group
        with self._lock:
            self._controller = None

    def _close(self) -> None:
        with contextlib.ExitStack() as last_to_first:  # each of them, whatever another one raises
            last_to_first.callback(self._console.close)
            last_to_first.callback(self._open_run.journal.close)
            last_to_first.callback(self._socket.close)  # under the lock: another may follow
            last_to_first.callback(self._upload_and_finish)
            last_to_first.callback(self._callbacks.drain, self._events.emit)

    def _notify_end(self) -> None:
        try:
            if self._at_end is not None:
                self._at_end(self.ending())
        except Exception:
            _logger.exception("the run is over, but not everyone who takes part in it knows how")

    def _upload_and_finish(self) -> None:
        """Put everything where others find it; the journal's lock keeps them away until then."""
        if self.directory.run_files.upload_journal(everything=True):
            upkeep.finish(self.directory)

    # -- from any thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, doing jobs meanwhile; tells whether it is."""
        if not self._executor.run_until(self._over, timeout):
            return False
        self._thread.join()
        return True

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._call_controller(Controller.stop_after_checkpoint if save else Controller.stop)

    def kill(self) -> None:
        """End every process of the run at once."""
        self.stop(save=False)
        self._call_controller(Controller.kill)

    def _call_controller(self, order: Callable[[Controller], object]) -> None:
        with self._lock:
            controller = self._controller
            if controller is None:
                self._deferred_calls.append(order)
                return
        try:
            order(controller)
        except RuntimeError:  # the loop is closed: the run has ended, but for its callbacks
            self._callbacks.stop_waiting()

    def diagnose(self) -> str:
        """Say where every rank stands."""
        controller = self._controller
        if controller is None or self._has_ended:
            return ""
        return controller.write_diagnosis().result(DIAGNOSIS_TIMEOUT_S)

    def snapshot(self) -> RunState:
        """Say how the run stands."""
        return self._events.copy_state()

    def read_log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        path = self.directory.get_log_path(rank)
        if path.exists():
            return path.read_text(errors="replace")
        return (self.directory.run_files.read(f"logs/{path.name}") or b"").decode(errors="replace")

    @property
    def _has_ended(self) -> bool:
        """Whether nothing trains any more; callbacks may still be called."""
        return self.snapshot().status in FINAL_STATUSES

    def ending(self) -> RunOutcome:
        """Give how the run ended."""
        result = None if self._outcome.error else Result.from_run_directory(self.directory)
        return RunOutcome(self._outcome, self.snapshot(), result)

    def _stop_at_exit(self) -> None:
        """Stop the run: the program ends, and with it the run's workers would."""
        if self._spec.scaling_config.max_workers and not ray.is_initialized():
            return  # they are gone already, with the connection to Ray
        if not self._has_ended:
            self._events.emit(Notice(STOPPED_AT_EXIT))
            self.stop(save=False)
        if not self._over.wait(EXIT_SECONDS):
            self.kill()
            self._over.wait(EXIT_SECONDS)


def _make_controller_error(error: BaseException) -> ControllerError:
    message = f"the run's controller failed: {type(error).__name__}: {error}"
    failed = ControllerError(message, error if isinstance(error, Exception) else None)
    failed.__cause__ = error
    return failed


def start_ray_run(
    spec: RunSpec, make_console: Callable[[str], Watcher], *, use_caller_thread: bool = False
) -> ControllerThread:
    """Check that the cluster has room for a run, and host it in this process.

    Args:
        spec: What is to run; it has workers.
        make_console: As for `Host`.
        jobs_wait: As for `Host`.

    Raises:
        ValueError: The cluster cannot hold what the run needs.
        Exception: Whatever keeps a `Host` from starting.
    """
    check_cluster_fits(spec.scaling_config)
    if spec.datasets:
        check_dataset_cpus(
            spec.scaling_config, split.list_streamed(spec.datasets, spec.dataset_config)
        )
    if spec.validation_task is not None:
        check_validation_fits(spec.validation_task.task_resources)

    payload = ray.put(spec.train_loop)  # before the caller can go on, and change an array
    parent_placement = Placement.from_current_group(spec.scaling_config)

    def make_worker_group(path: str, spawn: SubmitCall) -> WorkerGroup:
        runtime_env = spec.run_config.worker_runtime_env
        setup = spec.backend_config.process_setup_hook
        pool = ActorPool(spec.scaling_config, path, runtime_env, setup, parent_placement)
        return RayWorkerGroup(pool, payload)

    validator = RayValidator(spec.validation_task) if spec.validation_task is not None else None
    return ControllerThread(
        spec, make_worker_group, make_console, validator, use_caller_thread=use_caller_thread
    )


def start_local_run(
    spec: RunSpec,
    payload: TrainLoop,
    validation_config: ValidationConfig | None,
    make_console: Callable[[str], Watcher],
    *,
    use_caller_thread: bool,
    num_threads: int | None = None,
) -> ControllerThread:
    """Host a run whose function runs in this very process.

    Args:
        spec: What is to run.
        payload: The function itself; nothing is pickled.
        validation_config: How its checkpoints are validated, in threads.
        make_console: As for `Host`.
        jobs_wait: As for `Host`.
        threads: How many ranks there are, each in a thread of its own. None is `num_workers=0`: one
            rank, as a job of the host.

    Raises:
        Exception: Whatever keeps a `Host` from starting.
    """
    gpu_ids = get_local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker))

    def make_group(path: str, spawn: SubmitCall) -> WorkerGroup:
        if num_threads is None:
            return ThreadWorkerGroup(payload, submit_call=spawn, gpu_ids=gpu_ids)
        return ThreadWorkerGroup(payload, num_threads)

    validator = ThreadValidator(validation_config) if validation_config is not None else None
    return ControllerThread(
        spec, make_group, make_console, validator, use_caller_thread=use_caller_thread
    )
