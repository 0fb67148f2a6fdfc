"""Process that imports modules once and forks workers, which then have them.

`client.py` starts it, one per node and environment, with the socket as descriptor 3. It has a
single thread and serves one request after the other:

    -> newline with the descriptors of the standard streams
    -> {"arguments": [...], "environment": {...}, "directory": "...", "owner": [...], "raylet": 1}
    <- {"pid": 1}          the worker was forked
    <- {"status": 0}       the worker has ended
    <- {"error": "..."}    the modules cannot be used for forks
    <- {}                  an imported file has changed: connect again

It ends when the drivers that used it have ended (on another node, that node's raylet), when it has
had no worker for 10 minutes, and when a file that it has imported has changed. Workers outlive it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.machinery
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, ModuleType

_LISTENER = 3
_IDLE_S = 600.0
# The worker's sentinel reads the exit status of a process that its parent has not collected yet.
_REAP_DELAY_S = 3.0
_REQUEST_TIMEOUT_S = 10.0

UNSAFE_MODULES = {
    "ray": "a forked process cannot connect to Ray",
    "jax": "it starts threads",
    "jaxlib": "it starts threads",
    "tensorflow": "it starts threads",
    "grpc": "it starts threads",
}


class Request:
    """Request to fork a worker: a connection, its message, and the standard streams."""

    def __init__(self, connection: socket.socket) -> None:
        # Another user must not run code in this process, even with access to the socket.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise PermissionError("the client is a process of another user")
        connection.settimeout(_REQUEST_TIMEOUT_S)
        _, self.streams, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as stream:
            message = json.loads(stream.readline())
        connection.settimeout(None)
        self.connection = connection
        self.arguments: list[str] = message["arguments"]
        self.environment: dict[str, str] = message["environment"]
        self.directory: str = message["directory"]
        self.owner: tuple[str, int, str] = tuple(message["owner"])
        self.raylet: int = message["raylet"]

    def close(self) -> None:
        """Close the streams, which belong to the worker."""
        for stream in self.streams:
            os.close(stream)


class ImportedFiles:
    """Files of all imported modules, as they were when they were imported."""

    def __init__(self) -> None:
        modules = [(name, _get_file(module)) for name, module in sys.modules.items()]
        self._versions = {file: _get_version(file) for _, file in modules if file}
        # Modules that another finder has found, for example of an editable package, are not here.
        self._found = {
            name: file for name, file in modules if "." not in name and file == _find_file(name)
        }

    def have_changed(self) -> bool:
        """Return whether a fresh process might import something else."""
        importlib.invalidate_caches()
        return any(_get_version(file) != old for file, old in self._versions.items()) or any(
            _find_file(name) != file for name, file in self._found.items()
        )


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
        path: Path of the socket.
        error: Why workers cannot be forked, "" if they can.
    """

    def __init__(self, path: str, error: str) -> None:
        self._path = path
        self._error = error
        self._files = ImportedFiles()
        self._listener = socket.socket(fileno=_LISTENER)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._owners: dict[int, int] = {}  # pidfds by process ID
        self._has_had_owner = False
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
            timeout = _REAP_DELAY_S if self._ended or self._error else _IDLE_S
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
        limit = _REAP_DELAY_S if self._error else _IDLE_S
        return not self._workers and time.monotonic() - self._idle_since > limit

    def _close(self) -> None:
        """Remove the socket, so that the next client starts a new server."""
        if not self._is_closed:
            with open(f"{self._path}.lock", "w") as lock:  # clients connect with this lock
                fcntl.flock(lock, fcntl.LOCK_EX)
                for file in (self._path, f"{self._path}.log"):
                    with contextlib.suppress(OSError):
                        os.unlink(file)
            self._is_closed = True

    def _accept(self) -> Request | None:
        """Handle a connection. Returns the request in a forked worker, and None in the server."""
        try:
            connection, _ = self._listener.accept()
            request = Request(connection)
        except (OSError, ValueError, KeyError):
            return None
        self._add_owner(request)
        if self._error:
            _reply(connection, {"error": self._error})
        elif self._files.have_changed():
            self._close()
            _reply(connection, {})
        else:
            pid = os.fork()
            if pid == 0:
                self._close_in_worker()
                return request
            self._add_worker(Worker(pid, os.pidfd_open(pid), connection))
        request.close()
        return None

    def _add_owner(self, request: Request) -> None:
        """Watch the driver, or the node's raylet if the driver runs on another node."""
        boot_id, driver, start_time = request.owner
        is_here = boot_id == read_boot_id() and start_time == read_start_time(driver)
        pid = driver if is_here else request.raylet
        self._has_had_owner = True
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
        with contextlib.suppress(KeyError):  # after a hangup
            self._selector.unregister(worker.connection)
        os.close(worker.pidfd)
        worker.connection.close()
        self._idle_since = time.monotonic()
        self._ended.append((self._idle_since, worker.pid))

    def _on_hangup(self, worker: Worker) -> None:
        """Kill a worker whose client was killed: Ray has ended it."""
        self._selector.unregister(worker.connection)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def _collect_ended(self, before: float) -> None:
        while self._ended and self._ended[0][0] <= before:
            _, pid = self._ended.popleft()
            os.waitpid(pid, 0)

    def _close_in_worker(self) -> None:
        self._selector.close()
        self._listener.close()
        for pidfd in self._owners.values():
            os.close(pidfd)
        for worker in self._workers.values():
            os.close(worker.pidfd)
            worker.connection.close()


def main(path: str, modules: list[str], sys_path: list[str]) -> None:
    """Import modules, and fork workers from then on."""
    del sys.path[0]  # the directory of this file
    original_path = list(sys.path)
    sys.path[:] = [*sys_path, *(entry for entry in original_path if entry not in sys_path)]
    original_environment = dict(os.environ)
    error = _import(modules)
    imported_environment = dict(os.environ.items() - original_environment.items())
    # Otherwise the first garbage collection of a worker would copy the pages of all objects.
    gc.collect()
    gc.freeze()
    request = ForkServer(path, error).serve()
    if request is None:
        os._exit(0)  # exit handlers of the imported modules belong to the workers
    request.environment.update(imported_environment)
    code = _become_worker(request, original_path)
    exec(code, vars(sys.modules["__main__"]))


def _import(modules: list[str]) -> str:
    """Import modules and return why this process must not fork workers, "" if it may."""
    # Some modules ask torch for GPUs when they are imported, which must not initialize CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"import {name} raised {type(error).__name__}: {error}"
        if reason := _find_danger():
            return f"import {name} {reason}"
    return ""


def _find_danger() -> str:
    """Return the effect of an import that makes a fork unsafe, "" if there is none."""
    for name, reason in UNSAFE_MODULES.items():
        if name in sys.modules:
            return f"imported {name}, which must not be forked: {reason}"
    if threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()[1:]]
        return f"started threads, which a fork would lose: {names}"
    devices = [file for file in _list_open_files() if file.startswith("/dev/nvidia")]
    if devices:
        return f"initialized CUDA, which a forked process cannot use: {devices}"
    return ""


def _become_worker(request: Request, original_path: list[str]) -> CodeType:
    """Set the state of a fresh interpreter in this process, and return the code to run."""
    os.setpgid(0, 0)  # Ray's kill of one worker must not reach another process
    for descriptor, stream in enumerate(request.streams):
        os.dup2(stream, descriptor)
    request.close()
    request.connection.close()
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    script = request.arguments[0]
    sys.argv = request.arguments
    sys.path[:] = [os.path.dirname(script), *original_path]
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


def _reply(connection: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the client has ended
        connection.sendall(json.dumps(message).encode() + b"\n")


def _list_open_files() -> list[str]:
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listed directory
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


def _get_file(module: object) -> str | None:
    spec = getattr(module, "__spec__", None)
    return spec.origin if spec is not None and spec.has_location else None


def _get_version(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _find_file(name: str) -> str | None:
    spec = importlib.machinery.PathFinder.find_spec(name)
    return spec.origin if spec is not None else None


def read_boot_id() -> str:
    """Return the ID of the running kernel, which differs between machines."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def read_start_time(pid: int) -> str:
    """Return the start time of a process, which a later process of the same ID does not share."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
