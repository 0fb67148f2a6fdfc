"""Start the process of a program: forked from a process with its imports, or a new interpreter.

The ranks of a script on one machine do the same imports. A fork server, a child process of the
launcher, does those at the top of the script once (see `drawbar._fork_server`). If it cannot
be used, every rank is a new interpreter, and `ERROR_VARIABLE` in its environment states why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from drawbar._fork_server import client, program_server
from drawbar._fork_server.client import ForkServerError
from drawbar._fork_server.forkable import read_node_id, read_start_time
from drawbar._fork_server.rank_reads import RANK_VARIABLES
from drawbar._modes import program_main
from drawbar._modes.program_output import OutputStream
from drawbar._process import preloadable

CORE_DIRECTORY = os.path.dirname(preloadable.__file__)
"""Directory with files of the core that the processes of a script import by path."""

ERROR_VARIABLE = "DRAWBAR_LAUNCH_FORK_ERROR"
"""Why a process was not forked. Not the variable of Ray workers, which would inherit it."""

PROGRAM_MARKER_VARIABLE = program_server.MARKER_VARIABLE
NO_PYTHON, CPUS_VARIABLE = program_main.NO_PYTHON, program_main.CPUS_VARIABLE

_MAX_ERROR_BYTES = 1 << 16


class ProgramChild(Protocol):
    """Process of a program.

    Attributes:
        pid: Process ID, which no other process gets before `collect` returns.
    """

    pid: int

    def wait_for_end(self) -> None:
        """Wait until the process has ended. Only one thread may call it."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        ...

    def collect(self) -> int:
        """Wait until the process has ended, and release its ID.

        Returns:
            The exit code, or the negative number of the signal that killed the process.
        """
        ...


class WaitForReply(Protocol):
    """Wait until a fork server replies."""

    def __call__(self, connection: socket.socket, *, process_id: int) -> None:
        """Wait until the connection has data.

        Args:
            connection: Connection to the server.
            process_id: Process ID and process group of the server.

        Raises:
            ForkServerError: The server has not replied in time.
        """
        ...


class NewProcess:
    """Child process with a new interpreter.

    Args:
        arguments: Command line after `python`.
        environment: Complete environment of the process.
        streams: Descriptors for standard input, output, and error.
        descriptors: Other descriptors of the process, which are the first arguments of its script.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        descriptors: Sequence[int],
    ) -> None:
        script, *others = arguments
        self._process = subprocess.Popen(
            [sys.executable, script, *map(str, descriptors), *others],
            env=environment,
            pass_fds=descriptors,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            # As torchrun does: Linux divides CPU time among sessions (sched_autogroup), and all
            # ranks would share the time of one session. Ctrl-C in a terminal then reaches only the
            # launcher.
            start_new_session=True,
        )
        self.pid = self._process.pid

    def wait_for_end(self) -> None:
        """Wait until the process has ended. It is not collected, so its ID is not reused."""
        with contextlib.suppress(ChildProcessError):  # it was collected
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self._process.returncode is None:
            os.kill(self.pid, number)  # Popen.send_signal would collect it

    def collect(self) -> int:
        """See `ProgramChild.collect`."""
        return self._process.wait()


class ForkedProcess:
    """Process that a fork server has forked.

    Args:
        connection: Connection to the server, for this process.
        pid: Process ID.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self._status: int | None = None

    def wait_for_end(self) -> None:
        """Wait until the process has ended."""
        with self._lock:
            if self._status is None:
                self._status = client.wait_for_status(self._connection, self.pid, self._pidfd)

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def collect(self) -> int:
        """See `ProgramChild.collect`. The server keeps the ID until the connection is closed."""
        self.wait_for_end()
        self._connection.close()
        os.close(self._pidfd)
        assert self._status is not None  # it has ended
        # Without a status, the server has ended, and the kernel has killed the process.
        return -signal.SIGKILL if self._status < 0 else os.waitstatus_to_exitcode(self._status)


class ProgramForkServer:
    """Fork server for the ranks of one run on this machine. It starts with the first rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: list[int] = []  # descriptors of its standard output and error
        self._control: socket.socket | None = None
        self._identity: object = None
        self._error = ""

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
        descriptors: Sequence[int],
        wait_for_reply: WaitForReply,
    ) -> ForkedProcess:
        """Fork a process.

        Args:
            arguments: As for `NewProcess`: the script of Drawbar, `CORE_DIRECTORY`, and the command
                line of a rank.
            environment: As for `NewProcess`.
            streams: As for `NewProcess`.
            descriptors: As for `NewProcess`.
            wait_for_reply: As for `start_program`.

        Raises:
            ForkServerError: The server does not fork processes.
            OSError: The server has ended, or cannot be started.
        """
        server, control = self._use_server(arguments[2:], environment)
        connection, server_connection = socket.socketpair()
        pid = os.getpid()
        request = {
            "arguments": arguments,
            "environment": environment,
            "directory": os.getcwd(),
            "owner": (read_node_id(), pid, read_start_time(pid)),
            "raylet": pid,
        }
        try:
            with server_connection:
                socket.send_fds(control, [b"\n"], [server_connection.fileno()])
            child = client.request_fork(
                connection,
                request,
                (*streams, *descriptors),
                partial(wait_for_reply, process_id=server),
            )
            if child is None:
                raise ForkServerError(f"the fork server has ended. {self._read_last_error()}")
            return ForkedProcess(connection, child)
        except ForkServerError as error:
            connection.close()
            self._error = str(error)
            raise
        except BaseException:
            connection.close()
            raise

    def _use_server(
        self, program: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[int, socket.socket]:
        """Start the server unless it runs, and return its process ID and its socket.

        Raises:
            ForkServerError: The server must not be used for this rank.
            OSError: The server cannot be started.
        """
        shared = {name: environment[name] for name in environment.keys() - RANK_VARIABLES}
        identity = (program, shared, os.getcwd())
        with self._lock:
            if self._error:
                raise ForkServerError(self._error)
            if self._process is None or self._process.poll() is not None:
                marker = "0" * len(environment[PROGRAM_MARKER_VARIABLE])
                self._start(program, {**shared, PROGRAM_MARKER_VARIABLE: marker})
                self._identity = identity
            elif identity != self._identity:
                raise ForkServerError("this rank and the fork server have different environments")
            assert self._process is not None  # it was started
            assert self._control is not None
            return self._process.pid, self._control

    def _start(self, program: Sequence[str], environment: Mapping[str, str]) -> None:
        self.close()
        self._output = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._control, listener = socket.socketpair()
        with listener:
            descriptor = listener.fileno()
            arguments = [str(descriptor), CORE_DIRECTORY, *program]
            self._process = subprocess.Popen(
                [sys.executable, program_server.__file__, *arguments],
                env=environment,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=self._output[0],
                stderr=self._output[1],
                start_new_session=True,  # Ctrl-C in a terminal must not reach it
            )

    def _read_last_error(self) -> str:
        text = os.pread(self._output[1], _MAX_ERROR_BYTES, 0).decode(errors="replace")
        return "".join(text.splitlines()[-1:])

    def close(self) -> None:
        """Kill the server. The kernel then kills processes that still run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
        while self._output:
            os.close(self._output.pop())


class _ThreadForkServer(threading.local):
    fork_server: ProgramForkServer | None = None


_thread = _ThreadForkServer()


def run_with_fork_server(
    fork_server: ProgramForkServer, function: Callable[..., object], *arguments: object
) -> object:
    """Call a function, and fork the programs that it starts in this thread.

    Args:
        fork_server: Server that forks the programs.
        function: Function to call.
        arguments: Arguments of the function.

    Returns:
        Return value of the function.
    """
    _thread.fork_server = fork_server
    try:
        return function(*arguments)
    finally:
        _thread.fork_server = None


def start_program(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    descriptors: Sequence[int],
    wait_for_reply: WaitForReply,
) -> ProgramChild:
    """Fork a process if possible, and otherwise start a new interpreter.

    Args:
        arguments: As for `NewProcess`.
        environment: As for `NewProcess`.
        streams: As for `NewProcess`.
        descriptors: As for `NewProcess`.
        wait_for_reply: Waits until a connection to the fork server has data.

    Raises:
        OSError: The process cannot be started.
    """
    environment = {name: environment[name] for name in environment if name != ERROR_VARIABLE}
    fork_server = _thread.fork_server
    if fork_server is not None and _may_import_framework(arguments[2:]):
        try:
            return fork_server.fork(arguments, environment, streams, descriptors, wait_for_reply)
        except (OSError, ForkServerError) as error:
            environment = {**environment, ERROR_VARIABLE: str(error)}
    return NewProcess(arguments, environment, streams, descriptors)


def open_pipes(
    stack: contextlib.ExitStack, streams: Sequence[OutputStream]
) -> tuple[dict[OutputStream, IO[bytes]], dict[OutputStream, int]]:
    """Open pipes for the output of a process.

    Args:
        stack: Closes the writing ends.
        streams: Streams of the process that need a pipe.

    Returns:
        The reading ends, and the descriptors of the writing ends.
    """
    readers: dict[OutputStream, IO[bytes]] = {}
    writers: dict[OutputStream, int] = {}
    for stream in streams:
        reader, writer = os.pipe()
        stack.callback(os.close, writer)
        readers[stream] = open(reader, "rb", buffering=0)  # noqa: SIM115  # until close()
        writers[stream] = writer
    return readers, writers


def _may_import_framework(program: Sequence[str]) -> bool:
    """Return whether a fork server can be useful. The files of a module are not searched for."""
    if program[0] in ("-m", NO_PYTHON):
        return program[0] == "-m"
    source = Path(program[0]).read_bytes()
    return any(name.encode() in source for name in preloadable.FRAMEWORKS)
