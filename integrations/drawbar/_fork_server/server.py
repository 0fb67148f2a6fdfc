"""Process that imports modules once and forks workers, which then have them.

`client.py` starts it, one per job, node, and environment, with the socket as descriptor 3. It has a
single thread and serves one request after the other:

    -> newline with the descriptors of the standard streams, and others for the worker
    -> {"arguments": [...], "environment": {...}, "directory": "...", "owner": [...], "raylet": 1}
    <- {"pid": 1}          the worker was forked
    <- {"status": 0}       the worker has ended
    <- {"error": "..."}    the modules cannot be used for forks
    <- {}                  an imported file has changed: connect again

    -> newline without descriptors
    -> {"left_by": "..."}  this driver uses another server now

It ends when the drivers on this node that used it have ended, when the node's raylet has ended,
when it has had no worker for 10 minutes, or for 1 minute after all drivers have left it, and when a
file that it has imported has changed. Workers outlive it.

It imports Ray, but never connects. Ray reads its variables (the job, the raylet, the token) when it
is imported, so the server has the same variables as the workers. It starts no threads before it
connects.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import CodeType, ModuleType

if __package__:
    from drawbar._fork_server import forkable
else:  # this file runs by path
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import forkable  # type: ignore[import-not-found, no-redef]

    del sys.path[0], sys.modules["forkable"]

_LISTENER = 3
_MAX_DESCRIPTORS = 8
_IDLE_S = 600.0
_LEFT_IDLE_S = 60.0
# The worker's sentinel reads the exit status of a process that its parent has not collected yet.
_REAP_DELAY_S = 3.0
_REQUEST_TIMEOUT_S = 10.0


class Request:
    """Request to fork a worker: a connection, its message, and descriptors.

    Descriptors after the standard streams are the first arguments of the worker's script. If
    `left_by` is not None, it is the notice of a driver that uses another server, and has no
    other attributes.
    """

    def __init__(self, connection: socket.socket) -> None:
        # Another user must not run code in this process, even with access to the socket.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise PermissionError("the client is a process of another user")
        connection.settimeout(_REQUEST_TIMEOUT_S)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, _MAX_DESCRIPTORS)
        self.streams, self.descriptors = descriptors[:3], descriptors[3:]
        with connection.makefile("rb") as stream:
            message = json.loads(stream.readline())
        connection.settimeout(None)
        self.left_by = tuple(message["left_by"]) if "left_by" in message else None
        if self.left_by is not None:
            connection.close()
            return
        self.connection = connection
        script, *arguments = message["arguments"]
        self.arguments: list[str] = [script, *map(str, self.descriptors), *arguments]
        self.environment: dict[str, str] = message["environment"]
        self.directory: str = message["directory"]
        self.owner: tuple[str, int, str] = tuple(message["owner"])
        self.raylet: int = message["raylet"]
        self.command: str = message.get("command", "")

    def close(self) -> None:
        """Close the descriptors, which belong to the worker."""
        for descriptor in (*self.streams, *self.descriptors):
            os.close(descriptor)


@dataclass
class Worker:
    """A forked worker.

    Attributes:
        pid: Process ID.
        pidfd: Its pidfd.
        connection: Connection to its client.
    """

    pid: int
    pidfd: int
    connection: socket.socket


class ForkServer:
    """Fork workers for clients until the owners have ended.

    Args:
        listener: Descriptor of the socket for clients. If it has no path, it does not listen, but
            its only client sends a descriptor of each connection.
        path: Path of the socket, "" if it has none.
        error: Why workers cannot be forked, "" if they can.
        files: Files of the imported modules.
    """

    def __init__(self, listener: int, path: str, error: str, files: forkable.ImportedFiles) -> None:
        self._path = path
        self._error = error
        self._files = files
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._owners: dict[int, int] = {}  # pidfds by process ID
        self._has_had_owner = False
        self._drivers = set[tuple[object, ...]]()  # that have not left
        self._used_commands: set[str] = set()
        self._workers: dict[int, Worker] = {}  # by process ID
        self._ended: deque[tuple[float, int]] = deque()  # time and ID of processes to collect
        self._idle_since = time.monotonic()
        self._is_closed = False

    def serve(self) -> Request | None:
        """Serve clients.

        Returns:
            In a forked worker, the request; None in the server when it must end.
        """
        while not self._is_closed:
            timeout = _REAP_DELAY_S if self._ended else self._get_idle_limit()
            for key, _ in self._selector.select(timeout):
                if key.data is not None:
                    key.data()
                elif (request := self._accept()) is not None:
                    return request
            self._collect_ended(time.monotonic() - _REAP_DELAY_S)
            if self._must_end():
                self._close()
        return None

    def _must_end(self) -> bool:
        if self._has_had_owner and not self._owners:
            return True
        is_idle = time.monotonic() - self._idle_since > self._get_idle_limit()
        return is_idle and not self._workers

    def _get_idle_limit(self) -> float:
        """Return how long this server may have no workers, in seconds."""
        # The client that has started the server connects before its imports, unless it was killed.
        is_used = self._has_had_owner or not self._path
        if not is_used or self._error:
            return _REAP_DELAY_S
        return _IDLE_S if self._drivers or not self._path else _LEFT_IDLE_S

    def _close(self) -> None:
        """Remove the socket, so that the next client starts a new server."""
        if self._path and not self._is_closed:
            directory = os.open(os.path.dirname(self._path), os.O_RDONLY)
            fcntl.flock(directory, fcntl.LOCK_EX)  # clients connect with this lock
            for file in (self._path, f"{self._path}.log"):
                with contextlib.suppress(OSError):
                    os.unlink(file)
            os.close(directory)
        self._is_closed = True

    def _accept(self) -> Request | None:
        """Handle a connection. Returns the request in a forked worker, and None in the server."""
        try:
            if (connection := self._receive_connection()) is None:
                return None
            request = Request(connection)
        except (OSError, ValueError, KeyError):
            return None
        if request.left_by is not None:
            self._drivers.discard(request.left_by)
            return None
        self._drivers.add(request.owner)
        self._add_owner(request)
        if self._error:
            _reply(connection, {"error": self._error})
        elif request.command in self._used_commands:
            _reply(connection, {"is_used": True})
        elif _has_hung_up(connection):
            pass  # the process would start only to be killed
        elif self._files.have_changed():
            self._on_change(connection)
        elif self._fork(connection, request.command):
            return request
        request.close()
        return None

    def _receive_connection(self) -> socket.socket | None:
        if self._path:
            return self._listener.accept()[0]
        data, descriptors, _, _ = socket.recv_fds(self._listener, 1, 1)
        self._is_closed |= not data  # the client has ended
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def _on_change(self, connection: socket.socket) -> None:
        """Stop forking workers, because an imported file has changed."""
        if self._path:
            self._close()
            _reply(connection, {})
        else:  # the workers would end with this server
            self._error = "an imported file has changed"
            _reply(connection, {"error": self._error})

    def _fork(self, connection: socket.socket, command: str) -> bool:
        """Fork a worker. Returns True in the worker."""
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            _reply(connection, {"error": f"the fork server cannot fork: {error}"})
            return False
        if pid == 0:
            self._close_in_worker()
            return True
        self._used_commands |= {command} - {""}
        self._add_worker(Worker(pid, os.pidfd_open(pid), connection))
        return False

    def _add_owner(self, request: Request) -> None:
        """Watch the node's raylet, and the driver if it runs on this node."""
        node, driver, start_time = request.owner
        if not self._has_had_owner:
            self._has_had_owner = True
            with contextlib.suppress(ProcessLookupError):
                self._watch(os.pidfd_open(request.raylet), self._close)
        is_here = node == forkable.read_node_id()
        if is_here and start_time != forkable.read_start_time(driver):
            return  # the driver has ended
        pid = driver if is_here else request.raylet
        if pid not in self._owners:
            with contextlib.suppress(ProcessLookupError):
                self._owners[pid] = os.pidfd_open(pid)
                self._watch(self._owners[pid], partial(self._remove_owner, pid))

    def _remove_owner(self, pid: int) -> None:
        pidfd = self._owners.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _add_worker(self, worker: Worker) -> None:
        self._workers[worker.pid] = worker
        self._watch(worker.pidfd, partial(self._on_end, worker))
        self._watch(worker.connection, partial(self._on_hangup, worker))
        _reply(worker.connection, {"pid": worker.pid})

    def _watch(self, file: int | socket.socket, callback: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, callback)

    def _on_end(self, worker: Worker) -> None:
        del self._workers[worker.pid]
        result = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None  # it has ended
        is_exit = result.si_code == os.CLD_EXITED
        _reply(worker.connection, {"status": result.si_status << 8 * is_exit})
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        self._idle_since = time.monotonic()
        self._collect_after_hangup(worker)

    def _on_hangup(self, worker: Worker) -> None:
        """Kill a worker whose client was killed: Ray has ended it."""
        self._selector.unregister(worker.connection)
        worker.connection.close()
        if worker.pid in self._workers:
            os.kill(worker.pid, signal.SIGKILL)
        self._collect_after_hangup(worker)

    def _collect_after_hangup(self, worker: Worker) -> None:
        """Collect an ended worker later. Until then, no other process can get its ID."""
        if worker.pid not in self._workers and worker.connection.fileno() == -1:
            self._ended.append((time.monotonic(), worker.pid))

    def _collect_ended(self, before: float) -> None:
        while self._ended and self._ended[0][0] <= before:
            _, pid = self._ended.popleft()
            os.waitpid(pid, 0)

    def _close_in_worker(self) -> None:
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


def main(path: str, modules: list[str], worker_modules: list[str], sys_path: list[str]) -> None:
    """Import modules, and fork workers from then on."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file
    original_path = list(sys.path)
    sys.path[:] = [*sys_path, *(entry for entry in original_path if entry not in sys_path)]
    path_before = list(sys.path)
    original = {**os.environ, **forkable.SERVER_VARIABLES}
    error = forkable.import_modules(modules, worker_modules)
    changed = os.environ.items() - original.items()
    added = [entry for entry in sys.path if entry not in path_before]  # by the imports
    request = serve_until_forked(_LISTENER, path, error)
    request.environment.update(changed)
    os.setpgid(0, 0)  # Ray's kill of one worker must not reach another process
    code = become_worker(request, original_path)
    sys.path[:0] = added
    exec(code, vars(sys.modules["__main__"]))


def serve_until_forked(
    listener: int, path: str, error: str, other_files: Iterable[str] = ()
) -> Request:
    """Serve clients, and end this process when there are none.

    Args:
        listener: Descriptor of the socket for clients.
        path: Path of the socket, "" if it has none.
        error: Why workers cannot be forked, "" if they can.
        other_files: Files on which the imports depend, in addition to the modules.

    Returns:
        The request of a forked worker, in this worker.
    """
    # Otherwise the first garbage collection of a worker would copy the pages of all objects.
    gc.freeze()
    request = ForkServer(
        listener, path, error, forkable.ImportedFiles([forkable.__file__, *other_files])
    ).serve()
    if request is None:
        os._exit(0)  # exit handlers of the imported modules belong to the workers
    return request


def become_worker(request: Request, original_path: list[str]) -> CodeType:
    """Set the state of a fresh interpreter in this process.

    Args:
        request: Request for this worker.
        original_path: Import path of the interpreter, without a directory of a script.

    Returns:
        The code to run in the new `__main__`.
    """
    for descriptor, stream in enumerate(request.streams):
        os.dup2(stream, descriptor)
    for stream in request.streams:
        os.close(stream)
    request.connection.close()
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    script = request.arguments[0]
    sys.argv = request.arguments
    sys.path[:] = (
        original_path if sys.flags.safe_path else [os.path.dirname(script), *original_path]
    )
    _reseed()
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    main_module.__file__ = script
    vars(main_module)["__builtins__"] = __builtins__
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec", dont_inherit=True)


def _reseed() -> None:
    """Seed each worker differently, like fresh processes. `random` does it itself."""
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()


def _has_hung_up(connection: socket.socket) -> bool:
    """Return whether the client has ended, or no longer wants the worker."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _reply(connection: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the client has ended
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
