"""Run a program in place of the training function and supervise its process.

The worker starts the program as a child process and waits for it. A worker is a Ray worker process
or, for `drawbar launch` on one machine, a thread of the launcher. In its own process, a script can
use the main thread, receive signals, fork and spawn, register exit handlers, and die. The worker
survives, and keeps its node and GPUs when the program is restarted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import IO

import msgspec

from drawbar._fork_server.client import REPLY_TIMEOUT_S, ForkServerError
from drawbar._modes import program_main
from drawbar._modes.activity import ActivityMonitor
from drawbar._modes.program_failure import ProgramFailure, make_program_error
from drawbar._modes.program_launch import (
    CORE_DIRECTORY,
    CPUS_VARIABLE,
    NO_PYTHON,
    PROGRAM_MARKER_VARIABLE,
    ProgramChild,
    open_pipes,
    start_program,
)
from drawbar._modes.program_output import STREAMS, OutputStream, OutputWriter, ProgramOutput
from drawbar._modes.session_client import RankConnection
from drawbar._process import sentinel
from drawbar._process.output import write_to_log
from drawbar._process.stack import Stack, detect_stopped_process
from drawbar._process.training_thread import AttemptInterrupted
from drawbar.train._protocol.commands import Command, InterruptFunction
from drawbar.train._protocol.messages import Heartbeat, OutputBytes, ProgramStarted
from drawbar.train._worker.active_session import current_session
from drawbar.train._worker.session import Session

ACTIVITY_CHECK_INTERVAL_S = 5.0
_STACK_TIMEOUT_S = 1.0
_EXIT_TIMEOUT_S = 30.0  # as in torchrun; the controller's limit is shorter
_DRAIN_TIMEOUT_S = 1.0
_READ_BYTES = 1 << 16


class ProgramMessage(msgspec.Struct, frozen=True):
    """Message from a program: one of the two fields is set."""

    failed: ProgramFailure | None = None
    stack: Stack | None = None


# Once for all threads: msgspec can crash if two threads use a type for the first time.
_message_decoder = msgspec.json.Decoder(ProgramMessage)


def run_program(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    activity_check_seconds: float = ACTIVITY_CHECK_INTERVAL_S,
    is_python: bool = True,
    output: ProgramOutput | None = None,
    cpus: Collection[int] = (),
) -> None:
    """Run a script in place of the training function and wait until it ends.

    The script may call `drawbar.train.report` and related functions, which then act for this rank.
    The log of each rank contains its complete output. When the attempt ends, the script receives
    SIGTERM, or SIGINT if the user stops the run. Processes that it leaves behind are killed.

    Args:
        arguments: Command line after `python`: a script and its arguments, or "-m", a module, and
            its arguments. Without `is_python`, the complete command line.
        environment: Complete environment of the process.
        activity_check_seconds: Interval in seconds at which Drawbar checks for activity: output or
            CPU use of the program and its children. Activity is sent as a heartbeat.
        is_python: Whether Python runs the script. If not, it is another program.
        output: Destinations of the output in addition to the log. By default, the driver prints the
            standard output and standard error of rank 0, byte for byte.
        cpus: CPUs to which the process is bound. Default: the CPUs of this process.

    Raises:
        ProgramFailedError: The program failed.
        OSError: The program cannot be started.
        RuntimeError: Called outside a training function.

    Example:
        >>> def train_func():
        ...     run_program(["train.py", "--epochs", "3"], dict(os.environ))
    """
    session = current_session("run_program")
    if output is None:
        is_rank_zero = session.assignment.ranks.world_rank == 0
        output = ProgramOutput(console=dict.fromkeys(STREAMS, "") if is_rank_zero else {})
    if cpus:
        environment = {**environment, CPUS_VARIABLE: ",".join(map(str, cpus))}
    program = session.program = ProgramProcess(
        session, activity_check_seconds, output, is_python=is_python
    )
    try:
        program.start(arguments, environment)
        program.wait()
    except AttemptInterrupted:
        if not program.has_failed:
            program.terminate()
            raise
        program.wait_for_exit()
    finally:
        session.program = None
        program.close()
    program.raise_if_failed()


class ProgramProcess:
    """Process of a program.

    `handle_command()`, `capture_stack()`, and `kill()` can be called from any thread, all other
    methods only from the thread that waits for the program.

    Args:
        session: Session of the rank.
        activity_check_seconds: Interval of the activity check in seconds.
        output: Destinations of the output in addition to the log.
        is_python: Whether Python runs the script.
    """

    def __init__(
        self,
        session: Session,
        activity_check_seconds: float,
        output: ProgramOutput,
        *,
        is_python: bool,
    ) -> None:
        self._session = session
        self._activity_check_seconds = activity_check_seconds
        self._next_activity_check = time.monotonic() + activity_check_seconds
        self._marker = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._process: ProgramChild | None = None
        self._exit_code: int | None = None
        self._reap_lock = threading.Lock()
        self._is_python = is_python
        self._log_path = session.directory.get_log_path(session.assignment.ranks.world_rank)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self._log_path, "ab", buffering=0)  # noqa: SIM115  # until close()
        self._output = OutputWriter(
            output,
            partial(write_to_log, log=self._log),
            lambda data, stream: session.forward(OutputBytes(data=data, stream=stream)),
        )
        self._control, self._child_control = socket.socketpair()
        session_socket, self._child_session = socket.socketpair()
        self._rank_connection = RankConnection(session, session_socket)
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        self._pipes: dict[OutputStream, IO[bytes]] = {}  # output that is not only for the log
        self._selector = selectors.DefaultSelector()
        self._ended_at: float | None = None
        self._is_stopped_by_user = False
        self._failure: ProgramFailure | None = None
        self._unparsed = bytearray()
        self._stacks: queue.SimpleQueue[Stack] = queue.SimpleQueue()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process with the given command line and environment."""
        command = [*([] if self._is_python else [NO_PYTHON]), *arguments]
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(open(os.devnull, "r+b", buffering=0))
            self._pipes, writers = open_pipes(stack, self._output.piped_streams)
            outputs = [writers.get(stream, self._log.fileno()) for stream in STREAMS]
            control = stack.enter_context(self._child_control)
            child_session = stack.enter_context(self._child_session)
            self._register()
            self._process = process = start_program(
                [program_main.__file__, CORE_DIRECTORY, *command],
                {**environment, PROGRAM_MARKER_VARIABLE: self._marker},
                [null.fileno(), *outputs],
                [control.fileno(), child_session.fileno()],
                self._wait_for_fork_server,
            )
        self._session.send(ProgramStarted(pid=process.pid))
        self._oom_kills = sentinel.OomKillCounter(process.pid)
        self._activity = ActivityMonitor(process.pid, self._log_path)
        threading.Thread(
            target=self._watch_exit, args=(process,), name="drawbar-program", daemon=True
        ).start()

    def _wait_for_fork_server(self, connection: socket.socket, *, process_id: int) -> None:
        """Wait until the fork server replies, which it does after its imports."""
        self._activity = ActivityMonitor(process_id, self._log_path)
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        reply = threading.Event()

        def on_reply() -> bool:
            reply.set()
            return False

        self._selector.register(connection, selectors.EVENT_READ, on_reply)
        while not reply.is_set():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._selector.unregister(connection)
                raise ForkServerError(f"it has not replied for {REPLY_TIMEOUT_S} s")
            self._poll(min(remaining, self._activity_check_seconds))

    def _register(self) -> None:
        register = partial(self._selector.register, events=selectors.EVENT_READ)
        register(self._wakeup_reader, data=partial(_discard, self._wakeup_reader))
        register(self._control, data=self._on_control_data)
        register(self._rank_connection, data=self._rank_connection.receive)
        for stream, pipe in self._pipes.items():
            register(pipe, data=partial(self._on_output, pipe, stream))

    # -- from other threads

    def _watch_exit(self, process: ProgramChild) -> None:
        # Its pid and process group id are not reused before `close()`.
        process.wait_for_end()
        self._ended_at = time.time()
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # closed: the program has ended
            self._wakeup_writer.send(b".")

    def handle_command(self, command: Command) -> None:
        """Handle a command: forward it to the program, or interrupt the wait for the program."""
        if isinstance(command, InterruptFunction):
            self._is_stopped_by_user = command.is_user_request
            self._wake_up()
        else:
            self._rank_connection.send_command(command)

    def capture_stack(self) -> Stack | None:
        """Return the stack of the program, or that its process is stopped.

        Returns:
            The stack, or None if the program does not reply.
        """
        if self._process is None:
            return None  # the program is being started
        while not self._stacks.empty():
            self._stacks.get()  # discard late replies to earlier requests
        try:
            self._control.sendall(b"stack\n")
            return self._stacks.get(timeout=_STACK_TIMEOUT_S)
        except OSError:
            return None  # the program has ended
        except queue.Empty:
            return detect_stopped_process(self._process.pid)

    def kill(self) -> None:
        """Kill the program and its process group."""
        # If the lock is held, `close()` is killing them. Afterwards the group id may be reused.
        if self._process is not None and self._reap_lock.acquire(blocking=False):
            try:
                if self._exit_code is None:
                    _kill(self._process)
            finally:
                self._reap_lock.release()

    # -- in the thread that waits

    def wait(self) -> None:
        """Wait until the program ends."""
        while self._ended_at is None:
            self._poll(self._activity_check_seconds)

    def _poll(self, timeout: float) -> bool:
        """Handle messages and output of the program and return whether there were any."""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        # Also if `ready` is not empty: a program that writes continuously needs heartbeats too.
        if time.monotonic() >= self._next_activity_check:
            self._next_activity_check = time.monotonic() + self._activity_check_seconds
            if self._activity.has_activity():
                self._session.forward(Heartbeat())
        return bool(ready)

    def _on_control_data(self) -> bool:
        try:
            data = self._control.recv(_READ_BYTES)
        except ConnectionResetError:  # killed before it has read a request
            return False
        self._unparsed += data
        if b"\n" not in data:
            return bool(data)
        *lines, self._unparsed = self._unparsed.split(b"\n")
        for line in lines:
            message = _message_decoder.decode(line)
            self._failure = message.failed or self._failure
            if message.stack is not None:
                self._stacks.put(message.stack)
        return bool(data)

    def _on_output(self, pipe: IO[bytes], stream: OutputStream) -> bool:
        data = os.read(pipe.fileno(), _READ_BYTES)
        if data:
            self._output.write(data, stream)
        return bool(data)

    @property
    def has_failed(self) -> bool:
        """True if the program has ended or sent a failure."""
        return self._failure is not None or self._ended_at is not None

    def terminate(self) -> None:
        """Send SIGTERM, or SIGINT if the user stops the run, and wait for the exit."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT if self._is_stopped_by_user else signal.SIGTERM)
        self.wait_for_exit()

    def wait_for_exit(self) -> None:
        """Wait up to 30 s for the exit, while exit handlers run."""
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        while self._ended_at is None and (remaining := deadline - time.monotonic()) > 0:
            self._poll(remaining)

    def close(self) -> None:
        """Kill the program and its orphaned processes, and handle their last output."""
        process = self._process
        if process is not None:
            # Kill the group before reaping its leader: afterwards the group id may be reused.
            with self._reap_lock:
                _kill(process)
                self._exit_code = process.collect()
        sentinel.kill_orphans(f"{PROGRAM_MARKER_VARIABLE}={self._marker}")
        if process is not None:
            self._drain()
        self._output.close()
        self._selector.close()
        self._rank_connection.close()
        for endpoint in (self._control, self._wakeup_writer, self._wakeup_reader, self._log):
            endpoint.close()
        for pipe in self._pipes.values():
            pipe.close()

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while self._poll(0) and time.monotonic() < deadline:
            pass

    def raise_if_failed(self) -> None:
        """Raise an error if the program has failed.

        Raises:
            ProgramFailedError: The program has failed.
        """
        assert self._exit_code is not None  # only called after close()
        if self._exit_code:
            error = make_program_error(
                self._exit_code,
                self._failure,
                self._ended_at or time.time(),
                is_python=self._is_python,
                is_oom_killed=bool(self._oom_kills.has_increased()),
            )
            error.pid = 0 if self._process is None else self._process.pid
            raise error


def _discard(connection: socket.socket) -> bool:
    connection.recv(64)
    return True


def _kill(process: ProgramChild) -> None:
    """Kill a process and its process group, which a forked process creates soon after the fork."""
    process.send_signal(signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
