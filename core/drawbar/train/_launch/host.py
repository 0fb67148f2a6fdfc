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

from drawbar.train._controller.callbacks import Callbacks
from drawbar.train._controller.controller import Controller
from drawbar.train._controller.run import Ending, Outcome, RunSpec
from drawbar.train._data import split
from drawbar.train._errors import ControllerError
from drawbar.train._group.actor_pool import ActorPool
from drawbar.train._group.cluster import check_cluster, check_data, check_validation
from drawbar.train._group.placement import Placement
from drawbar.train._group.ranks import local_gpu_ids
from drawbar.train._group.ray_group import RayWorkerGroup
from drawbar.train._group.thread_group import Spawn, ThreadWorkerGroup
from drawbar.train._group.validators import RayValidator, ThreadValidator, Validator
from drawbar.train._group.worker_group import WorkerGroup
from drawbar.train._history.events import ControllerFailed, Notice
from drawbar.train._history.result import Result
from drawbar.train._history.stream import EventStream, Watcher
from drawbar.train._history.timeline import ENDS, Snapshot
from drawbar.train._launch.assignments import SpecPlan
from drawbar.train._launch.control import ControlSocket
from drawbar.train._launch.jobs import Jobs
from drawbar.train._launch.opening import open_run
from drawbar.train._settings.validation_config import ValidationConfig
from drawbar.train._storage import upkeep
from drawbar.train._storage.files import take_mode_of_folder, write_atomically
from drawbar.train._threads import in_daemon_thread
from drawbar.train._worker.actor import Payload

DIAGNOSIS_SECONDS = 10.0
EXIT_SECONDS = 3.0
ENDS_WITH_THE_PROGRAM = "the program ends without wait(): the run is stopped, and can be resumed"

_logger = logging.getLogger("drawbar.train")


class Host:
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
        ResumeError, JournalLockedError, OSError, CheckpointError: The run cannot be opened.
    """

    detached = False

    def __init__(
        self,
        spec: RunSpec,
        make_group: Callable[[str, Spawn], WorkerGroup],
        make_console: Callable[[str], Watcher],
        validator: Validator | None,
        *,
        jobs_wait: bool = False,
        at_end: Callable[[Ending], object] | None = None,
    ) -> None:
        self._spec = spec
        self._at_end = at_end
        self._make_group = make_group
        self._validator = validator
        self._jobs = Jobs(wait=jobs_wait)
        self._controller: Controller | None = None
        self._orders: list[Callable[[Controller], object]] = []  # given before there is one
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._outcome = Outcome()
        # In the thread of the caller, so that what is wrong is raised at the user's own line.
        self._held = open_run(spec)
        self.directory = self._held.directory
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._held.journal.close)
            self._console = make_console(self.path)
            on_error.callback(self._console.close)
            self._callbacks = Callbacks(spec.run_config.callbacks, self._held.context)
            self._events = EventStream(
                self._held.journal, self._held.snapshot, [self._console, self._callbacks]
            )
            # Under the journal's lock: only its holder may take the socket over from one who was
            # killed.
            self._socket = ControlSocket(self.directory.path, self)
            on_error.pop_all()  # from here on, `_close` does it
        try:
            directory = self.directory
            write_atomically(directory.trainer, spec.trainer, by_way_of=directory.staging.path)
            take_mode_of_folder(directory.trainer)
            # Before the first worker: a driver that is lost in the start leaves a run that others
            # can find and restore.
            self.directory.files.publish(everything=True)
            if self._held.warning:
                self._events.emit(Notice(self._held.warning))
            self._require_checkpoint()
            self._plan = SpecPlan(self._held)
            for text in self._plan.describe_left_out():
                self._events.emit(Notice(text))
        except BaseException:
            self._close()
            raise
        # A daemon: Python waits for other threads before it calls exit handlers, and the run would
        # hold up the end of the program for as long as it goes on.
        self._thread = threading.Thread(target=self._run, name="drawbar-controller", daemon=True)
        if jobs_wait:
            self._jobs.spawn(self._thread.start)
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
        return self.directory.location

    def _require_checkpoint(self) -> None:
        start_from = self._spec.resume_from_checkpoint
        # A resumed run goes on from its own, and the one that it began with may be gone by now.
        if start_from is not None and not self.directory.checkpoints.intact():
            start_from.require()

    # -- in the controller's thread

    def _run(self) -> None:
        # Handlers are called last to first: this one before Ray's own, which would take the workers
        # away.
        atexit.register(self._end_with_the_program)
        try:
            self._outcome = asyncio.run(self._control())
        except BaseException as error:
            self._outcome = Outcome(error=_controller_failed(error))
            self._events.emit(ControllerFailed())
        try:
            self._close()
        except Exception:
            _logger.exception("the run is over, but not all of %s could be closed", self.path)
        finally:
            atexit.unregister(self._end_with_the_program)
            self._let_go()
            self._tell_end()
            self._over.set()
            self._jobs.release()

    async def _control(self) -> Outcome:
        group = self._make_group(str(self.directory.path), self._jobs.spawn)
        controller = Controller(self._held, self._plan, group, self._validator, self._events.emit)
        with self._lock:
            self._controller = controller
        # A stop() that came while the run was still being opened is not lost.
        for order in self._orders:
            order(controller)
        try:
            return await controller.run()
        finally:
            await in_daemon_thread(self._plan.close)

    def _let_go(self) -> None:
        """Hold nothing of the user's any longer, even where this is held on to."""
        self._spec.let_go()
        self._validator = None
        # It holds the pool, and with that the function and all that it captures.
        del self._make_group
        with self._lock:
            self._controller = None

    def _close(self) -> None:
        with contextlib.ExitStack() as last_to_first:  # each of them, whatever another one raises
            last_to_first.callback(self._console.close)
            last_to_first.callback(self._held.journal.close)
            last_to_first.callback(self._socket.close)  # under the lock: another may follow
            last_to_first.callback(self._publish_and_leave)
            last_to_first.callback(self._callbacks.finish, self._events.emit)

    def _tell_end(self) -> None:
        try:
            if self._at_end is not None:
                self._at_end(self.ending())
        except Exception:
            _logger.exception("the run is over, but not everyone who takes part in it knows how")

    def _publish_and_leave(self) -> None:
        """Put everything where others find it; the journal's lock keeps them away until then."""
        if self.directory.files.publish(everything=True):
            upkeep.leave(self.directory)

    # -- from any thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over, doing jobs meanwhile; tells whether it is."""
        if not self._jobs.do_until(self._over, timeout):
            return False
        self._thread.join()
        return True

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._order(Controller.stop_after_checkpoint if save else Controller.stop)

    def kill(self) -> None:
        """End every process of the run at once."""
        self.stop(save=False)
        self._order(Controller.kill)

    def _order(self, order: Callable[[Controller], object]) -> None:
        with self._lock:
            controller = self._controller
            if controller is None:
                self._orders.append(order)
                return
        try:
            order(controller)
        except RuntimeError:  # the loop is closed: the run has ended, but for its callbacks
            self._callbacks.give_up()

    def diagnose(self) -> str:
        """Say where every rank stands."""
        controller = self._controller
        if controller is None or self._has_ended:
            return ""
        return controller.write_diagnosis().result(DIAGNOSIS_SECONDS)

    def snapshot(self) -> Snapshot:
        """Say how the run stands."""
        return self._events.snapshot()

    def log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        path = self.directory.log(rank)
        if path.exists():
            return path.read_text(errors="replace")
        return (self.directory.files.read(f"logs/{path.name}") or b"").decode(errors="replace")

    @property
    def _has_ended(self) -> bool:
        """Whether nothing trains any more; callbacks may still be called."""
        return self.snapshot().status in ENDS

    def ending(self) -> Ending:
        """Give how the run ended."""
        result = None if self._outcome.error else Result.of(self.directory)
        return Ending(self._outcome, self.snapshot(), result)

    def _end_with_the_program(self) -> None:
        """Stop the run: the program ends, and with it the run's workers would."""
        if self._spec.scaling_config.max_workers and not ray.is_initialized():
            return  # they are gone already, with the connection to Ray
        if not self._has_ended:
            self._events.emit(Notice(ENDS_WITH_THE_PROGRAM))
            self.stop(save=False)
        if not self._over.wait(EXIT_SECONDS):
            self.kill()
            self._over.wait(EXIT_SECONDS)


def _controller_failed(error: BaseException) -> ControllerError:
    message = f"the run's controller failed: {type(error).__name__}: {error}"
    failed = ControllerError(message, error if isinstance(error, Exception) else None)
    failed.__cause__ = error
    return failed


def host_workers(
    spec: RunSpec, make_console: Callable[[str], Watcher], *, jobs_wait: bool = False
) -> Host:
    """Check that the cluster has room for a run, and host it in this process.

    Args:
        spec: What is to run; it has workers.
        make_console: As for `Host`.
        jobs_wait: As for `Host`.

    Raises:
        ValueError: The cluster cannot hold what the run needs.
        Exception: Whatever keeps a `Host` from starting.
    """
    check_cluster(spec.scaling_config)
    if spec.datasets:
        check_data(spec.scaling_config, split.lazy(spec.datasets, spec.dataset_config))
    if spec.validation is not None:
        check_validation(spec.validation.resources)

    payload = ray.put(spec.payload)  # before the caller can go on, and change an array
    around = Placement.around(spec.scaling_config)

    def make_group(path: str, spawn: Spawn) -> WorkerGroup:
        runtime_env = spec.run_config.worker_runtime_env
        setup = spec.backend_config.process_setup
        pool = ActorPool(spec.scaling_config, path, runtime_env, setup, around)
        return RayWorkerGroup(pool, payload)

    validator = RayValidator(spec.validation) if spec.validation is not None else None
    return Host(spec, make_group, make_console, validator, jobs_wait=jobs_wait)


def host_function(
    spec: RunSpec,
    payload: Payload,
    validation_config: ValidationConfig | None,
    make_console: Callable[[str], Watcher],
    *,
    jobs_wait: bool,
    threads: int | None = None,
) -> Host:
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
    gpu_ids = local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker))

    def make_group(path: str, spawn: Spawn) -> WorkerGroup:
        if threads is None:
            return ThreadWorkerGroup(payload, spawn=spawn, gpu_ids=gpu_ids)
        return ThreadWorkerGroup(payload, threads)

    validator = ThreadValidator(validation_config) if validation_config is not None else None
    return Host(spec, make_group, make_console, validator, jobs_wait=jobs_wait)
