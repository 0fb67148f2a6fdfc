"""Mode of runs in the processes of torchrun or another launcher.

Each process calls `fit()` or `start()`, or starts the mode itself. Rank 0 runs the controller; the
other ranks connect to it, and their `fit()` ends when the run ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pickle
import threading
import traceback
from dataclasses import dataclass
from functools import partial

import cloudpickle

from drawbar._base.frames import warn_caller
from drawbar._data.run_datasets import RunDatasets
from drawbar._handle.in_process_run import InProcessRun
from drawbar._handle.run_outcome import RunOutcome
from drawbar._handle.run_view import RunView
from drawbar._modes.start_run import start_controller
from drawbar._modes.thread_group import ThreadWorkerGroup
from drawbar._modes.torchrun_group import TorchrunWorkerGroup, make_local_worker_info
from drawbar._modes.torchrun_messages import (
    CaptureStack,
    EndRun,
    ExecuteFunction,
    FunctionCancelled,
    PeerCommand,
    PeerReply,
    RunOpened,
    StartAttempt,
    StopRequested,
)
from drawbar._modes.torchrun_server import (
    TorchrunServer,
    connect_to_rank_zero,
    get_peer_address,
)
from drawbar._modes.validators import ThreadValidator
from drawbar._process.codec import ProtocolError
from drawbar._process.errors import ControllerError
from drawbar._process.failure import describe_exception
from drawbar._process.rank_assignment import get_local_gpu_ids
from drawbar._process.ranks import Ranks
from drawbar._process.serialization import serialize, serialize_without_references
from drawbar._process.threads import DaemonThreadPool
from drawbar._process.worker_env import read_ranks_from_env
from drawbar._records.timeline import RunState
from drawbar.train._config.backend import LauncherStore
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._controller.run import ControllerOutcome, RunSpec
from drawbar.train._driver.controller_thread import CallerExecutor
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import InterruptFunction
from drawbar.train._protocol.messages import Message, RankFailed
from drawbar.train._worker.rank_runner import RankRunner, execute, use_caller_process
from drawbar.train._worker.session import Session
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker_group.worker_group import SubmitCall, WorkerGroup

_run_numbers = itertools.count()  # per process: all ranks call fit() equally often


@dataclass(frozen=True)
class LauncherMode:
    """Run the training function in the processes that a launcher such as torchrun has started.

    Each process starts the mode. Its environment variables RANK, WORLD_SIZE, LOCAL_RANK, and
    LOCAL_WORLD_SIZE are set. If a process dies, the run fails: only the launcher can start the
    processes again. So `FailureConfig.max_failures` is ignored.

    Attributes:
        store: Store of the launcher, through which the ranks find each other.
        validation_config: Validation of checkpoints, or None.
        use_caller_thread: Run the training function in the thread that waits for the run. If False,
            it runs in a separate thread.

    Example:
        ```python
        run = LauncherMode(store).start(spec, train_loop)  # in the process of each rank
        run.join()
        ```
    """

    store: LauncherStore
    validation_config: ValidationConfig | None = None
    use_caller_thread: bool = True

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        """Run the controller in the process of rank 0, or connect another rank to it.

        Args:
            spec: Settings of the run.
            train_loop: Training function.

        Returns:
            View of the run. `join()` runs the training function, unless it has a separate thread.

        Raises:
            ValueError: The trainer has datasets that only Ray can split, or the run is set to
                recover in place.
            Exception: The run cannot start. Raised on every rank.
        """
        ranks = read_ranks_from_env(os.environ)
        _check_works_without_ray(spec, ranks)
        store, key = self.store, f"drawbar/run/{next(_run_numbers)}"
        if ranks.world_rank > 0:
            return TorchrunRun(
                store, key, spec, train_loop, ranks, use_caller_thread=self.use_caller_thread
            )
        server = TorchrunServer(ranks.world_size - 1, get_peer_address(ranks))
        try:
            run = self._start_rank_zero(spec, train_loop, ranks, server)
        except Exception as error:
            server.publish_error(store, key, error)
            raise
        server.publish_address(store, key, run.directory)
        return run

    def _start_rank_zero(
        self, spec: RunSpec, train_loop: TrainLoop, ranks: Ranks, server: TorchrunServer
    ) -> InProcessRun:
        gpu_ids = _get_gpu_ids(spec, ranks)

        def make_worker_group(path: str, submit_call: SubmitCall) -> WorkerGroup:
            local_group = ThreadWorkerGroup(train_loop, submit_call=submit_call, gpu_ids=[gpu_ids])
            local_info = make_local_worker_info(ranks, gpu_ids)
            return TorchrunWorkerGroup(
                local_group, local_info, server, lambda save: run.stop(save=save)
            )

        def send_outcome(run: RunView) -> None:
            server.end(EndRun(run.get_outcome().serialize(serialize_without_references)))

        config = self.validation_config
        run = start_controller(
            _disable_restarts(spec),
            make_worker_group,
            ThreadValidator(config) if config is not None else None,
            use_caller_thread=self.use_caller_thread,
            on_end=send_outcome,
        )
        return run


def _disable_restarts(spec: RunSpec) -> RunSpec:
    """Leave restarts to the launcher, which alone can replace a process."""
    limit = spec.run_config.failure_config.max_failures
    if limit:
        warn_caller(
            f"FailureConfig.max_failures={limit} is ignored, because your launcher restarts the "
            "processes. Set its limit instead (torchrun: --max-restarts). A run with a name and "
            'resume="auto" then resumes from its latest checkpoint'
        )
    return dataclasses.replace(spec, is_restarted_by_launcher=True)


def _check_works_without_ray(spec: RunSpec, ranks: Ranks) -> None:
    if spec.run_config.failure_config.recovery == "in_place":
        raise ValueError(
            "FailureConfig(recovery='in_place'), which TorchftConfig sets, does not work in the "
            f"{ranks.world_size} processes that a launcher has started, because only the launcher "
            "can replace them. Start the script with python and "
            f"ScalingConfig(num_workers={ranks.world_size}), or set recovery='restart' and "
            "TorchConfig"
        )
    if isinstance(spec.data_source, RunDatasets):
        raise ValueError(
            f"the datasets of the trainer cannot be split among the {ranks.world_size} processes "
            "that a launcher has started, because they have no Ray. Start the script with "
            f"python and ScalingConfig(num_workers={ranks.world_size}), pass a DataSource that "
            "does not use Ray, or read the data in the training function"
        )


def _get_gpu_ids(spec: RunSpec, ranks: Ranks) -> tuple[str, ...]:
    return get_local_gpu_ids(math.ceil(spec.scaling_config.num_gpus_per_worker), ranks.local_rank)


class TorchrunRun(RunView):
    """View of a run that rank 0 controls, in which this process takes part as another rank.

    Args:
        store: Store of the launcher.
        key: Key under which rank 0 publishes its address.
        spec: The run, as this process would start it.
        train_loop: The training function.
        ranks: Ranks of this process.
        use_caller_thread: Run the training function in the thread that calls `join`, instead of in
            a separate thread.

    Raises:
        ControllerError: Rank 0 died.
        Exception: Rank 0 cannot start the run.
    """

    def __init__(
        self,
        store: LauncherStore,
        key: str,
        spec: RunSpec,
        train_loop: TrainLoop,
        ranks: Ranks,
        *,
        use_caller_thread: bool,
    ) -> None:
        self._train_loop = train_loop
        self._env_vars = spec.worker_spec.env_vars
        self._runner = RankRunner()
        self._executor = CallerExecutor(use_caller_thread=use_caller_thread)
        # A hook or a program that hangs must not keep the run from ending.
        self._hook_threads = DaemonThreadPool(1, "drawbar-hooks")
        self._stack_threads = DaemonThreadPool(1, "drawbar-stacks")
        self._ended = threading.Event()
        self._outcome: RunOutcome | None = None
        info = make_local_worker_info(ranks, _get_gpu_ids(spec, ranks))
        try:
            self._connection, self.directory = connect_to_rank_zero(
                store, key, ranks.world_rank, info
            )
        except (ProtocolError, OSError, EOFError) as error:
            raise _make_rank_zero_lost_error(error) from error
        threading.Thread(target=self._receive_loop, name="drawbar-rank-zero", daemon=True).start()

    # -- commands of rank 0

    def _receive_loop(self) -> None:
        try:
            while self._outcome is None:
                self._handle_command(self._connection.receive())
        except (ProtocolError, OSError, EOFError) as error:
            lost = _make_rank_zero_lost_error(error, self.directory.uri)
            self._outcome = RunOutcome(ControllerOutcome(error=lost), RunState(status="failed"))
            self._runner.handle_command(InterruptFunction(reason=str(lost)))
        self._ended.set()
        self._executor.wake_up()

    def _handle_command(self, command: PeerCommand) -> None:
        match command:
            case StartAttempt(assignment):
                self._start_attempt(pickle.loads(assignment))
            case CaptureStack(request_id):
                self._stack_threads.submit(self._send_stack, request_id)
            case ExecuteFunction():
                # In a thread: rank 0 may request the stack of a function that hangs.
                self._hook_threads.submit(self._execute, command)
            case EndRun(outcome):
                self._outcome = cloudpickle.loads(outcome)
                self._runner.end_run()
            case RunOpened():
                pass  # only the first command, which `connect_to_rank_zero` handles
            case _:
                self._runner.handle_command(command)

    def _send_stack(self, request_id: int) -> None:
        stack = self._runner.capture_stack()
        self._connection.send(PeerReply(request_id=request_id, stack=stack))

    def _execute(self, request: ExecuteFunction) -> None:
        """Call a function for a backend, and send its result or its traceback."""
        try:
            value = serialize(execute(request.call))
            self._connection.send(PeerReply(request_id=request.request_id, value=value))
        except Exception:
            error = traceback.format_exc()
            self._connection.send(PeerReply(request_id=request.request_id, error=error))

    def _start_attempt(self, assignment: WorkerAssignment) -> None:
        env_vars = {**self._env_vars, **_get_device_env_vars(assignment)}
        # Not rank 0's variables: torchrun sets different ones in each process.
        spec = dataclasses.replace(assignment.spec, env_vars=env_vars)
        assignment = dataclasses.replace(assignment, spec=spec)
        session = self._runner.start_attempt(assignment, self._connection.send)
        self._executor.submit(
            partial(
                self._runner.run,
                session,
                self._train_loop,
                partial(self._send_final_message, session),
                use_environment=use_caller_process,
            )
        )

    def _send_final_message(self, session: Session, message: Message | None) -> None:
        try:
            self._connection.send(FunctionCancelled() if message is None else message)
        except ProtocolError as error:  # the return value is too large
            failure = describe_exception(
                error,
                session.assignment.ranks.world_rank,
                session.assignment.log_path,
                session.report_count,
            )
            self._connection.send(RankFailed(failure=failure))

    # -- called from any thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended, running the function meanwhile. Return whether it has."""
        return self._executor.run_until(self._ended, timeout)

    def stop(self, *, save: bool | None) -> None:
        """Stop the run. See `Controller.stop`."""
        self._connection.send(StopRequested(save))

    def kill(self) -> None:
        """Stop the run immediately, but leave its processes to the launcher."""
        self.stop(save=False)

    def diagnose(self) -> str:
        """Return an empty string: rank 0 prints the diagnosis."""
        return ""

    def get_state(self) -> RunState:
        """Return the current or final state of the run."""
        # Not `super().get_state()`: `join` would run the training function in this thread.
        return self._read_state() if self._outcome is None else self._outcome.snapshot

    def get_outcome(self) -> RunOutcome:
        """Wait until the run has ended and return its outcome."""
        self._ended.wait()
        assert self._outcome is not None
        return self._outcome


def _get_device_env_vars(assignment: WorkerAssignment) -> dict[str, str]:
    name = "CUDA_VISIBLE_DEVICES"
    variables = assignment.spec.env_vars
    return {name: variables[name]} if name in variables else {}


def _make_rank_zero_lost_error(error: Exception, path: str = "") -> ControllerError:
    return ControllerError(
        f"the process of rank 0, which runs the controller, died: {error or type(error).__name__}. "
        "See its output for the cause",
        error,
        path=path,
    )
